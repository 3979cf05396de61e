"""``jetrl doctor``: whether a run would start here, and what would be changed, found out without changing anything."""
