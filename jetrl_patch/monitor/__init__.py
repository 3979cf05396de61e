"""How well FP8 holds a run's tensors, layer by layer, and which layers had better run in BF16. torch and the FP8 core only."""
