"""The transformers adapter: entries in transformers' registries of attention and experts, and two patches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

from jetrl_patch import registry, session
from jetrl_patch.patching.patch import needed, replacement
from jetrl_patch.registry import Adapter, Config, Journal, OnImport, Patch

# ---- Number the sequences of a packed row without waiting for the device -------------------------

@replacement
def find_packed_sequence_indices(original: Any, position_ids: Any) -> Any:
    """Wrap ``masking_utils.find_packed_sequence_indices``, which waits for the device to see whether there is one sequence.

    If the framework has set an upper bound on the number of sequences, this returns the indices without waiting. For a single
    sequence they are all equal, which masks nothing. Exact attention does not read them.
    """
    import torch

    from jetrl_patch.exact.sequences import bound

    if bound(position_ids) is None:
        return original(position_ids)
    begins = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1
    return begins.cumsum(-1)


# ---- Refuse trainers that are built on transformers' own ------------------------------------------

@replacement
def _train(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    from jetrl_patch.trainer.foreign import unknown_trainer

    if any(adapter.trains(self) for adapter in registry.adapters()):
        return original(self, *args, **kwargs)
    raise unknown_trainer(f"{type(self).__module__}.{type(self).__qualname__}", session.active_config())


# ---- The adapter ---------------------------------------------------------------------------------

PACKED_ROWS = Patch(
    "transformers.masking_utils", "find_packed_sequence_indices", find_packed_sequence_indices,
    when=lambda config: config.exact,
    reason="transformers checks on the GPU whether a row is packed, so the host waits for the GPU in every forward pass",
    remove_when="transformers' find_packed_sequence_indices takes a flag from its caller instead of calling .all() on the device",
)  # fmt: skip


TRAIN = Patch(
    "transformers.trainer", "Trainer.train", _train,
    when=lambda config: config.changes_rollout,
    reason="TRL, ms-swift and others train with it, and most of their trainers are not patched: FP8 would be in the rollout "
    "alone, or nowhere",
    remove_when="adapters prepare the models of all trainers that are built on transformers' own",
)  # fmt: skip


class TransformersAdapter(Adapter):
    """Registers the plugin's attentions and experts, which converted models call."""

    name = "transformers"
    order = 0
    requires = ("torch", "transformers")

    def patches(self, config: Config) -> Sequence[Patch]:
        """Patch the search for packed rows in exact mode, and refuse unknown trainers."""
        return needed((PACKED_ROWS, TRAIN), config)

    def hooks(self, config: Config) -> Sequence[OnImport]:
        """Register sequence-parallel attention in every mode, and exact attention and FP8 experts in modes that have them."""
        experts = OnImport(
            "transformers.integrations.moe", "ExpertsInterface", _register_experts,
            reason="without it only the rollout's experts are FP8, and the trainer's BF16; registered through ExpertsInterface",
        )  # fmt: skip
        return (
            *((experts,) if config.fp8_train else ()),
            OnImport(
                "transformers.modeling_utils", "AttentionInterface", partial(_register_attention, config=config),
                reason="without them the trainer's attention rounds differently from the rollout's, and with sequence "
                "parallelism it sees only a slice",
            ),
            OnImport(
                "transformers.masking_utils", "AttentionMaskInterface", partial(_register_mask, exact=config.exact),
                reason="without it these attentions do not get the raw padding mask; registered through AttentionMaskInterface",
            ),
        )  # fmt: skip


def _register(journal: Journal, registry: Any, name: str, function: Any, reason: str) -> None:
    target = f"transformers.{registry.__name__}[{name!r}]"
    journal.set_item(registry._global_mapping, name, function, target=target, reason=reason)


def _register_attention(module: ModuleType, journal: Journal, config: Config) -> None:
    from jetrl_patch.exact.hf_attention import NAME, exact_attention
    from jetrl_patch.exact.sequence_parallel import PACKED, packed_sdpa, whole_sequences

    reason = "torch's attention for ranks that share sequences"
    _register(journal, module.AttentionInterface, PACKED, whole_sequences(packed_sdpa), reason)
    if config.exact:
        reason = "the rollout's attention kernel as the trainer's forward"
        attention = partial(exact_attention, fp8_cache=config.kv_cache == "fp8")
        _register(journal, module.AttentionInterface, NAME, whole_sequences(attention), reason)


def _register_experts(module: ModuleType, journal: Journal) -> None:
    from jetrl_patch.trainer.prepare import EXPERTS, fp8_experts

    _register(journal, module.ExpertsInterface, EXPERTS, fp8_experts, "experts in FP8, with the bytes of the rollout")


def _register_mask(module: ModuleType, journal: Journal, exact: bool) -> None:
    from jetrl_patch.exact.hf_attention import NAME, keep_padding_mask
    from jetrl_patch.exact.sequence_parallel import PACKED

    for name in (PACKED, NAME) if exact else (PACKED,):
        reason = "this attention reads the padding mask unchanged"
        _register(journal, module.AttentionMaskInterface, name, keep_padding_mask, reason)


ADAPTER = TransformersAdapter()
