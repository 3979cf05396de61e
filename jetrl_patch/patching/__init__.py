"""The patch engine: journal, import hooks, guards. It knows neither torch nor any framework."""
