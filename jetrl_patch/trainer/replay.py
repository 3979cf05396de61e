"""Replay of routes: the trainer's tokens go to the experts that the rollout chose (R3, "Rollout Routing Replay").

    ids_Tk = the rollout's        w_e = p_e / (sum of the chosen p), or as the family has it, with p of the trainer's own logits

The gradient flows through the gathered weights, so that the router learns about the experts that were used. Logits are as they
were: a load-balancing loss sees the trainer's own. A token whose rollout experts are the trainer's own set keeps its own
order, and with it the bits of a pass without replay; so does a token without routes.

Shape legend: T tokens with routes, N tokens of the pass, L layers of the model, E experts, k experts per token.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from jetrl_patch.measure.observe import layer_number
from jetrl_patch.models.families import FAMILIES

__all__ = ["Replay"]

#: what families that score by a sigmoid add to the sum of the chosen scores, which may all be zero
_TINY = 1e-20


class Replay:
    """Replays routes in a trainer's model. It has to be made before FSDP wraps the model.

    Attributes:
        own: number of a layer -> what the trainer's router chose itself in the last pass, [N, k].
    """

    def __init__(self, model: nn.Module) -> None:
        self.own: dict[int, Tensor] = {}
        self._given: tuple[Tensor, Tensor] | None = None
        families = [family for family in FAMILIES.values() if family.mixture]
        choosers = {family.chooser for family in families} - {""}
        routers = {family.router for family in families if not family.chooser}
        for name, module in model.named_modules():
            kind = type(module).__name__
            if kind in choosers:
                module.route_tokens_to_experts = partial(self._choose, layer_number(name), module, module.route_tokens_to_experts)
            elif kind in routers:
                module.register_forward_hook(partial(self._route, layer_number(name)))

    def follow(self, experts_TLk: Tensor, rows: Tensor) -> None:
        """Replay these routes until the next call, so also in a recomputation that backward runs.

        Args:
            experts_TLk: the rollout's experts, any integer dtype.
            rows: int64 [T], where the tokens are among the N of each pass.
        """
        self.own, self._given = {}, (experts_TLk, rows)

    def stop(self) -> None:
        """Let the routers choose, from now on."""
        self.own, self._given = {}, None

    def _ids(self, layer: int, own_Nk: Tensor) -> Tensor:
        """The experts to use. A row of the rollout that names an expert twice is none: the trainer's choice stands."""
        assert self._given is not None
        experts_TLk, rows = self._given
        self.own[layer] = own_Nk.detach()
        rows = rows.to(own_Nk.device)
        theirs_Tk, mine_Tk = experts_TLk[:, layer].to(own_Nk.device).long(), own_Nk[rows]
        ordered_Tk = theirs_Tk.sort(-1).values
        same = (ordered_Tk == mine_Tk.sort(-1).values).all(-1)
        twice = (ordered_Tk.diff(dim=-1) == 0).any(-1)
        return own_Nk.index_copy(0, rows, torch.where((same | twice).unsqueeze(-1), mine_Tk, theirs_Tk))

    def _route(self, layer: int, router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        """After transformers' routers by softmax, which return logits [N, E], weights and experts [N, k]."""
        if self._given is None:
            return None
        logits_NE, weights_Nk, own_Nk = output
        ids_Nk = self._ids(layer, own_Nk)
        chosen_Nk = nn.functional.softmax(logits_NE, dim=-1, dtype=torch.float32).gather(-1, ids_Nk)
        if getattr(router, "norm_topk_prob", True):
            chosen_Nk = chosen_Nk / chosen_Nk.sum(-1, keepdim=True)
        return logits_NE, chosen_Nk.to(weights_Nk.dtype), ids_Nk

    def _choose(self, layer: int, block: Any, original: Any, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        """In the place of ``route_tokens_to_experts`` of blocks that score by a sigmoid: experts and weights [N, k]."""
        own_Nk, weights_Nk = original(router_logits)
        if self._given is None:
            return own_Nk, weights_Nk
        ids_Nk = self._ids(layer, own_Nk)
        chosen_Nk = router_logits.sigmoid().gather(-1, ids_Nk)
        if block.norm_topk_prob:
            chosen_Nk = chosen_Nk / (chosen_Nk.sum(-1, keepdim=True) + _TINY)
        return ids_Nk, (chosen_Nk * block.routed_scaling_factor).to(weights_Nk.dtype)
