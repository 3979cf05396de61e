"""What follows from the settings, and the checks of them and of their combinations, before anything changes. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from jetrl_patch.config.corrections import CORRECTIONS
from jetrl_patch.config.fields import Fields
from jetrl_patch.config.modes import MODES, Granularity, Mode, ResolvedAlign, RolloutFormat
from jetrl_patch.errors import ConfigError, explain
from jetrl_patch.patching.guards import is_installed

__all__ = [
    "CLASSES", "MODULE", "REQUIRED", "Derived", "check_auto_switch", "check_choice", "check_installed", "check_monitor",
    "check_options", "check_precision", "check_scaling", "check_switch", "check_together", "number", "patterns", "seconds",
]  # fmt: skip


# ---- Properties derived from the settings and the table of precisions ----------------------------

@dataclass(frozen=True, kw_only=True)
class Derived(Fields):
    """The settings, unchecked, with the derived properties that the rest of the plugin reads."""

    @property
    def mode(self) -> Mode:
        """The record of the precision."""
        return MODES[self.precision]

    @property
    def format(self) -> RolloutFormat | None:
        """The format of the rollout's linears; None if they are not quantized."""
        return self.mode.format(self.rollout_granularity)

    @property
    def resolved_align(self) -> ResolvedAlign:
        """The effective ``align``: ``"exact"``, ``"linear"`` or ``"none"``."""
        return self.mode.align if self.align is None else self.align

    @property
    def quantized_rollout(self) -> bool:
        """Whether the rollout's linears are quantized."""
        return self.mode.quantizes

    @property
    def channelwise(self) -> bool:
        """Whether the rollout has one scale per output channel and token."""
        return self.granularity == "channel"

    @property
    def granularity(self) -> Granularity:
        """The granularity of the rollout's scales; ``rollout_granularity`` if its linears are not quantized."""
        return self.rollout_granularity if self.format is None else self.format.granularity

    @property
    def resolved_smoothing(self) -> float:
        """The effective ``smoothing``; 0 is off."""
        return self.mode.smoothing if self.smoothing is None else self.smoothing

    @property
    def fp32_head(self) -> bool:
        """Whether both sides compute logits in FP32."""
        return self.head_dtype == "float32"

    @property
    def same_log_probs(self) -> bool:
        """Whether the trainer computes log-probs by the rollout's formula, in FP32."""
        return self.exact or self.mode.rollout_log_probs

    @property
    def skips_old_pass(self) -> bool:
        """Whether the rollout's log-probs serve as a step's old ones, so that the trainer skips its forward pass for them."""
        return self.old_log_probs == "rollout" or (self.old_log_probs == "auto" and self.exact)

    @property
    def returns_routes(self) -> bool:
        """Whether the rollout returns the experts that it chose for each token."""
        return self.measure_routes or self.router_replay != "none"

    @property
    def compute_dtype(self) -> str:
        """torch's name of the 16-bit dtype on both sides."""
        return self.mode.dtype

    @property
    def fp8_rollout(self) -> bool:
        """Whether the rollout's linears are FP8."""
        return self.format is not None and self.format.is_fp8

    @property
    def fp8_train(self) -> bool:
        """Whether the trainer's linears are FP8."""
        return self.mode.trains_fp8

    @property
    def exact(self) -> bool:
        """Whether trainer and rollout must be bit-equal."""
        return self.resolved_align == "exact"

    @property
    def may_capture(self) -> bool:
        """Whether an exact rollout on a GPU may replay CUDA graphs. They would replay a layer in FP8 that the guard has moved."""
        return self.decode_graphs is True or (self.decode_graphs == "auto" and self.exact and self.guard_sqnr is None)

    @property
    def fixes_upstream(self) -> bool:
        """The effective ``upstream_fixes``: whether to fix bugs of other projects that do not keep a run from starting."""
        return not self.mode.only_measures if self.upstream_fixes is None else self.upstream_fixes


# ---- Checks of single settings, and of combinations that belong to no other module ---------------

def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raise ConfigError if the value is not one of the allowed words."""
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"unknown {name} {value!r}. Set it to one of {', '.join(map(repr, allowed))}.")


def check_switch(name: str, value: object) -> None:
    """Raise ConfigError if the value is not a bool."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} must be True or False.")


def check_auto_switch(name: str, value: object) -> None:
    """Raise ConfigError if the value is neither a bool nor ``"auto"``."""
    if not isinstance(value, bool) and value != "auto":
        raise ConfigError(f"{name}={value!r} must be 'auto', True or False.")


def number(name: str, value: object) -> float:
    """The value as a finite float. Raises ConfigError for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{name}={value!r} must be a finite number.")
    return float(value)


def seconds(name: str, value: object) -> float:
    """The value as a positive duration in seconds. Raises ConfigError for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{name}={value!r} must be a positive, finite number of seconds.")
    return float(value)


def patterns(value: object) -> tuple[str, ...]:
    """``exclude`` as a tuple. Raises ConfigError if it is not a list of name patterns."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ConfigError(f"exclude={value!r} must be a list of patterns. Write ({value!r},) for a single one.")
    found = tuple(value)
    for pattern in found:
        if not isinstance(pattern, str):
            raise ConfigError(_bad_pattern(pattern, "not a string"))
        if not pattern or any(part == "" for part in pattern.split(".")):
            raise ConfigError(_bad_pattern(pattern, "with an empty name part"))
        if "," in pattern or any(char.isspace() for char in pattern):
            raise ConfigError(_bad_pattern(pattern, "with a comma or a blank"))
    return cast("tuple[str, ...]", found)


def _bad_pattern(pattern: object, why: str) -> str:
    return explain(
        "exclude",
        required="patterns such as 'layers.0' or 'mlp.*'",
        found=f"{pattern!r}, {why}",
        fix="give one pattern per entry",
    )


def check_together(config: Derived) -> None:
    """Raise ConfigError if settings contradict each other."""
    unified = " or ".join(repr(name) for name, mode in MODES.items() if mode.is_unified)
    if config.align is not None and not config.mode.is_unified:
        raise ConfigError(
            f"align={config.align!r} contradicts precision={config.precision!r}: only {unified} has the same "
            f"linears on both sides. Drop align or use {unified}."
        )
    if config.fp8_all_gather and not config.fp8_train:
        raise ConfigError(
            f"fp8_all_gather=True contradicts precision={config.precision!r}: only {unified} trains with FP8 "
            f"weights. Drop fp8_all_gather or use {unified}."
        )
    if config.sync == "delta" and not config.quantized_rollout:
        raise ConfigError(
            f"sync='delta' contradicts precision={config.precision!r}: without a quantized rollout the framework itself "
            "sends the weights. Drop sync or choose a precision that quantizes the rollout."
        )
    if config.old_log_probs == "rollout" and not config.exact:
        raise ConfigError(
            f"old_log_probs='rollout' contradicts align={config.resolved_align!r}: only in exact mode are the rollout's "
            "log-probs the trainer's. Set align='exact' or old_log_probs='recompute'."
        )
    if config.router_replay != "none" and config.exact:
        raise ConfigError(
            f"router_replay={config.router_replay!r} contradicts align='exact': there both sides choose the same experts. "
            "Drop router_replay or use align='linear'."
        )
    if config.router_replay != "none" and not config.fp8_rollout:
        raise ConfigError(
            f"router_replay={config.router_replay!r} contradicts precision={config.precision!r}: routes are replayed from an FP8 "
            "rollout alone. Drop router_replay or use precision='fp8-rollout'."
        )
    if config.decode_graphs is True and not config.exact:
        raise ConfigError(
            f"decode_graphs=True contradicts align={config.resolved_align!r}: outside of exact mode vLLM captures graphs by "
            "itself. Drop decode_graphs or use align='exact'."
        )
    if config.decode_graphs is True and config.guard_sqnr is not None:
        raise ConfigError(
            f"decode_graphs=True contradicts guard_sqnr={config.guard_sqnr!r}: a graph would keep running layers that have left "
            "FP8. Drop one of the two."
        )
    if not 0 <= config.audit_fraction <= 1:
        raise ConfigError(f"audit_fraction={config.audit_fraction!r} must be between 0 and 1.")
    below = [name for name, found in CORRECTIONS.items() if found.takes_acr]
    if config.acr and config.correction not in below:
        raise ConfigError(
            f"acr=True with correction={config.correction!r}: the adaptive clipping range compensates for truncated token "
            f"ratios, and this correction truncates none. Set correction={' or '.join(map(repr, below))} or drop acr."
        )
    if config.optimizer_states != "fp32" and config.fp8_all_gather:
        raise ConfigError(
            f"optimizer_states={config.optimizer_states!r} contradicts fp8_all_gather=True: the 8-bit update has not been "
            f"tested on the tensor subclass of the gathered weights. Drop one of the two."
        )


# ---- Checks of the monitor's and the guard's settings, made before anything starts ---------------

def check_monitor(config: Derived) -> None:
    """Raise ConfigError for meaningless thresholds and for a guard that cannot act."""
    every, share, guard = config.monitor_every, config.monitor_underflow, config.guard_sqnr
    if isinstance(every, bool) or not isinstance(every, int) or every < 0:
        raise ConfigError(f"monitor_every={every!r} must be a whole number of steps. Set it to 0 to turn the monitor off.")
    if not 0 <= share <= 1:
        raise ConfigError(f"monitor_underflow={share!r} must be between 0 and 1.")
    if guard is None:
        return
    if not every:
        raise ConfigError("guard_sqnr needs the monitor's measurements. Set monitor_every to 1 or more.")
    if not config.fp8_train:
        raise ConfigError(
            f"guard_sqnr={guard!r} contradicts precision={config.precision!r}: the guard moves layers from FP8 to BF16 "
            f"on both sides, and this mode does not have FP8 on both. Unset guard_sqnr."
        )
    if config.backend == "te":
        raise ConfigError(
            f"guard_sqnr={guard!r} contradicts backend='te': TransformerEngine layers cannot leave FP8 one by one. "
            f"Unset one of the two."
        )
    if config.fp8_all_gather:
        raise ConfigError(
            f"guard_sqnr={guard!r} contradicts fp8_all_gather=True: a layer that leaves FP8 needs its weight in BF16, "
            f"and FSDP2 gathers only FP8 bytes. Unset one of the two."
        )


# ---- Cross-checks of the settings of rollout formats and scales. Imports no torch, because ``Config`` calls it early

def check_scaling(config: Derived) -> None:
    """Raise ConfigError if granularity, backend, smoothing or invariant scale is invalid or contradicts the precision."""
    mode = f"precision={config.precision!r}"
    if config.rollout_granularity != "block" and not config.mode.has_granularity:
        raise ConfigError(
            f"rollout_granularity={config.rollout_granularity!r} contradicts {mode}: {config.mode.one_granularity}"
        )
    if config.mode.backends and config.backend not in config.mode.backends:
        raise ConfigError(
            f"backend={config.backend!r} contradicts {mode}, whose products are not FP8. Use backend='auto', or 'torch' "
            "for the reference."
        )
    if config.smoothing is not None:
        alpha = _number("smoothing", config.smoothing)
        if not 0 <= alpha <= 1:
            raise ConfigError(f"smoothing={config.smoothing!r} must lie between 0 (off) and 1.")
        if alpha and not config.channelwise:
            raise ConfigError(
                f"smoothing={alpha:g} contradicts {mode} with scales per {config.rollout_granularity}: it needs scales per "
                f"channel and token. Use {_channelwise()}."
            )
        object.__setattr__(config, "smoothing", alpha)
    if config.invariant_scale is not None:
        scale = _number("invariant_scale", config.invariant_scale)
        if scale <= 0:
            raise ConfigError(f"invariant_scale={config.invariant_scale!r} must be above 0. QuRL uses 1.5.")
        if not config.quantized_rollout:
            raise ConfigError(
                f"invariant_scale={scale:g} contradicts {mode}: it enlarges updates relative to quantized weights, and this "
                "rollout is not quantized. Drop invariant_scale."
            )
        object.__setattr__(config, "invariant_scale", scale)


def _channelwise() -> str:
    """The settings that give scales per channel, as a phrase for a message."""
    from jetrl_patch.config.modes import MODES  # imported here, because this module is loaded while the package is

    choice = " with rollout_granularity='channel'"
    return " or ".join(
        repr(name) + (choice if mode.has_granularity else "")
        for name, mode in MODES.items()
        if any(found.granularity == "channel" for found in mode.formats)
    )


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{name}={value!r} must be a finite number.")
    return float(value)


# ---- Check ``kv_cache`` and ``head_dtype`` before anything starts --------------------------------

def check_precision(config: Derived) -> None:
    """Raise ConfigError if these settings contradict ``align`` or ``precision``."""
    if config.kv_cache == "fp8" and config.exact:
        raise ConfigError(
            explain(
                "kv_cache='fp8' with align='exact'",
                required="a trainer whose attention equals the rollout's",
                found="keys and values that only the rollout rounds to FP8",
                fix="drop kv_cache, or use align='linear'",
            )
        )
    if config.head_dtype not in ("auto", "float32", config.compute_dtype):
        raise ConfigError(
            explain(
                f"head_dtype={config.head_dtype!r} with precision={config.precision!r}",
                required="one 16-bit format",
                found="two",
                fix=f"leave head_dtype at 'auto', which is {config.compute_dtype} here, or use 'float32'",
            )
        )


# ---- The optimizer class for each ``optimizer_states``, and the checks it needs. Imports no torch

MODULE = "jetrl_patch.trainer.optimizer"
#: ``Config.optimizer_states`` -> the class in ``MODULE``
CLASSES = {"8bit": "AdamW8bit", "fp8": "AdamWFp8"}
#: the requirement for ``pip install``
REQUIRED = "torchao>=0.18,<0.19"
#: options of these classes besides lr, betas and weight_decay
OPTIONS = ("eps", "block_size", "bf16_stochastic_round")


def check_installed(states: str) -> None:
    """Raise ConfigError if torchao is not installed."""
    if not is_installed("torchao"):
        raise ConfigError(
            explain(
                f"optimizer_states={states!r}",
                required=REQUIRED,
                found="no installed torchao",
                fix=f"install it with `pip install '{REQUIRED}'`, or leave optimizer_states at 'fp32'",
            )
        )


def check_options(states: str, options: Mapping[str, object], where: str) -> None:
    """Raise ConfigError for options that these classes do not have.

    Args:
        states: the value of ``optimizer_states``.
        options: the framework's optimizer options.
        where: the framework's name for that setting.
    """
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise ConfigError(
            explain(
                f"{where} with optimizer_states={states!r}",
                required=f"options of torchao's AdamW ({', '.join(OPTIONS)})",
                found=", ".join(unknown),
                fix="remove them",
            )
        )
