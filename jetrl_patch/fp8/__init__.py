"""FP8 linear layers: quantizers, the three GEMMs, ``Fp8Linear`` and the in-place swap (torch only)."""
