"""The patch engine: journal, import hooks, version guards. It imports neither torch nor a framework."""
