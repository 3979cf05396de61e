"""LoRA of the policy in OpenRLHF: its unsupported settings. ``model`` builds it, and ``sync`` sends it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jetrl_patch.config import Config
from jetrl_patch.errors import UNQUANTIZED, ConfigError, ConflictError, JetrlError, ModelError, explain
from jetrl_patch.models.structure import expert_sizes, is_vision_language
from jetrl_patch.trainer.rules import Rule, broken, is_set, positive

# OpenRLHF 0.11 adds adapters to the policy and the critic, but its own sync sends peft's names, which vLLM rejects. With a
# quantized rollout the plugin sends merged weights (``fp8.lora``) under the names of the plain model. The reference model is a
# model of its own, without adapters.

_RANK = "ds.lora.rank"

#: checked only with adapters
RULES: tuple[Rule, ...] = (
    Rule("ds.lora.dropout", is_set, "0 (the rollout has no dropout)", "set it to 0", "quantized"),
    Rule("train.enable_ema", is_set, "no average of the weights (OpenRLHF's has no adapters)", "remove the flag", "quantized"),
)


def problems(select: Callable[[str], Any], config: Config, name: Callable[[str], str]) -> Iterator[JetrlError]:
    """Yield an error for each setting that is unsupported with adapters."""
    if not positive(select(_RANK) or 0):
        return
    if not config.quantized_rollout:
        required = "full weights, because OpenRLHF's own sync sends adapters under names that vLLM does not know"
        fix = "set it to 0, or use a quantized rollout"
        yield ConflictError(explain(f"{name(_RANK)} with precision={config.precision!r}", required=required,
                                    found=repr(select(_RANK)), fix=fix))  # fmt: skip
    yield from broken(RULES, select, config, name)
    if config.quantized_rollout and config.invariant_scale is not None:
        required = "it unset, because a saved adapter would fit only the scaled model"
        found, fix = repr(config.invariant_scale), "leave invariant_scale unset"
        yield ConfigError(explain(f"invariant_scale with {name(_RANK)}", required=required, found=found, fix=fix))


def model_problems(select: Callable[[str], Any], hf_config: Any, config: Config) -> Iterator[JetrlError]:
    """Yield an error for adapters of a model with which they have not run."""
    untested = is_vision_language(hf_config) or expert_sizes(hf_config) is not None
    if config.quantized_rollout and positive(select(_RANK) or 0) and untested:
        what, required = "LoRA in OpenRLHF with a quantized rollout", "a dense text model (others have not run)"
        found, fix = f"model_type={hf_config.model_type!r}", f"remove --{_RANK}, or use {UNQUANTIZED}"
        yield ModelError(explain(what, required=required, found=found, fix=fix))
