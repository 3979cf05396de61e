"""Triton kernels for Hopper, tested in Triton's interpreter and compiled ahead of time."""
