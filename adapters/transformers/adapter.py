"""The transformers adapter: adds an attention implementation through transformers' own registries."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

from jetrl_patch.adapters.base import Adapter, Config, Journal, OnImport, Services


class TransformersAdapter(Adapter):
    """Registers the plugin's attentions; models are converted by ``prepare_model``."""

    name = "transformers"
    requires = ("torch", "transformers")

    def services(self) -> Services:
        """Offer model conversion and scoring."""
        from jetrl_patch.adapters.transformers import services

        return Services(models=services)

    def hooks(self, config: Config) -> Sequence[OnImport]:
        """Register the exact attention where the mode has it, and in every mode the one for sequence parallelism."""
        return (
            OnImport(
                "transformers.modeling_utils",
                "AttentionInterface",
                partial(_register_attention, exact=config.exact),
                reason="without them the trainer's attention rounds differently from the rollout's, and on ranks that share "
                "sequences it sees slices",
            ),
            OnImport(
                "transformers.masking_utils",
                "AttentionMaskInterface",
                partial(_register_mask, exact=config.exact),
                reason="without it these attentions get no raw padding mask; uses transformers' own registry",
            ),
        )


def _register_attention(module: ModuleType, journal: Journal, exact: bool) -> None:
    from jetrl_patch.adapters.transformers.attention import NAME, exact_attention
    from jetrl_patch.adapters.transformers.packed import PACKED, packed_sdpa
    from jetrl_patch.adapters.transformers.sequence import whole_sequences

    functions: dict[str, tuple[Any, str]] = {PACKED: (packed_sdpa, "torch's attention for ranks that share sequences")}
    if exact:
        functions[NAME] = (exact_attention, "the rollout's attention kernel as the trainer's forward")
    for name, (function, reason) in functions.items():
        journal.set_item(
            module.AttentionInterface._global_mapping,
            name,
            whole_sequences(function),
            target=f"transformers.AttentionInterface[{name!r}]",
            reason=reason,
        )


def _register_mask(module: ModuleType, journal: Journal, exact: bool) -> None:
    from jetrl_patch.adapters.transformers.attention import NAME, keep_padding_mask
    from jetrl_patch.adapters.transformers.packed import PACKED

    for name in (PACKED, NAME) if exact else (PACKED,):
        journal.set_item(
            module.AttentionMaskInterface._global_mapping,
            name,
            keep_padding_mask,
            target=f"transformers.AttentionMaskInterface[{name!r}]",
            reason="this attention reads the padding mask unchanged",
        )


ADAPTER = TransformersAdapter()
