"""``jetrl doctor``: check whether a run would start here and what the plugin would change, without changing anything."""
