"""jetrl_patch's corrections in GRPO: by TRL's own settings, and by the plugin's for ``geo-mis`` and ACR, which TRL lacks.

``GRPOTrainer`` multiplies the loss of a token by the batch's "importance_sampling_ratio". RLOO has no correction.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jetrl_patch.adapters.trl.state import OLD, ROLLOUT
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
#: losses that clip the ratio of each token
_CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


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
    if config.acr:
        settings = {"loss_type": _CLIPPED, "importance_sampling_level": ("token",), "delta": (None,)}
        if given := [f"{name}={own!r}" for name, allowed in settings.items() if (own := getattr(args, name)) not in allowed]:
            required = f"loss_type={' or '.join(map(repr, _CLIPPED))}, importance_sampling_level='token' and no delta"
            fix = "change these, or drop acr"
            yield ConfigError(explain(f"acr=True with {kind}", required=required, found=", ".join(given), fix=fix))
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


@contextlib.contextmanager
def clip_of(trainer: Any, batch: dict[str, Any], config: Config) -> Iterator[None]:
    """While it lasts, the trainer's loss of a batch clips ratios as ACR does, if it is on.

    TRL clamps to 1 - ``epsilon_low`` and 1 + ``epsilon_high``, both numbers or both tensors.
    """
    if not config.acr or ROLLOUT not in batch:  # without vLLM there is no ratio
        yield
        return
    import torch

    from jetrl_patch.measure.corrections import acr_upper

    given = trainer.epsilon_low, trainer.epsilon_high
    ratio = (batch[OLD] - batch[ROLLOUT]).exp()
    upper = acr_upper(ratio, interval(config.correction, config.correction_bounds)[1], given[1])
    lower = torch.full_like(upper, 1 - given[0])
    trainer.epsilon_low, trainer.epsilon_high = 1 - lower, upper - 1  # differences that TRL's own undo without rounding
    try:
        yield
    finally:
        trainer.epsilon_low, trainer.epsilon_high = given


def _bounds(owner: Any) -> tuple[float, float]:
    """The bounds of TRL's correction, by a configuration or a trainer; 0 and infinity where there is none."""
    low, high = (getattr(owner, f"{_SETTING}_clip_{name}", None) for name in ("min", "max"))
    return float(low or 0.0), math.inf if high is None else float(high)
