"""The patch engine: journal, patches, import hooks, version guards. It imports neither torch nor a framework."""
