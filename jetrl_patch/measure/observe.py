"""Hooks of one sampled step: statistics of activations and gradients; and whether both sides route tokens alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from jetrl_patch.fp8.convert import expert_modules, experts_of, whole_shape
from jetrl_patch.fp8.experts import Experts
from jetrl_patch.fp8.linear import Fp8Linear, Fp8State
from jetrl_patch.measure.statistics import measure, measure_each, worst_of
from jetrl_patch.models.structure import PARTS

__all__ = ["MOST_ROWS", "Observer", "Recorder", "Routes", "compare", "layer_number"]


# ---- Statistics of the FP8 layers' activations and output gradients, from hooks that exist during one sampled step only
# A hook measures the first forward of its layer that autograd records, on at most ``MOST_ROWS`` tokens, and then removes
# itself. The layer's own results are untouched, bit for bit.
#
# Experts count as one layer. What their products read is seen by a watch inside them (``fp8.grouped``), on as many pairs of token
# and expert. Where the rollout alone is FP8, the trainer's experts are another code: a hook sees their tokens.

MOST_ROWS = 4096


class Observer:
    """Statistics of one rank, keyed by (kind, layer); the kinds are "activation" and "gradient".

    Args:
        modules: layers by name, those of experts by the name of their module; without ``rollout``, those that are not (or no
            longer) in FP8 are skipped.
        rollout: the rollout's quantization, if the trainer's layers are BF16; only activations are measured then.
    """

    def __init__(self, modules: Mapping[str, nn.Module], rollout: Fp8State | None = None) -> None:
        self._modules = modules
        self._rollout = rollout
        self._handles: dict[str, Any] = {}
        self._watched: list[Experts] = []
        self._figures: dict[tuple[str, str], Tensor] = {}
        self._of_experts: dict[tuple[str, str], list[Tensor]] = {}

    @property
    def figures(self) -> dict[tuple[str, str], Tensor]:
        """Rows of ``measure``, and of experts those of ``worst_of``."""
        numbers = {key: torch.cat([rows[:, 8] for rows in found]) for key, found in self._of_experts.items()}
        return self._figures | {
            key: worst_of(torch.cat([rows[:, :8] for rows in found]), numbers[key])
            for key, found in self._of_experts.items()
        }

    def clear(self) -> None:
        """Forget the statistics."""
        self._figures, self._of_experts = {}, {}

    def arm(self, names: Iterable[str]) -> None:
        """Clear the statistics and wait for the next forward of these layers."""
        self.disarm()
        self.clear()
        for name in names:
            module = self._modules.get(name)
            own = None if module is None else experts_of(module)
            if own is not None and own.plain is None:
                own.watch = self._watch(name, own)
                self._watched.append(own)
                continue
            state = module.fp8 if isinstance(module, Fp8Linear) else self._rollout
            if module is not None and state is not None and own is None:
                see = self._see_tokens if expert_modules(module) else self._see
                self._handles[name] = module.register_forward_hook(self._once(name, see, state))

    def disarm(self) -> None:
        """Remove the hooks."""
        for handle in self._handles.values():
            handle.remove()
        for own in self._watched:
            own.watch = None
        self._handles, self._watched = {}, []

    def _once(self, name: str, see: Callable[..., None], state: Fp8State) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
            if not torch.is_grad_enabled() or torch.compiler.is_compiling() or name not in self._handles:
                return
            self._handles.pop(name).remove()
            see(name, state, module, arguments, output)

        return hook

    def _see(self, name: str, state: Fp8State, module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        self._figures["activation", name] = _figures(arguments[0], state, slices=True)
        if output.requires_grad and isinstance(module, Fp8Linear):
            output.register_hook(lambda grad: self._keep(name, grad, state))

    def _keep(self, name: str, grad: Tensor, state: Fp8State) -> None:
        """Measure the gradient as DGrad quantizes it, in groups of 128 along N."""
        self._figures["gradient", name] = _figures(grad, state, slices=False)

    @torch.no_grad()
    def _see_tokens(self, name: str, state: Fp8State, module: Any, arguments: tuple[Any, ...], output: Tensor) -> None:
        """Measure the tokens of each expert, of experts that the trainer computes in BF16: tokens [T, H], experts [T, k]."""
        x_TH, ids_Tk = arguments[:2]
        experts_P, order_P = ids_Tk.reshape(-1).sort(stable=True)
        tokens_P, count = order_P // ids_Tk.shape[1], whole_shape(module.down_proj)[0]
        rows = _each(lambda at: x_TH[tokens_P[at]], experts_P, count, 0, state, slices=True)
        self._of_experts.setdefault(("activation", name), []).append(rows)

    def _watch(self, name: str, own: Experts) -> Any:
        def see(kind: str, part: Any, experts_P: Tensor, take: Callable[[Tensor], Tensor]) -> None:
            rows = _each(take, experts_P, own.count, PARTS.index(part), own, slices=kind == "activation")
            self._of_experts.setdefault((kind, name), []).append(rows)

        return see


@torch.no_grad()
def _figures(x: Tensor, state: Fp8State, slices: bool) -> Tensor:
    x_MK = x.detach().reshape(-1, x.shape[-1])
    if x_MK.shape[0] > MOST_ROWS:  # groups lie within a row, so rows can be dropped
        x_MK = x_MK[_some(x_MK.shape[0], x.device)]
    x_MK = x_MK.to(torch.bfloat16).contiguous()
    return measure(x_MK, *state.backend.quantize_activation(x_MK, state.scale_format), slices=slices)


def _each(
    take: Callable[[Tensor], Tensor], experts_P: Tensor, count: int, part: int, state: Fp8State | Experts, slices: bool
) -> Tensor:
    """Rows of ``measure_each`` and the number of each expert's matrix, FP64 [E, 9]."""
    rows = _some(experts_P.shape[0], experts_P.device)
    x_MK = take(rows).detach().to(torch.bfloat16).contiguous()
    quantized = state.backend.quantize_activation(x_MK, state.scale_format)
    found = measure_each(x_MK, *quantized, experts_P[rows].long(), count, slices)
    numbers = len(PARTS) * torch.arange(count, device=found.device, dtype=found.dtype) + part
    return torch.cat([found, numbers.unsqueeze(1)], 1)


def _some(rows: int, device: torch.device) -> Tensor:
    """At most ``MOST_ROWS`` evenly spaced rows."""
    return torch.linspace(0, rows - 1, min(rows, MOST_ROWS), device=device).round().long()


# ---- Whether trainer and rollout send tokens of a mixture of experts to the same experts ---------
# A route is the set of experts that one block chooses for one token. Log-probs tell that both sides are equal; routes tell how
# near a difference came to a choice. Which of two experts comes first does not count.
#
# Shape legend: T tokens, L layers of the model (dense blocks among them), k experts per token.

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
