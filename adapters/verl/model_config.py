"""verl's settings that change the trainer's copy of a model's configuration; the rollout reads config.json alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jetrl_patch.adapters.verl.paths import MODEL, named
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, JetrlError, explain
from jetrl_patch.family import DROPOUTS

__all__ = ["problems"]

_OVERRIDE = f"{MODEL}.override_config"

#: key of the trainer's configuration -> whether a value is harmless in exact mode
_HARMLESS: dict[str, Callable[[Any], bool]] = {
    # exact mode has its own attention
    "attn_implementation": lambda value: True,
    # an upper bound that verl compares with the engine's; the rotary embeddings of exact mode do not depend on it
    "max_position_embeddings": lambda value: True,
    # no dropout, as in the rollout
    **dict.fromkeys((*DROPOUTS, "embd_pdrop", "resid_pdrop", "hidden_dropout"), lambda value: not value),
    # tokens, which the engine gets from the tokenizer and generation_config.json
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), lambda value: True),
    # the trainer never decodes
    "use_cache": lambda value: True,
}


def problems(select: Callable[[str], Any], config: Config) -> Iterator[JetrlError]:
    """Yield an error for each setting by which the trainer would compute another model than the rollout.

    Args:
        select: returns verl's setting at a dotted path, None where it is missing.
    """
    other, path = select(f"{MODEL}.hf_config_path"), select(f"{MODEL}.path")
    if config.quantized_rollout and other not in (None, path):
        what = f"{named(f'{MODEL}.hf_config_path')} with a quantized rollout"
        required = f"{path}, where vLLM reads its configuration"
        yield ConfigError(explain(what, required=required, found=repr(other), fix="set it to null"))
    if not config.exact:
        return
    for key, value in _overrides(select).items():
        harmless = _HARMLESS.get(key)
        if harmless is None or not harmless(value):
            what = f"{named(f'{_OVERRIDE}.{key}')} with align='exact'"
            required = "the rollout's value, which is that of config.json"
            yield ConfigError(explain(what, required=required, found=repr(value), fix="remove it and change config.json"))


def _overrides(select: Callable[[str], Any]) -> Mapping[str, Any]:
    """The keys that verl writes into the trainer's configuration: one section for Megatron, else all."""
    found = select(_OVERRIDE)
    if not found:
        return {}
    inner = found.get("model_config", found)
    return dict(inner or {})
