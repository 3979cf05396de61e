"""``Config``: the settings of a run, frozen, what follows from them, and their checks. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, cast

from jetrl_patch.config import environment
from jetrl_patch.config.corrections import AROUND_ONE, CORRECTIONS, around_one, interval
from jetrl_patch.config.fields import AUTO_SWITCH, SETTINGS, SWITCH, Fields
from jetrl_patch.config.formats import FORMATS, Format
from jetrl_patch.config.modes import MODES, Granularity, Mode, ResolvedAlign, RolloutFormat
from jetrl_patch.errors import ConfigError, explain, unknown


@dataclass(frozen=True, kw_only=True)
class Config(Fields):
    """The settings of a run, frozen and keyword-only. Every process of a run must have equal settings.

    Decide on these first, in this order: ``precision``, ``align``, ``correction``, ``decode_graphs``, ``on_mismatch``,
    ``old_log_probs``, ``audit_fraction``, ``monitor_every``. The rest, by group:

    - precision: ``scale_format``, ``exclude``, ``on_cut``, ``head_dtype``
    - exactness: ``backend``, ``router_replay``, ``exact_attention``
    - rollout: ``rollout_granularity``, ``smoothing``, ``invariant_scale``, ``kv_cache``
    - sync: ``sync``, ``sync_timeout``, ``fp8_all_gather``
    - monitor: ``monitor_layers``, ``monitor_sqnr``, ``monitor_underflow``, ``monitor_action``, ``measure_routes``, ``guard_sqnr``
    - correction: ``correction_bounds``, ``acr``
    - optimizer: ``optimizer_states``, ``resume_any``
    - process: ``platform``, ``upstream_fixes``

    ``jetrl_patch/config/fields.py`` defines the values and the meaning of each; docs/configuration.md shows them as tables.

    Raises ConfigError for a value that is unknown or malformed, and for settings that contradict each other.
    """

    def __post_init__(self) -> None:
        for name, checked in _checked(self).items():
            object.__setattr__(self, name, checked)
        for contradiction in _contradictions(self):
            raise ConfigError(contradiction)

    # ---- Other forms of the settings -------------------------------------------------------------

    def resolved(self) -> Config:
        """The settings in canonical form, with ``align`` set explicitly. Two configs are equivalent if these are equal."""
        fixes = None if self.fixes_upstream == (not self.mode.only_measures) else self.upstream_fixes
        align = None if self.resolved_align == "none" else self.resolved_align
        head = "auto" if self.head_dtype == "bfloat16" else self.head_dtype
        return dataclasses.replace(self, align=align, head_dtype=head, upstream_fixes=fixes)

    def replace(self, **overrides: Any) -> Config:
        """A copy with some fields changed. Raises ConfigError for an unknown field."""
        wrong = sorted(set(overrides) - set(SETTINGS))
        if wrong:
            raise ConfigError(unknown(f"setting {', '.join(wrong)}", wrong, SETTINGS))
        return dataclasses.replace(self, **overrides)

    def to_env(self) -> dict[str, str]:
        """Variable -> text for every variable that ``from_env`` reads: no stale value survives."""
        texts = {variable: environment.written(getattr(self, name)) for variable, name in environment.FIELDS.items()}
        return {environment.SWITCH: "1", **texts}

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Config:
        """The settings of the ``JETRL_*`` variables in ``environ`` (default: ``os.environ``), with defaults for the rest.

        ``overrides`` are fields that override the variables. Raises ConfigError for an unknown field or variable.
        """
        return cls().replace(**{**environment.from_text(environment.read_fields(environ)), **overrides})

    @classmethod
    def given(cls, config: object, overrides: Mapping[str, Any]) -> Config:
        """The settings that a caller passes: ``config``, or those of the environment if it is None, with ``overrides``.

        Raises ConfigError as ``from_env``, and if ``config`` is anything else.
        """
        if config is None:
            return cls.from_env(**overrides)
        if isinstance(config, cls):
            return config.replace(**overrides)
        required, fix = "a Config or single settings by name", "write for instance enable(precision='fp8-unified')"
        raise ConfigError(explain("enable()", required=required, found=repr(config), fix=fix))

    @classmethod
    def parse(cls, name: str, text: str) -> Any:
        """The value of one setting from text, checked unless that involves another setting. Raises ConfigError."""
        if SETTINGS[name].joint:
            return environment.from_text({name: text})[name]
        return getattr(cls.from_env({SETTINGS[name].variable: text}), name)

    # ---- Properties derived from the settings and the table of precisions ------------------------

    @property
    def mode(self) -> Mode:
        """The record of the precision."""
        return MODES[self.precision]

    @property
    def format(self) -> RolloutFormat | None:
        """The format of the rollout's linears; None if they are not quantized."""
        return self.mode.format(self.rollout_granularity)

    @property
    def scales(self) -> Format:
        """How scales are shared in the FP8 flow."""
        return FORMATS[self.scale_format]

    @property
    def resolved_align(self) -> ResolvedAlign:
        """The effective ``align``: ``"exact"``, ``"linear"`` or ``"none"``."""
        return self.mode.align if self.align is None else self.align

    @property
    def exact(self) -> bool:
        """Whether trainer and rollout must be bit-equal."""
        return self.resolved_align == "exact"

    @property
    def resolved_attention(self) -> str:
        """The effective ``exact_attention``: an FP8 KV cache needs the project's kernel."""
        return "triton" if self.kv_cache == "fp8" else self.exact_attention

    @property
    def changes_rollout(self) -> bool:
        """Whether a rollout engine computes differently with these settings, so that its trainer must too."""
        return self.quantized_rollout or self.mode.scales_loss

    @property
    def quantized_rollout(self) -> bool:
        """Whether the rollout's linears are quantized."""
        return self.mode.quantizes

    @property
    def fp8_rollout(self) -> bool:
        """Whether the rollout's linears are FP8."""
        return self.format is not None and self.format.is_fp8

    @property
    def fp8_train(self) -> bool:
        """Whether the trainer's linears are FP8."""
        return self.mode.trains_fp8

    @property
    def granularity(self) -> Granularity:
        """The granularity of the rollout's scales; ``rollout_granularity`` if its linears are not quantized."""
        return self.rollout_granularity if self.format is None else self.format.granularity

    @property
    def channelwise(self) -> bool:
        """Whether the rollout has one scale per output channel and token."""
        return self.granularity == "channel"

    @property
    def compute_dtype(self) -> str:
        """torch's name of the 16-bit dtype on both sides."""
        return self.mode.dtype

    @property
    def fp32_head(self) -> bool:
        """Whether both sides compute logits in FP32."""
        return self.head_dtype == "float32"

    @property
    def resolved_smoothing(self) -> float:
        """The effective ``smoothing``; 0 is off."""
        return self.mode.smoothing if self.smoothing is None else self.smoothing

    @property
    def same_log_probs(self) -> bool:
        """Whether the trainer computes log-probs by the rollout's formula, in FP32."""
        return self.exact or self.mode.rollout_log_probs

    @property
    def skips_old_pass(self) -> bool:
        """Whether the trainer skips its forward pass for old log-probs and uses the rollout's."""
        return self.old_log_probs == "rollout" or (self.old_log_probs == "auto" and self.exact)

    @property
    def returns_routes(self) -> bool:
        """Whether the rollout returns the experts that it chose for each token."""
        return self.measure_routes or self.router_replay != "none"

    @property
    def may_capture(self) -> bool:
        """Whether an exact rollout on a GPU may replay CUDA graphs. They would replay a layer in FP8 that the guard has moved."""
        return self.decode_graphs is True or (self.decode_graphs == "auto" and self.exact and self.guard_sqnr is None)

    @property
    def fixes_upstream(self) -> bool:
        """The effective ``upstream_fixes``: whether to fix bugs of other projects that do not keep a run from starting."""
        return not self.mode.only_measures if self.upstream_fixes is None else self.upstream_fixes


# ---- Checks of single settings -------------------------------------------------------------------

def _checked(config: Config) -> dict[str, object]:
    """The values to store instead of those given: numbers as floats, lists as tuples. Raises ConfigError for a bad value."""
    given = {name: getattr(config, name) for name in SETTINGS}
    given = {name: value for name, value in given.items() if not (value is None and SETTINGS[name].default is None)}
    for name, value in given.items():
        found = SETTINGS[name]
        if found.choices and not (isinstance(value, str) and value in found.choices):
            raise ConfigError(f"unknown {name} {value!r}. Set it to one of {', '.join(map(repr, found.choices))}.")
        if found.form is SWITCH and not isinstance(value, bool):
            raise ConfigError(f"{name}={value!r} must be True or False.")
        if found.form is AUTO_SWITCH and not isinstance(value, bool) and value != "auto":
            raise ConfigError(f"{name}={value!r} must be 'auto', True or False.")
    every = config.monitor_every
    if isinstance(every, bool) or not isinstance(every, int) or every < 0:
        raise ConfigError(f"monitor_every={every!r} must be a whole number of steps. Set it to 0 to turn the monitor off.")
    checked: dict[str, object] = {"exclude": _patterns(config.exclude), "sync_timeout": _seconds(config.sync_timeout)}
    shares = ("audit_fraction", "monitor_underflow")
    for name in (*shares, "monitor_sqnr", "guard_sqnr", "smoothing", "invariant_scale"):
        if name in given:
            value = checked[name] = _number(name, given[name])
            if name in shares and not 0 <= value <= 1:
                raise ConfigError(f"{name}={value!r} must be between 0 and 1.")
            if name == "smoothing" and not 0 <= value <= 1:
                raise ConfigError(f"smoothing={value:g} must lie between 0 (off) and 1.")
            if name == "invariant_scale" and value <= 0:
                raise ConfigError(f"invariant_scale={value:g} must be above 0. QuRL uses 1.5.")
    if config.correction_bounds is not None:
        checked["correction_bounds"] = _bounds(config.correction, config.correction_bounds)
    return checked


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _number(name: str, value: Any) -> float:
    if not _is_finite(value):
        raise ConfigError(f"{name}={value!r} must be a finite number.")
    return float(value)


def _seconds(value: Any) -> float:
    if not _is_finite(value) or value <= 0:
        raise ConfigError(f"sync_timeout={value!r} must be a positive, finite number of seconds.")
    return float(value)


def _patterns(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ConfigError(f"exclude={value!r} must be a list of patterns. Write ({value!r},) for a single one.")
    found = tuple(value)
    for pattern in found:
        wrong = ""
        if not isinstance(pattern, str):
            wrong = "not a string"
        elif "" in pattern.split("."):
            wrong = "with an empty name part"
        elif "," in pattern or any(char.isspace() for char in pattern):
            wrong = "with a comma or a blank"
        if wrong:
            required, fix = "patterns such as 'layers.0' or 'mlp.*'", "give one pattern per entry"
            raise ConfigError(explain("exclude", required=required, found=f"{pattern!r}, {wrong}", fix=fix))
    return cast("tuple[str, ...]", found)


def _bounds(kind: str, bounds: object) -> tuple[float, ...]:
    """``correction_bounds`` of the correction ``kind``: a cap, as a number or a sequence of one, or ``(low, high)``."""
    what = f"correction_bounds={bounds!r}"
    values = (bounds,) if isinstance(bounds, Real) else bounds
    numbers = isinstance(values, Sequence) and all(isinstance(v, Real) and not isinstance(v, bool) for v in values)
    if isinstance(values, str) or not numbers:
        raise ConfigError(f"{what} must be one number, the cap, or two, low and high.")
    if kind not in CORRECTIONS:
        raise ConfigError(f"{what} belongs to no correction. Drop it or set correction.")
    found, correction = tuple(map(float, cast("Sequence[float]", values))), CORRECTIONS[kind]
    if len(found) not in correction.bounds:
        number = f"{len(found)} number{'' if len(found) == 1 else 's'}"
        fix = "set the bounds that this correction takes, or drop correction_bounds to use its defaults"
        raise ConfigError(explain(f"{what} with correction={kind!r}", required=correction.needs, found=number, fix=fix))
    if not math.isfinite(found[-1]) or found[-1] <= 0:
        raise ConfigError(f"{what}: the cap must be a positive, finite number.")
    if not 0 <= found[0] <= found[-1]:
        raise ConfigError(f"{what}: low must lie between 0 and high. Write low first.")
    if not around_one(*interval(kind, found)):
        fix = "move the bounds, or drop correction_bounds to use the defaults"
        raise ConfigError(explain(f"{what} with correction={kind!r}", required=AROUND_ONE, found=f"{bounds!r}", fix=fix))
    return found


# ---- Settings that contradict each other ---------------------------------------------------------

def _contradictions(config: Config) -> Iterator[str]:
    """A message for each pair of settings that contradict each other."""
    unified = " or ".join(repr(name) for name, mode in MODES.items() if mode.is_unified)
    precision, align = f"precision={config.precision!r}", f"align={config.resolved_align!r}"
    guard, gather = f"guard_sqnr={config.guard_sqnr!r}", "fp8_all_gather=True"
    if not config.scales.square:
        yield from _against_scales(config, precision)
    if config.align is not None and not config.mode.is_unified:
        yield f"{align} contradicts {precision}: only {unified} has the same linears on both sides. Drop align or use {unified}."
    if config.fp8_all_gather and not config.fp8_train:
        fix = f"Drop fp8_all_gather or use {unified}."
        yield f"{gather} contradicts {precision}: only {unified} trains with FP8 weights. {fix}"
    if config.sync == "delta" and not config.quantized_rollout:
        why = "without a quantized rollout the framework itself sends the weights"
        yield f"sync='delta' contradicts {precision}: {why}. Drop sync or choose a precision that quantizes the rollout."
    if config.old_log_probs == "rollout" and not config.exact:
        why = "only in exact mode are the rollout's log-probs the trainer's"
        yield f"old_log_probs='rollout' contradicts {align}: {why}. Set align='exact' or old_log_probs='recompute'."
    replay = f"router_replay={config.router_replay!r}"
    if config.router_replay != "none" and config.exact:
        yield f"{replay} contradicts {align}: there both sides choose the same experts. Drop router_replay or use align='linear'."
    if config.router_replay != "none" and not config.fp8_rollout:
        fix = "Drop router_replay or use precision='fp8-rollout'."
        yield f"{replay} contradicts {precision}: only an FP8 rollout's routes are replayed. {fix}"
    if config.decode_graphs is True and not config.exact:
        why = "outside exact mode vLLM captures graphs by itself"
        yield f"decode_graphs=True contradicts {align}: {why}. Drop decode_graphs or use align='exact'."
    if config.decode_graphs is True and config.guard_sqnr is not None:
        why = "a graph would keep running layers that have left FP8"
        yield f"decode_graphs=True contradicts {guard}: {why}. Drop one of the two."
    if config.acr and not (config.correction in CORRECTIONS and CORRECTIONS[config.correction].takes_acr):
        takers = " or ".join(repr(name) for name, found in CORRECTIONS.items() if found.takes_acr)
        why = "the adaptive clipping range compensates for truncated token ratios, and this correction truncates none"
        yield f"acr=True with correction={config.correction!r}: {why}. Set correction={takers} or drop acr."
    if config.optimizer_states != "fp32" and config.fp8_all_gather:
        why = "the 8-bit update has not been tested on the tensor subclass of the gathered weights"
        yield f"optimizer_states={config.optimizer_states!r} contradicts {gather}: {why}. Drop one of the two."
    if config.guard_sqnr is not None:
        if not config.monitor_every:
            yield "guard_sqnr needs the monitor's measurements. Set monitor_every to 1 or more."
        if not config.fp8_train:
            why = "the guard moves layers from FP8 to BF16 on both sides, and this mode does not use FP8 on both"
            yield f"{guard} contradicts {precision}: {why}. Unset guard_sqnr."
        if config.backend == "te":
            why = "TransformerEngine layers cannot leave FP8 one by one"
            yield f"{guard} contradicts backend='te': {why}. Unset one of the two."
        if config.fp8_all_gather:
            why = "a layer that leaves FP8 needs its weight in BF16, and FSDP2 gathers only FP8 bytes"
            yield f"{guard} contradicts {gather}: {why}. Unset one of the two."
    if config.rollout_granularity != "block" and not config.mode.has_granularity:
        yield f"rollout_granularity={config.rollout_granularity!r} contradicts {precision}: {config.mode.one_granularity}"
    if config.mode.backends and config.backend not in config.mode.backends:
        fix = "Use backend='auto', or 'torch' for the reference."
        yield f"backend={config.backend!r} contradicts {precision}, whose products are not FP8. {fix}"
    if config.smoothing and not config.channelwise:
        scales = f"scales per {config.rollout_granularity}: it needs scales per channel and token"
        yield f"smoothing={config.smoothing:g} contradicts {precision} with {scales}. Use {_channelwise()}."
    if config.invariant_scale is not None and not config.quantized_rollout:
        why = "it enlarges updates relative to quantized weights, and this rollout is not quantized"
        yield f"invariant_scale={config.invariant_scale:g} contradicts {precision}: {why}. Drop invariant_scale."
    if config.kv_cache == "fp8" and config.exact and config.exact_attention == "flash3":
        why = "in exact mode only the project's kernel reads an FP8 cache"
        yield f"kv_cache='fp8' contradicts exact_attention='flash3': {why}. Drop one of the two."
    if config.head_dtype not in ("auto", "float32", config.compute_dtype):
        fix = f"leave head_dtype at 'auto', which is {config.compute_dtype} here, or use 'float32'"
        what = f"head_dtype={config.head_dtype!r} with {precision}"
        yield explain(what, required="one 16-bit format", found="two", fix=fix)


def _against_scales(config: Config, precision: str) -> Iterator[str]:
    """A message for each setting that contradicts scales of other blocks than squares of 128."""
    what = f"scale_format={config.scale_format!r}"
    if not config.fp8_train:
        yield f"{what} contradicts {precision}: only an FP8 trainer has it on both sides. Use scale_format='pow2'."
    if config.backend not in ("auto", "native", "torch"):
        yield f"{what} contradicts backend={config.backend!r}, which multiplies other blocks. Use backend='auto'."
    if config.fp8_all_gather:
        yield f"{what} contradicts fp8_all_gather=True: DGrad quantizes the BF16 weight along N. Drop one of the two."


def _channelwise() -> str:
    """The settings that give scales per channel, as a phrase for a message."""
    choice = " with rollout_granularity='channel'"
    return " or ".join(
        repr(name) + (choice if mode.has_granularity else "")
        for name, mode in MODES.items()
        if any(found.granularity == "channel" for found in mode.formats)
    )
