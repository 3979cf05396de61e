"""Triton kernels for Hopper: quantizers and the three GEMMs, tested in the interpreter and compiled ahead."""
