"""Check, by its family's record, whether exact mode covers a model."""

from __future__ import annotations

from typing import Any

from jetrl_patch.errors import ModelError, explain
from jetrl_patch.exact.rope import rope_parameters
from jetrl_patch.families import FAMILIES, Family, covering

__all__ = ["check_family"]

_ROPE_TYPES = ("default", "llama3", "linear")
_WAY_OUT = 'use align="linear" (shared FP8 linears, a small mismatch), or precision="bf16"'


def check_family(hf_config: Any) -> Family:
    """Return the record of the model's family.

    Raises:
        ModelError: the family, or a setting of the model, is not covered. The message names it and the alternatives.
    """
    model_type = getattr(hf_config, "model_type", None)
    covered = covering("exact")
    if model_type not in covered:
        known = FAMILIES.get(model_type) if isinstance(model_type, str) else None
        why = f" ({known.uncovered['exact']})" if known else ""
        raise ModelError(
            explain(
                'align="exact"',
                required=f"one of the model families {', '.join(covered)}",
                found=f"model_type={model_type!r}{why}",
                fix=_WAY_OUT,
            )
        )
    family = covered[model_type]
    problems = []
    architectures = getattr(hf_config, "architectures", None) or [family.causal_lm]
    if family.causal_lm not in architectures:
        problems.append(f"architectures={architectures} (expected {family.causal_lm})")
    broken = [setting for setting in family.settings if setting.problem(hf_config)]
    problems += [setting.problem(hf_config) for setting in broken]
    rope = rope_parameters(hf_config)
    if not family.partial_rotary and rope.get("partial_rotary_factor", 1.0) != 1.0:
        problems.append(f"partial_rotary_factor={rope['partial_rotary_factor']} (expected 1)")
    if rope["rope_type"] not in _ROPE_TYPES:
        problems.append(f"rope type {rope['rope_type']!r} (expected one of {', '.join(_ROPE_TYPES)})")
    if problems:
        ways = "".join(f"{fix}, or " for fix in dict.fromkeys(s.fix for s in broken if s.fix))
        fix = ways + _WAY_OUT
        raise ModelError(
            f'align="exact" does not cover this {model_type} model: {"; ".join(problems)}. {fix[0].upper()}{fix[1:]}.'
        )
    return family
