"""The FP8 format, and Triton kernels for Hopper and Blackwell, tested in Triton's interpreter and compiled ahead of time."""
