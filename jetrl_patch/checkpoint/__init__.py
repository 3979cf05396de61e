"""Checkpoints: what settings one was saved with, and its export to a plain or a block-FP8 Hugging Face folder."""
