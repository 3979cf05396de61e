"""``jetrl doctor``: whether a launch would start, and what the plugin would change."""
