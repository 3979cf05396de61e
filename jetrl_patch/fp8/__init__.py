"""FP8 linear layers, experts and LoRA, and the conversion of a model in place. Imports no framework but torch."""
