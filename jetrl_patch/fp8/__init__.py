"""The FP8 flow of the linear layers: quantizers, the three GEMMs, ``Fp8Linear`` and the swap (torch only)."""
