"""Vision-language models in exact mode: the trainer's vision tower instead of vLLM's, and DeepStack in the trainer's order."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from jetrl_patch.exact import tower
from jetrl_patch.exact.modules import swap
from jetrl_patch.models.families import family_of


class ServedTower:
    """transformers' vision tower with the arguments and the result of vLLM's."""

    device: torch.device

    def forward(self, x: torch.Tensor, grid_thw: Any) -> torch.Tensor:
        """Patches ``[T, K]`` and the grids of their images -> features ``[N, H]``, beside them those of DeepStack."""
        grids = torch.as_tensor(grid_thw, device=self.device)
        found = super().forward(x.to(self.device), grid_thw=grids)  # type: ignore[misc]
        return torch.cat([found.pooler_output, *(getattr(found, "deepstack_features", None) or ())], dim=1)


class DeepStackLayer:
    """A block before an addition of DeepStack. vLLM would add features before the residual, the trainer adds them after it."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = super().forward(*args, **kwargs)  # type: ignore[misc]
        x = residual + x
        return x, torch.zeros_like(x)


@contextlib.contextmanager
def _unpartitioned() -> Iterator[None]:
    """Build whole models, although this process may train others with ZeRO-3."""
    from transformers.integrations import deepspeed

    before = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = before


def _build(hf_config: Any, name: str, like: nn.Module) -> nn.Module:
    """The trainer's tower with uninitialized weights, on the device and in the dtype of vLLM's tower ``like``."""
    from transformers import AutoModel

    held = next(like.parameters())
    with torch.device("meta"), _unpartitioned():
        whole = AutoModel.from_config(copy.deepcopy(hf_config), dtype=held.dtype)
    built: nn.Module = getattr(whole, name).to_empty(device=held.device)
    tower.check(built, name)
    tower.make_exact(built)
    swap(built, ServedTower)
    return built.requires_grad_(False).eval()


def share(model: Any, hf_config: Any) -> None:
    """Replace the tower of a model that vLLM has built, before its weights are loaded, in place. Text models stay as they are."""
    family = family_of(hf_config)
    if family is None or not family.tower:
        return
    theirs = getattr(model, family.tower)
    if next(theirs.parameters(), None) is not None:  # without images vLLM leaves it out
        setattr(model, family.tower, _build(hf_config, family.tower, theirs))
        model.use_data_parallel = False  # every rank has the whole tower and computes every image
    for layer in model.language_model.model.layers[: getattr(model, "deepstack_num_level", 0)]:
        swap(layer, DeepStackLayer)
