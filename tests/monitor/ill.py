"""Change a checkpoint so that FP8 represents some layers badly, without changing what the model computes."""

from __future__ import annotations

from pathlib import Path

MLP = "model.layers.1.mlp"
#: outliers in two rows: weights in the same block lose their precision
WEIGHT_ILL = f"{MLP}.up_proj"
#: reads two channels that are 1e5 times the others, with zero weights: only its activations are affected
ACTIVATION_ILL = f"{MLP}.down_proj"
#: between the bad layers (10 to 20 dB) and the good ones (24 dB for a weight with near-zero columns, else 31 dB)
FLOOR = 22.0


def make_ill(model: Path) -> None:
    """Change ``model.safetensors`` of a checkpoint of ``tests.models`` in place."""
    from safetensors.torch import load_file, save_file

    file = model / "model.safetensors"
    weights = load_file(file)
    weights[f"{WEIGHT_ILL}.weight"][[3, 7]] *= 1e5
    weights[f"{ACTIVATION_ILL}.weight"][:, [3, 7]] = 0
    save_file(weights, file, metadata={"format": "pt"})
