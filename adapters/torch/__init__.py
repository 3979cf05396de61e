"""torch itself: how the environment alone reaches a program that loads no plugins."""
