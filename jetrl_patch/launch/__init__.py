"""``jetrl run``: run an unmodified program in this process, with the plugin enabled if requested."""
