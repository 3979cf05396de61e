"""A checkpoint with layers that FP8 holds badly, in a model that computes what it computed before."""

from __future__ import annotations

from pathlib import Path

MLP = "model.layers.1.mlp"
#: outliers in two rows: the weights that share a block with them lose their bits
WEIGHT_ILL = f"{MLP}.up_proj"
#: reads two channels that are 1e5 times the others, with weights of zero: only its activations are ill
ACTIVATION_ILL = f"{MLP}.down_proj"
#: between the ill (10 to 20 dB) and the well (24 dB for a weight with columns of nearly zero, else 31 dB) in ``slice_sqnr``
FLOOR = 22.0


def make_ill(model: Path) -> None:
    """Change ``model.safetensors`` of a checkpoint of ``tests.models`` in place."""
    from safetensors.torch import load_file, save_file

    file = model / "model.safetensors"
    weights = load_file(file)
    weights[f"{WEIGHT_ILL}.weight"][[3, 7]] *= 1e5
    weights[f"{ACTIVATION_ILL}.weight"][:, [3, 7]] = 0
    save_file(weights, file, metadata={"format": "pt"})
