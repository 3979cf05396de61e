"""Names of modules: vLLM's, and those of the same modules in transformers' model, which both sides of a sync use.

A model of text has the same names in both. Beside a vision tower vLLM has ``language_model.model.layers.0`` where transformers
has ``model.language_model.layers.0``. vLLM's classes say so themselves (``hf_to_vllm_mapper``, for loading checkpoints), and
vLLM gives the map to a quantization before it builds a layer (``QuantizationConfig.apply_vllm_mapper``).

Where transformers renames the parts of a block as it loads a checkpoint, vLLM keeps the checkpoint's names: the family's
record has both (``stored``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from jetrl_patch.families import FAMILIES, LLAMA_LIKE

if TYPE_CHECKING:
    import torch
    from vllm.model_executor.models.utils import WeightsMapper

__all__ = ["hf_name", "vllm_names"]

#: every name in transformers' models that is of a block begins so, as do vLLM's where the two are the same
_SAME = "model."


def hf_name(name: str, mapper: WeightsMapper | None) -> str:
    """Return transformers' name of the module that vLLM calls ``name``: the first that the map leads back to ``name``.

    A class lists the prefixes of today's checkpoints before those of older ones.
    """
    for family in FAMILIES.values():
        if family.stored.get("mlp") in name.split("."):
            return family.from_stored(name)
    if mapper is None or name.startswith(_SAME):
        return name
    for theirs, ours in dict(mapper.orig_to_new_prefix).items():
        if ours is not None and name.startswith(ours):
            found = theirs + name.removeprefix(ours)
            if mapper.apply_list([found]) == [name]:
                return found
    return name


def vllm_names(
    model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights with transformers' names under those that ``load_weights`` of a vLLM model knows."""
    kind = type(model).__name__
    family = next((family for family in FAMILIES.values() if family.causal_lm == kind), LLAMA_LIKE)
    for name, weight in weights:
        yield family.to_stored(name), weight
