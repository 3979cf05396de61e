"""Whether trainer and rollout send tokens of a mixture of experts to the same experts.

A route is the set of experts that one block chooses for one token. Log-probs tell that both sides are equal; routes tell how
near a difference came to a choice. Which of two experts comes first does not count.

Shape legend: T tokens, L layers of the model (dense blocks among them), k experts per token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from jetrl_patch.fp8.expert_layers import expert_modules

__all__ = ["Recorder", "Routes", "compare", "layer_number"]

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class Routes:
    """How many routes (token and block) were compared, and how many differ."""

    compared: int = 0
    differ: int = 0

    def __add__(self, other: Routes) -> Routes:
        return Routes(self.compared + other.compared, self.differ + other.differ)

    @property
    def mismatch(self) -> float:
        """The share that differs."""
        return self.differ / self.compared if self.compared else 0.0


def compare(rollout_TLk: Tensor, trainer: Mapping[int, Tensor], rows: Tensor) -> Routes:
    """Compare the routes of tokens.

    Args:
        rollout_TLk: the rollout's experts, any integer dtype.
        trainer: number of a layer -> the trainer's experts [N, k].
        rows: int64 [T], where the tokens are among those N.
    """
    found = Routes()
    for layer, ids_Nk in trainer.items():
        own, other = ids_Nk[rows].long().sort(-1).values, rollout_TLk[:, layer].to(ids_Nk.device).long().sort(-1).values
        found += Routes(len(own), int((own != other).any(-1).sum()))
    return found


def layer_number(name: str) -> int:
    """The number of the layer that a module of a block, by its dotted name, belongs to."""
    layer = _LAYER.search(name)
    assert layer is not None, name
    return int(layer[1])


class Recorder:
    """Records the experts that a trainer's model chooses. It has to be made before FSDP or ZeRO wrap the model."""

    def __init__(self, model: nn.Module) -> None:
        self._open: dict[int, Tensor] | None = None
        for name, module in expert_modules(model).items():
            module.register_forward_pre_hook(partial(self._note, layer_number(name)), with_kwargs=True)

    @contextmanager
    def recording(self) -> Iterator[dict[int, Tensor]]:
        """Yield what one forward pass fills: number of a layer -> experts [N, k] of the pass's N tokens."""
        found: dict[int, Tensor] = {}
        self._open = found
        try:
            yield found
        finally:
            self._open = None

    def _note(self, layer: int, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if self._open is not None:  # the arguments of transformers' experts: hidden_states, top_k_index, top_k_weights
            ids = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
            self._open[layer] = ids.detach().flatten(0, -2)
