"""What a sync of a model with adapters must send, by hand. For scripts under torchrun, after they have patched themselves."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from jetrl_patch.backends.quantize import quantize_weight
from jetrl_patch.fp8.lora import merged_weight
from jetrl_patch.sync.protocol import COMMIT, MANIFEST, SCALE_SUFFIX

SCALING = 2.0


def merged_values(trained: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """W' in BF16 of every tensor of an FSDP engine's whole state, under the names of the plain model."""
    values = {}
    for name, tensor in trained.items():
        if "lora_" not in name:
            layer = name.removesuffix(".base_layer.weight")
            a, b = (trained.get(f"{layer}.lora_{f}.default.weight") for f in "AB")
            value = tensor if a is None else merged_weight(tensor, a, b, SCALING)
            values[name.replace("base_model.model.", "").replace(".base_layer", "")] = value.to(torch.bfloat16)
    return values


def assert_sent(sent: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor], layers: Collection[str]) -> None:
    """Assert that a sync sent these values, of ``layers`` as FP8 bytes and scales, and nothing else."""
    quantized = {f"{name}.weight" for name in layers}
    assert set(sent) == {*values, *(name + SCALE_SUFFIX for name in quantized), MANIFEST, COMMIT}
    for name, value in values.items():
        if name in quantized:
            q, s = quantize_weight(value, "pow2")
            assert torch.equal(sent[name].view(torch.uint8), q.view(torch.uint8)), name
            assert torch.equal(sent[name + SCALE_SUFFIX], s), name
        else:
            assert torch.equal(sent[name], value), name
