"""A layer of experts as vLLM makes it, without an engine, and what a trainer sends it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch

from jetrl_patch.fp8.convert import per_expert
from jetrl_patch.fp8.experts import Experts
from jetrl_patch.session import active_config
from jetrl_patch.sync.digest import Pieces

NAME = "model.layers.0.mlp.experts"
E, H, I, K = 5, 320, 200, 2
SHARD = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def empty_layer(**changes: Any) -> Any:
    from jetrl_patch.adapters.vllm.experts import MoEActivation

    layer = torch.nn.Module()
    sizes = {f"{kind}_{what}": value for kind in ("tp", "dp", "pcp", "ep") for what, value in (("size", 1), ("rank", 0))}
    ranks = {**sizes, "enable_eplb": False}
    parallel = SimpleNamespace(**{k: changes.pop(k, v) for k, v in ranks.items()})
    settings = {
        "moe_config": SimpleNamespace(moe_parallel_config=parallel, num_experts=changes.pop("num_experts", E)),
        "layer_name": NAME,
        "activation": MoEActivation.SILU,
        "apply_router_weight_on_input": False,
        "scoring_func": "softmax",
        "use_grouped_topk": False,
        "e_score_correction_bias": None,
        "custom_routing_function": None,
        "routed_scaling_factor": 1.0,
        "top_k": K,
        "renormalize": True,
        "local_num_experts": E,
        "expert_placement_strategy": "linear",
    }
    for key, value in {**settings, **changes}.items():
        setattr(layer, key, value)
    return layer


def method_of(layer: Any, quantized: bool = True) -> Any:
    from jetrl_patch.adapters.vllm.experts import QuantizedExpertsMethod

    method = QuantizedExpertsMethod(active_config(), layer, NAME, quantized)
    method.create_weights(layer, E, H, I, torch.bfloat16)
    return method


def weights() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        f"{NAME}.gate_up_proj": (torch.randn(E, 2 * I, H, generator=g) * 0.05).to(torch.bfloat16),
        f"{NAME}.down_proj": (torch.randn(E, H, I, generator=g) * 0.07).to(torch.bfloat16),
    }


def load(layer: Any, name: str, tensor: torch.Tensor) -> None:
    expert, part, kind = name.removeprefix(f"{NAME}.").split(".")
    parameter = getattr(layer, f"{'w2' if part == 'down_proj' else 'w13'}_{kind}")
    assert parameter.weight_loader(
        param=parameter, loaded_weight=tensor, weight_name=name, shard_id=SHARD[part], expert_id=int(expert), return_success=True
    )


def per_matrix() -> dict[str, torch.Tensor]:
    return dict(itertools.chain.from_iterable(per_expert(*item) for item in weights().items()))


def load_all(layer: Any) -> None:
    for name, weight in per_matrix().items():
        load(layer, name, weight)


def made_by(own: Experts, matrices: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the trainer sends of every matrix in FP8."""
    made = {f"{NAME}.{name}.weight": matrix.fp8 for name, matrix in own.matrices()}
    sent = {name: state.quantized(matrices[name]) for name, state in made.items()}
    return {name: q.q for name, q in sent.items()} | {f"{name}_scale_inv": q.s_blocks for name, q in sent.items()}


def tokens(count: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and the router's logits."""
    g = torch.Generator().manual_seed(1)
    return torch.randn(count, H, generator=g).to(torch.bfloat16), torch.randn(count, E, generator=g).to(dtype)


def digests(method: Any, layer: Any) -> dict[str, int]:
    from jetrl_patch.adapters.vllm.install import _add_weight

    pieces, found = Pieces(), dict[str, int]()
    for piece in method.pieces(layer):
        _add_weight(pieces, piece.shard, piece.weight)
        if piece.scale is not None:
            method.format.scales.add_to(pieces, piece.shard, piece.scale)
    for rect in pieces.read():
        found[rect.name] = (found.get(rect.name, 0) + rect.digest) % 2**64
    return found
