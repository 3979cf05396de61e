"""Launches and memory traffic of a transformer block on a Hopper GPU, counted without one; ``counted.md`` explains."""
