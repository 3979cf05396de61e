"""The command line, ``jetrl``."""
