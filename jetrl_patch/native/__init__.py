"""C kernels for the CPU: the fast, row-independent half of the exact flow (compiled at first use)."""
