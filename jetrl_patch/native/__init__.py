"""C kernels for the CPU: fast, row-independent forward ops, compiled at first use."""
