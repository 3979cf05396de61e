"""A small mixture of experts for the example's task, made from the dense checkpoint (sparse upcycling, arXiv 2212.05055)."""

from __future__ import annotations

import shutil
from pathlib import Path

from examples.words import CHECKPOINT

__all__ = ["mixture"]

#: standard deviation of an expert's weights from the dense model's, relative to these
_NOISE = 0.1
_ROUTER = 0.05  # standard deviation of the router's weights
_TAKEN = 2  # experts of a token


def mixture(folder: Path, experts: int) -> Path:
    """The folder of a mixture that answers about as well as the dense model. The first call makes it.

    Each expert is the dense MLP with its own noise, and the weights of a token's two experts add up to 1.
    """
    if not (folder / "config.json").exists():
        made = folder.with_suffix(".part")
        _make(made, experts)
        made.rename(folder)
    return folder


def _make(folder: Path, experts: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(CHECKPOINT, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json", "warm_start.json"))
    dense = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    same = {key: value for key, value in dense.config.to_dict().items() if key not in ("model_type", "architectures")}
    sizes = {"num_experts": experts, "num_experts_per_tok": _TAKEN, "moe_intermediate_size": dense.config.intermediate_size}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**same, **sizes, norm_topk_prob=True))
    generator = torch.Generator().manual_seed(0)

    def noisy(weight: torch.Tensor) -> torch.Tensor:
        repeated = weight.expand(experts, *weight.shape)
        return repeated * (1 + _NOISE * torch.randn(repeated.shape, generator=generator))

    weights = dense.state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            block = name.rpartition(".mlp.")[0]
            if name.endswith("experts.gate_up_proj"):
                gate, up = (weights[f"{block}.mlp.{part}_proj.weight"] for part in ("gate", "up"))
                parameter.copy_(noisy(torch.cat((gate, up))))
            elif name.endswith("experts.down_proj"):
                parameter.copy_(noisy(weights[f"{block}.mlp.down_proj.weight"]))
            elif name.endswith("mlp.gate.weight"):
                parameter.copy_(_ROUTER * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.copy_(weights[name])
    model.to(torch.bfloat16).save_pretrained(folder)
