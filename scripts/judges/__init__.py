"""Run the test suites and checkers of others with the plugin off and on: ``python -m scripts.judges``."""
