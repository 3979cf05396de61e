"""Weight sync: quantize once in the trainer, send those bytes, prove that they arrived. Imports torch and the FP8 core only."""
