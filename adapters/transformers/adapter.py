"""The transformers adapter: adds an attention implementation through transformers' own registries."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from jetrl_patch.adapters.base import Adapter, Config, Journal, OnImport, Services


class TransformersAdapter(Adapter):
    """Registers the exact attention; models are converted by ``prepare_model``."""

    name = "transformers"
    requires = ("torch", "transformers")

    def services(self) -> Services:
        """Offer model conversion and scoring."""
        from jetrl_patch.adapters.transformers import services

        return Services(models=services)

    def hooks(self, config: Config) -> Sequence[OnImport]:
        if not config.exact:
            return ()
        return (
            OnImport(
                "transformers.modeling_utils",
                "AttentionInterface",
                _register_attention,
                reason="without it the trainer's attention rounds differently from the rollout's",
            ),
            OnImport(
                "transformers.masking_utils",
                "AttentionMaskInterface",
                _register_mask,
                reason="without it the exact attention gets no raw padding mask; uses transformers' own registry",
            ),
        )


def _register_attention(module: ModuleType, journal: Journal) -> None:
    from jetrl_patch.adapters.transformers.attention import NAME, exact_attention

    journal.set_item(
        module.AttentionInterface._global_mapping,
        NAME,
        exact_attention,
        target=f"transformers.AttentionInterface[{NAME!r}]",
        reason="the rollout's attention kernel as the trainer's forward",
    )


def _register_mask(module: ModuleType, journal: Journal) -> None:
    from jetrl_patch.adapters.transformers.attention import NAME, keep_padding_mask

    journal.set_item(
        module.AttentionMaskInterface._global_mapping,
        NAME,
        keep_padding_mask,
        target=f"transformers.AttentionMaskInterface[{NAME!r}]",
        reason="the exact attention reads the padding mask unchanged",
    )


ADAPTER = TransformersAdapter()
