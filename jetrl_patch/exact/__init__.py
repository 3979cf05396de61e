"""Ops that make trainer and rollout agree outside the FP8 linears: one function per op, called by both sides."""
