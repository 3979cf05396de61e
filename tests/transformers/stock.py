"""Transformers' own model, what it is given, and its gradients on a converted model's routes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jetrl_patch.exact.ops import token_log_probs

from .. import models, vision_models

#: the tokens of padding and of the end of a text in ``tests.models`` and ``tests.vision_models``
PAD, END = 0, 1


def made(name: str) -> Any:
    """The BF16 model of a family or a variant."""
    for source in (models, vision_models):
        if name in source.VARIANTS:
            family, options = source.VARIANTS[name]
            return source.build(family, **options)
    return (vision_models if name in vision_models.FAMILIES else models).build(name)


def texts(model: Any) -> dict[str, Tensor]:
    """A left-padded batch of texts. In them are padding, ends of texts, repetitions and, for a model with a tower, an image."""
    tower = hasattr(model.config, "vision_config")
    generator = torch.Generator().manual_seed(0)
    last = vision_models.FIRST if tower else model.config.vocab_size
    rows = [torch.randint(2, last, (length,), generator=generator) for length in (3, 17, 40, 29)]
    rows[1][5] = PAD
    rows[2][[3, 4, 20]] = PAD
    rows[2][10] = END
    rows[3][7:12] = rows[3][6]
    rows[3][-1] = END
    found: dict[str, Tensor] = {}
    if tower:
        before, after, place = (vision_models.FIRST + i for i in range(3))
        rows[2] = torch.cat((rows[2][:8], torch.tensor([before, *4 * [place], after]), rows[2][8:]))
        found["pixel_values"] = torch.randn(16, 3 * 2 * model.config.vision_config.patch_size**2, generator=generator)
        found["image_grid_thw"] = torch.tensor([[1, 4, 4]])
    width = max(map(len, rows))
    ids = found["input_ids"] = torch.stack([F.pad(row, (width - len(row), 0), value=PAD) for row in rows])
    mask = found["attention_mask"] = torch.stack([F.pad(torch.ones_like(row), (width - len(row), 0)) for row in rows])
    if tower:
        found["mm_token_type_ids"] = (ids == place).int()
    else:
        found["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    return found


def gradients(model: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of the mean log-prob of all tokens but the first, for each parameter that gets one."""
    model.train().zero_grad()
    dtype = next(model.parameters()).dtype
    inputs = {key: t.to(torch.bfloat16).to(dtype) if t.is_floating_point() else t for key, t in given.items()}
    logits = model(**inputs, use_cache=False).logits
    mask = given["attention_mask"]
    weights = mask[:, 1:].float() * mask[:, :-1]
    log_probs = token_log_probs(logits[:, :-1], given["input_ids"][:, 1:])
    (-(log_probs * weights).sum() / weights.sum()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def routes_of(model: Any, family: Any) -> list[Tensor]:
    """Record the experts of every token, layer by layer, as the model runs."""
    found: list[Tensor] = []
    for module in model.modules():
        if type(module).__name__ in family.experts:
            module.register_forward_pre_hook(lambda _, inputs: found.append(inputs[1]))
    return found


def follow(plain: Any, family: Any, routes: list[Tensor]) -> None:
    """Let transformers' model route as recorded, with its own scores: where a rounding flips a route, gradients jump."""
    turn = iter(routes)

    def weights(p: Tensor, norm: bool, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        ids = next(turn)
        chosen = p.gather(-1, ids)
        return factor * (chosen / chosen.sum(-1, keepdim=True) if norm else chosen), ids

    def route(router: Any) -> Any:
        def forward(x: Tensor) -> tuple[Tensor, ...]:
            logits = F.linear(x.reshape(-1, x.shape[-1]), router.weight)
            if family.chooser:
                return logits, *weights(logits.double().sigmoid(), router.norm_topk_prob, router.routed_scaling_factor)
            return logits, *weights(logits.softmax(-1), getattr(router, "norm_topk_prob", True))

        return forward

    def choose(block: Any) -> Any:
        def route_tokens_to_experts(logits: Tensor) -> tuple[Tensor, Tensor]:
            chosen, ids = weights(logits.double().sigmoid(), block.norm_topk_prob, block.routed_scaling_factor)
            return ids, chosen

        return route_tokens_to_experts

    plain.config._experts_implementation = "eager"
    blocks = [module for module in plain.modules() if hasattr(module, "route_tokens_to_experts")]
    for block in blocks:  # transformers before 5.13, where the routers of these models do not choose
        block.route_tokens_to_experts = choose(block)
    for module in plain.modules() if not blocks else ():
        if type(module).__name__ == family.router:
            module.forward = route(module)
