"""Routes of a mixture of experts, compared, recorded, and replayed from the rollout.

A route is the set of experts that one block chooses for one token, in any order. Log-probs show whether both sides are equal;
routes show whether a difference changed a choice.

Shape legend: T tokens with routes, N tokens of the pass, L layers of the model (dense blocks included), E experts, k experts per
token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from jetrl_patch.exact.route import weights_of
from jetrl_patch.fp8.convert import expert_modules
from jetrl_patch.models.families import FAMILIES

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class Routes:
    """How many routes were compared, and how many differ."""

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
        rows: int64 [T], the positions of the tokens among those N.
    """
    found = Routes()
    for layer, ids_Nk in trainer.items():
        own, other = ids_Nk[rows].long().sort(-1).values, rollout_TLk[:, layer].to(ids_Nk.device).long().sort(-1).values
        found += Routes(len(own), int((own != other).any(-1).sum()))
    return found


def layer_number(name: str) -> int:
    """The number of the layer in a module's dotted name."""
    layer = _LAYER.search(name)
    assert layer is not None, name
    return int(layer[1])


class Recorder:
    """Records the experts that a trainer's model chooses. Create it before FSDP or ZeRO wraps the model."""

    def __init__(self, model: nn.Module) -> None:
        self._open: dict[int, Tensor] | None = None
        for name, module in expert_modules(model).items():
            module.register_forward_pre_hook(partial(self._note, layer_number(name)), with_kwargs=True)

    @contextmanager
    def recording(self) -> Iterator[dict[int, Tensor]]:
        """Yield a dict that one forward pass fills: layer number -> experts [N, k]."""
        found: dict[int, Tensor] = {}
        self._open = found
        try:
            yield found
        finally:
            self._open = None

    def _note(self, layer: int, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if self._open is not None:  # transformers calls experts with hidden_states, top_k_index, top_k_weights
            ids = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
            self._open[layer] = ids.detach().flatten(0, -2)


# ---- Replay: the trainer's tokens go to the experts that the rollout chose (R3, "Rollout Routing Replay")
#     ids_Tk = the rollout's      w_e = p_e / Σ(chosen p), or as the family defines it, with p from the trainer's logits
#
# The gradient flows through the gathered weights, so the router learns about the experts that were used. The logits do not
# change, so a load-balancing loss sees the trainer's own. A token for which both sides chose the same set of experts, and a token
# without routes, keeps the trainer's order, and with it the bits of a pass without replay.


class Replay:
    """Replays routes in a trainer's model. Create it before FSDP wraps the model.

    Attributes:
        own: layer number -> the trainer's own choice in the last pass, [N, k].
    """

    def __init__(self, model: nn.Module) -> None:
        self.own: dict[int, Tensor] = {}
        self._given: tuple[Tensor, Tensor] | None = None
        families = [family for family in FAMILIES.values() if family.mixture]
        choosers, routers = ({getattr(family, kind) for family in families} for kind in ("chooser", "router"))
        for name, module in model.named_modules():
            kind = type(module).__name__
            if kind in choosers and hasattr(module, "route_tokens_to_experts"):  # transformers before 5.13
                module.route_tokens_to_experts = partial(self._choose, layer_number(name), module, module.route_tokens_to_experts)
            elif kind in routers:
                module.register_forward_hook(partial(self._route, layer_number(name)))

    def follow(self, experts_TLk: Tensor, rows: Tensor) -> None:
        """Replay these routes until the next call, also while the backward pass recomputes the forward pass.

        Args:
            experts_TLk: the rollout's experts, any integer dtype.
            rows: int64 [T], the positions of the tokens among the N of each pass.
        """
        self.own, self._given = {}, (experts_TLk, rows)

    def stop(self) -> None:
        """Let the routers choose from now on."""
        self.own, self._given = {}, None

    def _ids(self, layer: int, own_Nk: Tensor) -> Tensor:
        """The experts to use. A row in which the rollout names an expert twice is invalid, and keeps the trainer's choice."""
        assert self._given is not None
        experts_TLk, rows = self._given
        self.own[layer] = own_Nk.detach()
        rows = rows.to(own_Nk.device)
        theirs_Tk, mine_Tk = experts_TLk[:, layer].to(own_Nk.device).long(), own_Nk[rows]
        ordered_Tk = theirs_Tk.sort(-1).values
        same = (ordered_Tk == mine_Tk.sort(-1).values).all(-1)
        twice = (ordered_Tk.diff(dim=-1) == 0).any(-1)
        return own_Nk.index_copy(0, rows, torch.where((same | twice).unsqueeze(-1), mine_Tk, theirs_Tk))

    def _route(self, layer: int, router: Any, _: Any, output: Any) -> Any:
        """Hook on transformers' routers, which return logits [N, E], weights and experts [N, k], or only logits."""
        if self._given is None or isinstance(output, Tensor):
            return None
        logits_NE, weights_Nk, own_Nk = output
        ids_Nk = self._ids(layer, own_Nk)
        return logits_NE, _weights(router, logits_NE, ids_Nk).to(weights_Nk.dtype), ids_Nk

    def _choose(self, layer: int, block: Any, original: Any, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Replace ``route_tokens_to_experts`` of blocks with sigmoid scores, which returns experts and weights [N, k]."""
        own_Nk, weights_Nk = original(router_logits)
        if self._given is None:
            return own_Nk, weights_Nk
        ids_Nk = self._ids(layer, own_Nk)
        return ids_Nk, _weights(block, router_logits, ids_Nk).to(weights_Nk.dtype)


def _weights(owner: Any, logits_NE: Tensor, ids_Nk: Tensor) -> Tensor:
    """The weights [N, k] that a router or block of transformers would give these experts."""
    scale = getattr(owner, "routed_scaling_factor", None)  # only models with sigmoid scores have it
    return weights_of(logits_NE, ids_Nk, getattr(owner, "norm_topk_prob", True), scale)
