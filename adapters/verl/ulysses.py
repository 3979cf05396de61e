"""verl's Ulysses sequence parallelism: each rank of a group holds a slice of the packed tokens of its micro-batch.

verl slices the inputs and gathers the log-probs. In between, each attention layer needs an all-to-all that turns slices of all
heads into whole sequences of some heads. verl adds it to flash attention only: with any other attention a rank silently attends
within its slice (observed: log-probs of the second rank up to 1.56 off). Here other attentions get it too: in exact mode always,
in other modes as a fix for verl's bug. Imports no torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from jetrl_patch import session
from jetrl_patch.adapters.verl.yaml_settings import ACTOR, MODEL, REF, ULYSSES, Select, named, whole
from jetrl_patch.errors import ConfigError, JetrlError, ModelError, explain
from jetrl_patch.models.structure import has_delta_nets, has_latent_attention, is_vision_language, key_heads
from jetrl_patch.patching.patch import replacement
from jetrl_patch.trainer.rules import raised

_REMOVE = f"{MODEL}.use_remove_padding"


class Exchange:
    """The all-to-all of one engine's group, a ``sequence_parallel.Exchange``; verl's own functions compute it."""

    def __init__(self, group: Any, size: int) -> None:
        self.group, self.size = group, size
        self._gathered_of: Any = None
        self._positions: Any = None

    def to_heads(self, x: Any) -> Any:
        from verl.utils.ulysses import gather_seq_scatter_heads

        return gather_seq_scatter_heads(x, seq_dim=2, head_dim=1, group=self.group)

    def to_slices(self, x: Any) -> Any:
        from verl.utils.ulysses import gather_heads_scatter_seq

        return gather_heads_scatter_seq(x, seq_dim=1, head_dim=2, group=self.group)

    def gather(self, positions: Any) -> Any:
        """Gather the position ids once per forward pass: all layers pass the same tensor."""
        import torch

        if self._gathered_of is None or self._gathered_of() is not positions:
            parts = [torch.empty_like(positions) for _ in range(self.size)]
            torch.distributed.all_gather(parts, positions.contiguous(), group=self.group)
            self._gathered_of, self._positions = weakref.ref(positions), torch.cat(parts, -1)
        return self._positions


def share(module: Any, engine: Any) -> None:
    """Give a model its engine's all-to-all, before verl wraps it. Flash attention keeps verl's own."""
    size = engine.ulysses_sequence_parallel_size
    if size > 1 and "flash" not in str(module.config._attn_implementation):
        from jetrl_patch.exact.sequence_parallel import share_sequences

        share_sequences(module, Exchange(engine.ulysses_parallel_group, size))


@replacement
def build_module(original: Any, self: Any) -> Any:
    """Wrap ``FSDPEngine._build_module``: policy and critic attend over whole sequences."""
    module = original(self)
    share(module, self)
    return module


def sizes(select: Select) -> dict[int, str]:
    """Return each size above 1 and the setting that gives it, for the actor and, if the run has one, the reference model."""
    roles = [ACTOR]
    if select("algorithm.use_kl_in_reward") or select(f"{ACTOR}.use_kl_loss"):
        roles.append(REF)
    found: dict[int, str] = {}
    for role in roles:
        own = (f"{role}.veomni.ulysses_parallel_size",) if select(f"{role}.strategy") == "veomni" else ()
        for path in own or (f"{role}.{ULYSSES}", f"{role}.fsdp_config.{ULYSSES}"):  # the first above 1 wins, as in verl
            if (size := whole(select, path)) > 1:
                found.setdefault(size, path)
                break
    return found


def problems(select: Select) -> Iterator[JetrlError]:
    """Yield an error for each size that verl's workers would reject only after start-up."""
    ranks = whole(select, "trainer.nnodes") * whole(select, "trainer.n_gpus_per_node")
    for size, path in sizes(select).items():
        if not select(_REMOVE):
            found, fix = f"{_REMOVE}=False", f"set {_REMOVE}=True"
            required = "packed sequences, the only ones that verl slices"
            yield ConfigError(explain(f"{named(path)}={size}", required=required, found=found, fix=fix))
        if ranks % size:
            required, fix = "a divisor of the number of ranks", "set it to one that divides them"
            yield ConfigError(explain(f"{named(path)}={size}", required=required, found=f"{ranks} ranks", fix=fix))


def model_problems(select: Select, hf_config: Any) -> Iterator[JetrlError]:
    """Yield an error for each size above 1 at which the model needs whole sequences, or verl other numbers of heads."""
    text = hf_config.get_text_config()
    for size, path in sizes(select).items():
        yield from raised(lambda: check_whole(hf_config, size, named(path)))  # noqa: B023
        heads = text.num_attention_heads
        shared = key_heads(text)
        if heads % size or (shared % size and size % shared):
            required = "a divisor of the query heads, and a divisor or multiple of the key/value heads"
            found = f"{heads} query and {shared} key/value heads"
            yield ModelError(explain(f"{named(path)}={size}", required=required, found=found, fix="choose another size"))


def check_whole(hf_config: Any, size: int, what: str = ULYSSES) -> None:
    """Raise ModelError if several ranks share the sequences of a model whose slices have not been compared with the rollout."""
    kinds = {
        "gated delta nets": has_delta_nets(hf_config),
        "latent attention": has_latent_attention(hf_config),
        "a vision tower in exact mode": is_vision_language(hf_config) and session.active_with(lambda config: config.exact),
    }
    for kind, present in kinds.items():
        if present and size > 1:
            required = f"whole sequences of a model with {kind} (slices have not been compared with the rollout)"
            found = f"model_type={hf_config.model_type!r}"
            raise ModelError(explain(f"{what}={size}", required=required, found=found, fix="set it to 1"))
