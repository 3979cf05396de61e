"""Which linears read which norm: where a factor of the norm's output can be taken out of one and put into the other.

    norm(x) = x̂ · g        W norm(x) = (W · f) (norm(x) / f)        with f a number, or one number per channel

Only linears that read the norm, and nothing else that does, may stand in a group; that is known per model family.
``o_proj`` and ``down_proj`` read no norm and are in none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jetrl_patch.errors import ModelError

__all__ = ["FAMILIES", "Group", "groups_of"]

#: ``model_type`` of families whose norms are ``x̂ · g`` (not ``1 + g``), stand before the linears, and feed these alone
FAMILIES = ("llama", "mistral", "phi3", "qwen2", "qwen3")

#: norm -> the linears that read it; weights that are fused on disk (Phi-3) have one name
_READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.qkv_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj"),
}


@dataclass(frozen=True)
class Group:
    """Names of one norm's weight and of the weights that read it, in the order in which they are sent."""

    norm: str
    readers: tuple[str, ...]


def groups_of(names: Iterable[str], family: str | None, asked: str) -> list[Group]:
    """The groups among a model's parameters.

    Args:
        names: of the parameters, as Hugging Face calls them.
        family: ``model_type`` of the model's configuration.
        asked: what wants to know, for the error.

    Raises:
        ModelError: another family, where a factor might change the model's function.
    """
    if family not in FAMILIES:
        raise ModelError(
            f"{asked} is known to change nothing for the model families {', '.join(FAMILIES)}, found "
            f"model_type={family!r}; switch it off (smoothing=0, or no invariant_scale)"
        )
    known = dict.fromkeys(names)
    found = []
    for name in known:
        stem, _, leaf = name.removesuffix(".weight").rpartition(".")
        readers = tuple(f"{stem}.{part}.weight" for part in _READERS.get(leaf, ()))
        present = tuple(reader for reader in known if reader in readers)
        if present:
            found.append(Group(name, present))
    return found
