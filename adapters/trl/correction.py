"""jetrl_patch's corrections in GRPO: by TRL's own settings, and by the plugin's weights for ``geo-mis``, which TRL lacks.

``GRPOTrainer`` multiplies the loss of a token by the batch's "importance_sampling_ratio". RLOO has no correction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jetrl_patch.config.corrections import AROUND_ONE, CORRECTIONS, around_one, interval
from jetrl_patch.errors import ConfigError, JetrlError, explain

if TYPE_CHECKING:
    from jetrl_patch.config import Config
    from jetrl_patch.measure.mismatch import Applied

_SETTING = "vllm_importance_sampling"
#: correction -> TRL's mode. A truncation without bounds leaves the ratio that the plugin's weights then replace
_MODES = {
    "tis": "token_truncate", "mis": "token_mask", "icepop": "token_mask", "seq-tis": "sequence_truncate",
    "seq-mis": "sequence_mask", "geo-mis": "token_truncate",
}  # fmt: skip


def wanted(config: Config) -> dict[str, Any]:
    """The settings of ``GRPOConfig`` that make TRL apply the plugin's correction; empty without one."""
    if config.correction == "none":
        return {}
    low, high = interval(config.correction, config.correction_bounds)
    is_ours = config.correction == "geo-mis"
    return {
        f"{_SETTING}_correction": True,
        f"{_SETTING}_mode": _MODES[config.correction],
        f"{_SETTING}_clip_min": None if is_ours or not low else low,
        f"{_SETTING}_clip_max": math.inf if is_ours else high,
    }


def problems(args: Any, kind: str, config: Config) -> Iterator[JetrlError]:
    """Yield an error for each of TRL's settings that contradicts the plugin's correction, and for bounds without 1."""
    if config.correction == "none":
        low, high = _bounds(args)
        if getattr(args, f"{_SETTING}_correction", False) and not (config.mode.only_measures or around_one(low, high)):
            what, fix = f"GRPOConfig's {_SETTING}_clip_min and {_SETTING}_clip_max", "move them, or leave them at their defaults"
            yield ConfigError(explain(what, required=AROUND_ONE, found=f"{(low, high)}", fix=fix))
        return
    what = f"correction={config.correction!r} with {kind}"
    if not hasattr(args, f"{_SETTING}_mode"):
        required, fix = "a loss with importance weights", "leave correction unset, or use GRPOTrainer"
        yield ConfigError(explain(what, required=required, found="none in TRL", fix=fix))
        return
    defaults = type(args).__dataclass_fields__
    changed = {
        name: own for name, value in wanted(config).items()
        if (own := getattr(args, name)) not in (value, defaults[name].default)
    }  # fmt: skip
    if changed:
        required, fix = "TRL's own correction at its defaults", "drop it, or drop jetrl_patch's correction"
        found = ", ".join(f"{name}={value!r}" for name, value in changed.items())
        yield ConfigError(explain(what, required=required, found=found, fix=fix))
    if config.correction == "geo-mis" and args.loss_type == "vespo":
        required, fix = "a loss that is multiplied by the weights", "use correction='seq-mis', or another loss_type"
        yield ConfigError(explain(what, required=required, found="loss_type='vespo'", fix=fix))


def apply(args: Any, config: Config) -> None:
    """Set TRL's settings before the trainer reads them."""
    for name, value in wanted(config).items():
        setattr(args, name, value)


def in_use(trainer: Any, config: Config) -> tuple[str, tuple[float, float]] | None:
    """Name and interval of a trainer's correction, jetrl_patch's or TRL's; None without one, or if TRL's has no name here."""
    if config.correction != "none":
        return config.correction, interval(config.correction, config.correction_bounds)
    if not getattr(trainer, f"{_SETTING}_correction", False):
        return None
    low, high = _bounds(trainer)
    names = [name for name, mode in _MODES.items() if mode == getattr(trainer, f"{_SETTING}_mode") and name != "geo-mis"]
    found = names[-1] if low else names[0]
    return None if low and CORRECTIONS[found].truncates else (found, (low, high))


def weigh(trainer: Any, batch: dict[str, Any], log_ratio: Any, mask: Any, config: Config) -> Applied | None:
    """Apply ``geo-mis`` to a batch, and return what the correction in use does to log-ratios [B, T]; None without a named one."""
    from jetrl_patch.measure.corrections import correct
    from jetrl_patch.measure.mismatch import of_run

    if config.correction == "geo-mis":
        batch["importance_sampling_ratio"] = correct("geo-mis", log_ratio, mask, config.correction_bounds).weights
    return of_run(in_use(trainer, config), log_ratio, mask)


def _bounds(owner: Any) -> tuple[float, float]:
    """The bounds of TRL's correction, by a configuration or a trainer; 0 and infinity where there is none."""
    low, high = (getattr(owner, f"{_SETTING}_clip_{name}", None) for name in ("min", "max"))
    return float(low or 0.0), math.inf if high is None else float(high)
