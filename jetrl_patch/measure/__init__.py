"""What is measured: the mismatch and its corrections, statistics of FP8, routes."""
