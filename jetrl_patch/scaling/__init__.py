"""Factors moved between a norm and the linears that read it; the function is the same in exact arithmetic (torch only)."""
