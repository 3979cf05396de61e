"""Scales that move between a norm and the linears that read it, and change nothing in exact arithmetic (torch only)."""
