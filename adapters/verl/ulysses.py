"""verl's Ulysses sequence parallelism: each rank of a group holds a slice of the packed tokens of its micro-batch.

verl cuts the inputs and gathers the log-probs. In between it exchanges slices for heads inside flash attention alone: with
any other attention a rank attends within its slice, and no error says so. (Observed: log-probs of the second rank up to
1.56 off.) So models with another attention get the exchange here, each with the group of its own engine: in exact mode always,
in other modes as a fix for verl's bug.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from jetrl_patch import registry
from jetrl_patch.adapters.verl.yaml_settings import ACTOR, MODEL, REF, named
from jetrl_patch.errors import ConfigError, JetrlError, ModelError, explain
from jetrl_patch.models.structure import has_delta_nets, has_latent_attention
from jetrl_patch.trainer.rules import raised

__all__ = ["build_module", "check_heads", "check_whole", "problems", "share", "whole"]

_SIZE = "ulysses_sequence_parallel_size"
_REMOVE = f"{MODEL}.use_remove_padding"


class Exchange:
    """``services.Exchange`` over a process group, by verl's own all-to-all."""

    def __init__(self, group: Any, size: int) -> None:
        self.group, self.size = group, size
        self._of: Any = None
        self._positions: Any = None

    def to_heads(self, x: Any) -> Any:
        from verl.utils.ulysses import gather_seq_scatter_heads

        return gather_seq_scatter_heads(x, seq_dim=2, head_dim=1, group=self.group)

    def to_slices(self, x: Any) -> Any:
        from verl.utils.ulysses import gather_heads_scatter_seq

        return gather_heads_scatter_seq(x, seq_dim=1, head_dim=2, group=self.group)

    def gather(self, positions: Any) -> Any:
        """Gather once per forward pass: all layers get the same tensor."""
        import torch

        if self._of is None or self._of() is not positions:
            parts = [torch.empty_like(positions) for _ in range(self.size)]
            torch.distributed.all_gather(parts, positions.contiguous(), group=self.group)
            self._of, self._positions = weakref.ref(positions), torch.cat(parts, -1)
        return self._positions


def share(module: Any, engine: Any) -> None:
    """Give a model the exchange of its engine, before it is wrapped. Flash attention keeps verl's own."""
    size = engine.ulysses_sequence_parallel_size
    if size > 1 and "flash" not in str(module.config._attn_implementation):
        registry.models().share_sequences(module, Exchange(engine.ulysses_parallel_group, size))


def build_module(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``FSDPEngine._build_module``: the model, or the critic, attends over whole sequences."""

    def _build_module(self: Any) -> Any:
        module = original(self)
        share(module, self)
        return module

    return _build_module


def sizes(select: Callable[[str], Any]) -> dict[int, str]:
    """Return each size above 1 and the setting that gives it, of the actor and, if the run has one, of the reference model."""
    roles = [ACTOR]
    if select("algorithm.use_kl_in_reward") or select(f"{ACTOR}.use_kl_loss"):
        roles.append(REF)
    found: dict[int, str] = {}
    for role in roles:
        own = (f"{role}.veomni.ulysses_parallel_size",) if select(f"{role}.strategy") == "veomni" else ()
        for path in own or (f"{role}.{_SIZE}", f"{role}.fsdp_config.{_SIZE}"):  # the first above 1 wins, as in verl
            if (size := int(select(path) or 1)) > 1:
                found.setdefault(size, path)
                break
    return found


def problems(select: Callable[[str], Any]) -> Iterator[JetrlError]:
    """Yield an error for each size that verl's workers would reject after everything has started."""
    ranks = int(select("trainer.nnodes") or 1) * int(select("trainer.n_gpus_per_node") or 1)
    for size, path in sizes(select).items():
        if not select(_REMOVE):
            found, fix = f"{_REMOVE}=False", f"set {_REMOVE}=True"
            required = "packed sequences, the only ones that verl cuts"
            yield ConfigError(explain(f"{named(path)}={size}", required=required, found=found, fix=fix))
        if ranks % size:
            required, fix = "a divisor of the number of ranks", "set it to one that divides them"
            yield ConfigError(explain(f"{named(path)}={size}", required=required, found=f"{ranks} ranks", fix=fix))


def check_heads(select: Callable[[str], Any], hf_config: Any) -> None:
    """Raise ModelError if a size does not divide the model's heads as verl needs."""
    text = hf_config.get_text_config()
    for size, path in sizes(select).items():
        heads = text.num_attention_heads
        shared = getattr(text, "num_key_value_heads", None) or heads
        if heads % size or (shared % size and size % shared):
            required = "a divisor of the query heads, and a divisor or multiple of the key/value heads"
            found = f"{heads} and {shared} heads"
            raise ModelError(
                explain(f"{named(path)}={size}", required=required, found=found, fix="choose another size")
            )


def whole(select: Callable[[str], Any], hf_config: Any) -> Iterator[JetrlError]:
    """Yield an error for each size above 1 if the model's sequences must stay whole."""
    for size, path in sizes(select).items():
        yield from raised(lambda: check_whole(hf_config, size, named(path)))  # noqa: B023


def check_whole(hf_config: Any, size: int, what: str = _SIZE) -> None:
    """Raise ModelError for a model with delta nets or latent attention in slices: ``size`` ranks share each of its sequences."""
    kinds = {"gated delta nets": has_delta_nets(hf_config), "latent attention": has_latent_attention(hf_config)}
    for kind, there in kinds.items():
        if there and size > 1:
            required = f"whole sequences of a model with {kind} (its slices have not been compared with the rollout)"
            found = f"model_type={hf_config.model_type!r}"
            raise ModelError(explain(f"{what}={size}", required=required, found=found, fix="set it to 1"))
