"""``jetrl run``: a program as it is, in this process, with the plugin on if it is asked for."""
