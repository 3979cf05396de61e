"""Per-layer FP8 quantization statistics, and the guard that moves layers to BF16. Imports torch and the FP8 core only."""
