"""Frozen settings. Everything that can be wrong about them is said here, before anything changes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from jetrl_patch import env
from jetrl_patch.correction.kinds import KINDS, Kind, check_bounds
from jetrl_patch.errors import ConfigError
from jetrl_patch.precision.settings import HEAD_DTYPES, KV_CACHES, check_precision
from jetrl_patch.scaling.settings import DEFAULT_SMOOTHING, GRANULARITIES, check_scaling

__all__ = ["JOINT", "Align", "Backend", "Config", "Platform", "Precision", "ResolvedAlign", "ScaleFormat", "from_text"]

Precision = Literal["bf16", "fp8-unified", "fp8-rollout", "int8-rollout", "fp16"]
KvCache = Literal["auto", "fp8"]
HeadDtype = Literal["auto", "bfloat16", "float32"]
Granularity = Literal["block", "channel"]
Align = Literal["exact", "linear"]
ResolvedAlign = Literal["exact", "linear", "none"]
ScaleFormat = Literal["pow2", "fp32"]
MonitorAction = Literal["warn", "stop"]
Backend = Literal["auto", "native", "torch", "triton", "deep_gemm", "cublaslt", "te"]
Platform = Literal["auto", "cpu", "cuda"]
OptimizerStates = Literal["fp32", "8bit", "fp8"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "precision": ("bf16", "fp8-unified", "fp8-rollout", "int8-rollout", "fp16"),
    "kv_cache": KV_CACHES,
    "head_dtype": HEAD_DTYPES,
    "rollout_granularity": GRANULARITIES,
    "align": ("exact", "linear"),
    "scale_format": ("pow2", "fp32"),
    "backend": ("auto", "native", "torch", "triton", "deep_gemm", "cublaslt", "te"),
    "platform": ("auto", "cpu", "cuda"),
    "monitor_action": ("warn", "stop"),
    "correction": KINDS,
    "optimizer_states": ("fp32", "8bit", "fp8"),
}
#: fields that mean something only beside another one, so that they are judged together with it
JOINT = ("correction_bounds", "acr", "rollout_granularity", "smoothing", "invariant_scale", "kv_cache", "head_dtype")


@dataclass(frozen=True, kw_only=True)
class Config:
    """What this process runs in. The same object, or an equal one, must stand in every process of a run.

    Attributes:
        precision: ``"bf16"`` measures and changes nothing else; ``"fp8-unified"`` trains and rolls out in one
            FP8 flow; ``"fp8-rollout"`` is BF16 training with FP8 rollout, the baseline to beat; ``"int8-rollout"`` is
            BF16 training with INT8 rollout, scales per channel and token; ``"fp16"`` is FP16 on both sides, with a loss scale.
        align: ``"exact"`` makes trainer and rollout agree to the last bit, ``"linear"`` shares the FP8 linears
            only (Jet-RL as published). ``None`` means ``"exact"`` for ``fp8-unified`` and nothing for the rest.
        scale_format: ``"pow2"`` rounds scales up to powers of two, ``"fp32"`` keeps them.
        exclude: patterns of modules that stay in BF16 on both sides. A pattern is matched part by part on whole
            dotted name parts, ``fnmatch`` within a part: ``mlp.gate`` never matches ``mlp.gate_up_proj``.
        backend: which GEMM computes the FP8 products; the same one on both sides. ``"auto"`` is native on a CPU with a
            compiler, deep_gemm or triton on Hopper, else torch, the reference; a name that cannot serve is an error.
        platform: ``"cpu"`` also installs what lets verl run without an accelerator.
        sync_timeout: seconds after which a weight sync that makes no progress is a SyncError.
        fp8_all_gather: FSDP2 gathers the weights of FP8 layers as bytes and block scales, which is half the traffic of
            BF16 and the same numbers.
        monitor_every: every how many steps the FP8 layers are measured (amax, underflow, SQNR, scales, codes that moved);
            0 never.
        monitor_layers: log the figures of every layer, not only the worst and the mean over layers.
        monitor_sqnr: SQNR in dB of a layer's weight, activation or gradient below which the monitor warns.
        monitor_underflow: share of a tensor's values that became zero above which the monitor warns.
        monitor_action: ``"warn"`` once per layer and figure, or ``"stop"`` the run.
        guard_sqnr: SQNR in dB below which a layer runs in BF16 on both sides from the next step on. ``None``: no guard.
        correction: importance weights against what is left of the mismatch between trainer and rollout: ``"tis"`` and
            ``"seq-tis"`` truncate the ratio of a token or sequence at a cap; ``"mis"``, ``"seq-mis"``, ``"icepop"``
            drop what lies outside; ``"geo-mis"`` drops sequences by their geometric mean. ``"none"`` only measures.
        correction_bounds: the cap, or low and high; ``None`` means the default of the correction.
        acr: QuRL's adaptive clipping range on top of ``"tis"``: where the ratio is truncated, the clip widens as much.
        rollout_granularity: scales of ``fp8-rollout``: ``"block"`` (weights 128x128, activations 1x128), or ``"channel"``
            (one per output channel, one per token).
        smoothing: how much of the activations' outliers goes into the weights on export, 0 (off) to 1; the model's
            function stays. For scales per channel. ``None`` means 0.5 for ``int8-rollout`` and off for the rest.
        invariant_scale: QuRL's factor: q, k, v, gate and up are divided by it once before training, the norms before
            them multiplied, so that an update weighs more against a quantized weight. ``None``: no scaling.
        kv_cache: ``"fp8"`` keeps the rollout's keys and values in FP8; ``"auto"`` in the model's dtype. Never with
            ``align="exact"``: the trainer has no such cache.
        head_dtype: in which dtype both sides compute logits: ``"auto"`` is the model's, ``"float32"`` multiplies the same
            weights in FP32 and rounds nothing.
        optimizer_states: how AdamW's two moments are kept: ``"fp32"`` as the framework does, ``"8bit"`` or ``"fp8"`` by
            torchao, in blocks of 256, about a quarter of the memory.
        resume_any: resume a checkpoint whatever settings it was saved with; else another precision, scale format or the
            like in its ``jetrl.json`` is an error.
    """

    precision: Precision = "fp8-unified"
    align: Align | None = None
    scale_format: ScaleFormat = "pow2"
    exclude: tuple[str, ...] = field(default=())
    backend: Backend = "auto"
    platform: Platform = "auto"
    sync_timeout: float = 300.0
    fp8_all_gather: bool = False
    monitor_every: int = 10
    monitor_layers: bool = False
    monitor_sqnr: float = 20.0
    monitor_underflow: float = 0.1
    monitor_action: MonitorAction = "warn"
    guard_sqnr: float | None = None
    correction: Kind = "none"
    correction_bounds: tuple[float, ...] | None = None
    acr: bool = False
    rollout_granularity: Granularity = "block"
    smoothing: float | None = None
    invariant_scale: float | None = None
    kv_cache: KvCache = "auto"
    head_dtype: HeadDtype = "auto"
    optimizer_states: OptimizerStates = "fp32"
    resume_any: bool = False

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if not (name == "align" and value is None):
                _check_choice(name, value, allowed)
        object.__setattr__(self, "exclude", _check_exclude(self.exclude))
        object.__setattr__(self, "sync_timeout", _check_timeout(self.sync_timeout))
        _check_gather(self.fp8_all_gather, self.precision)
        self._check_monitor()
        object.__setattr__(self, "correction_bounds", check_bounds(self.correction, self.correction_bounds))
        _check_acr(self.acr, self.correction)
        check_scaling(self)
        check_precision(self)
        _check_checkpoints(self)
        if self.align is not None and self.precision != "fp8-unified":
            raise ConfigError(
                f"align={self.align!r} contradicts precision={self.precision!r}: only 'fp8-unified' has the same "
                f"linears on both sides, and without them nothing can agree; drop align or use 'fp8-unified'"
            )

    def _check_monitor(self) -> None:
        every, guard = self.monitor_every, self.guard_sqnr
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise ConfigError(f"monitor_every={every!r} must be a whole number of steps, 0 for never")
        if not isinstance(self.monitor_layers, bool):
            raise ConfigError(f"monitor_layers={self.monitor_layers!r} must be True or False")
        object.__setattr__(self, "monitor_sqnr", _check_number("monitor_sqnr", self.monitor_sqnr))
        share = _check_number("monitor_underflow", self.monitor_underflow)
        if not 0 <= share <= 1:
            raise ConfigError(f"monitor_underflow={share!r} must be a share between 0 and 1")
        object.__setattr__(self, "monitor_underflow", share)
        if guard is None:
            return
        object.__setattr__(self, "guard_sqnr", _check_number("guard_sqnr", guard))
        if not every:
            raise ConfigError("guard_sqnr decides from what the monitor measures; set monitor_every to 1 or more")
        if not self.fp8_train:
            raise ConfigError(
                f"guard_sqnr={guard!r} contradicts precision={self.precision!r}: the guard takes layers out of FP8 on "
                f"both sides, and only 'fp8-unified' has FP8 on both; drop guard_sqnr"
            )
        if self.backend == "te":
            raise ConfigError(
                f"guard_sqnr={guard!r} contradicts backend='te': TransformerEngine's layers cannot leave FP8 one by one; "
                f"drop one of the two"
            )
        if self.fp8_all_gather:
            raise ConfigError(
                f"guard_sqnr={guard!r} contradicts fp8_all_gather=True: a layer that leaves FP8 needs its weight in BF16, "
                f"and FSDP2 gathers bytes alone; drop one of the two"
            )

    @property
    def resolved_align(self) -> ResolvedAlign:
        """What ``align`` comes to: ``"exact"``, ``"linear"`` or ``"none"``."""
        if self.align is not None:
            return self.align
        return "exact" if self.precision == "fp8-unified" else "none"

    @property
    def quantized_rollout(self) -> bool:
        """Whether the rollout's linears are FP8 or INT8."""
        return self.precision in ("fp8-unified", "fp8-rollout", "int8-rollout")

    @property
    def channelwise(self) -> bool:
        """Whether the rollout has one scale per output channel and token."""
        return self.precision == "int8-rollout" or self.rollout_granularity == "channel"

    @property
    def granularity(self) -> Granularity:
        """Of the rollout's scales, whatever the precision."""
        return "channel" if self.channelwise else "block"

    @property
    def resolved_smoothing(self) -> float:
        """What ``smoothing`` comes to; 0 is off."""
        if self.smoothing is not None:
            return self.smoothing
        return DEFAULT_SMOOTHING if self.precision == "int8-rollout" else 0.0

    @property
    def fp32_head(self) -> bool:
        """Whether both sides compute logits in FP32."""
        return self.head_dtype == "float32"

    @property
    def same_log_probs(self) -> bool:
        """Whether the trainer takes a token's log-prob from its logits by the rollout's formula, in FP32.

        In FP16 too: frameworks round log-probs to the logits' dtype, which is coarser than all the rest of FP16 noise.
        """
        return self.exact or self.precision == "fp16"

    @property
    def compute_dtype(self) -> str:
        """The 16-bit dtype of both sides, as torch calls it."""
        return "float16" if self.precision == "fp16" else "bfloat16"

    @property
    def fp8_rollout(self) -> bool:
        """Whether the rollout's linears are FP8."""
        return self.precision in ("fp8-unified", "fp8-rollout")

    @property
    def fp8_train(self) -> bool:
        """Whether the trainer's linears are FP8."""
        return self.precision == "fp8-unified"

    @property
    def exact(self) -> bool:
        """Whether trainer and rollout are promised to agree to the last bit."""
        return self.resolved_align == "exact"

    def resolved(self) -> Config:
        """The same settings in one spelling, ``align`` written out; two configs mean the same when these are equal."""
        align = None if self.resolved_align == "none" else self.resolved_align
        head = "auto" if self.head_dtype == "bfloat16" else self.head_dtype
        return dataclasses.replace(self, align=align, head_dtype=head)

    def replace(self, **overrides: Any) -> Config:
        """A copy with some fields changed. Raises ConfigError for a field that does not exist."""
        known = [f.name for f in dataclasses.fields(self)]
        unknown = sorted(set(overrides) - set(known))
        if unknown:
            raise ConfigError(f"unknown setting {', '.join(unknown)}; the known ones are {', '.join(known)}")
        return dataclasses.replace(self, **overrides)

    def to_env(self) -> dict[str, str]:
        """Every variable that ``from_env`` reads, so that stale ones in an environment cannot shine through."""
        return {
            env.SWITCH: "1",
            "JETRL_PRECISION": self.precision,
            "JETRL_ALIGN": self.align or "",
            "JETRL_SCALE_FORMAT": self.scale_format,
            "JETRL_EXCLUDE": ",".join(self.exclude),
            "JETRL_BACKEND": self.backend,
            "JETRL_PLATFORM": self.platform,
            "JETRL_SYNC_TIMEOUT": repr(self.sync_timeout),
            "JETRL_FP8_ALL_GATHER": str(int(self.fp8_all_gather)),
            "JETRL_MONITOR_EVERY": str(self.monitor_every),
            "JETRL_MONITOR_LAYERS": str(int(self.monitor_layers)),
            "JETRL_MONITOR_SQNR": repr(self.monitor_sqnr),
            "JETRL_MONITOR_UNDERFLOW": repr(self.monitor_underflow),
            "JETRL_MONITOR_ACTION": self.monitor_action,
            "JETRL_GUARD_SQNR": "" if self.guard_sqnr is None else repr(self.guard_sqnr),
            "JETRL_CORRECTION": self.correction,
            "JETRL_CORRECTION_BOUNDS": ",".join(map(repr, self.correction_bounds or ())),
            "JETRL_ACR": str(int(self.acr)),
            "JETRL_ROLLOUT_GRANULARITY": self.rollout_granularity,
            "JETRL_SMOOTHING": "" if self.smoothing is None else repr(self.smoothing),
            "JETRL_INVARIANT_SCALE": "" if self.invariant_scale is None else repr(self.invariant_scale),
            "JETRL_KV_CACHE": self.kv_cache,
            "JETRL_HEAD_DTYPE": self.head_dtype,
            "JETRL_OPTIMIZER_STATES": self.optimizer_states,
            "JETRL_RESUME_ANY": str(int(self.resume_any)),
        }

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Config:
        """The settings of the ``JETRL_*`` variables (see ``jetrl_patch/env.py``), defaults for the rest.

        ``overrides`` are fields that stand above the variables. Raises ConfigError for one that does not exist.
        """
        read = from_text(env.read_fields(environ))
        return cls().replace(**{**read, **overrides})


def from_text(fields: Mapping[str, str]) -> dict[str, Any]:
    """Fields of ``Config`` from their text, as variables carry them. Raises ConfigError for text of the wrong form."""
    values: dict[str, Any] = dict(fields)
    if "exclude" in values:
        values["exclude"] = tuple(part.strip() for part in values["exclude"].split(","))
    if "sync_timeout" in values:
        try:
            values["sync_timeout"] = float(values["sync_timeout"])
        except ValueError:
            raise ConfigError(f"JETRL_SYNC_TIMEOUT={values['sync_timeout']!r} is not a number of seconds") from None
    if "correction_bounds" in values:
        try:
            values["correction_bounds"] = tuple(map(float, values["correction_bounds"].split(",")))
        except ValueError:
            text = values["correction_bounds"]
            raise ConfigError(f"JETRL_CORRECTION_BOUNDS={text!r} is neither a cap nor low,high") from None
    for name in ("smoothing", "invariant_scale"):
        if name in values:
            try:
                values[name] = float(values[name])
            except ValueError:
                raise ConfigError(f"JETRL_{name.upper()}={values[name]!r} is not a number") from None
    if "acr" in values:
        values["acr"] = env.read_switch("JETRL_ACR", values["acr"])
    if "fp8_all_gather" in values:
        values["fp8_all_gather"] = env.read_switch("JETRL_FP8_ALL_GATHER", values["fp8_all_gather"])
    if "resume_any" in values:
        values["resume_any"] = env.read_switch("JETRL_RESUME_ANY", values["resume_any"])
    if "monitor_layers" in values:
        values["monitor_layers"] = env.read_switch("JETRL_MONITOR_LAYERS", values["monitor_layers"])
    kinds = {"monitor_every": int, "monitor_sqnr": float, "monitor_underflow": float, "guard_sqnr": float}
    for name, kind in kinds.items():
        if name in values:
            try:
                values[name] = kind(values[name])
            except ValueError:
                raise ConfigError(f"JETRL_{name.upper()}={values[name]!r} is not a number") from None
    return values


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if isinstance(value, str) and value in allowed:
        return
    raise ConfigError(f"unknown {name} {value!r}; it must be one of {_listed(allowed)}")


def _check_exclude(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ConfigError(f"exclude={value!r} must be a list of patterns; write ({value!r},) for a single one")
    patterns = tuple(value)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ConfigError(f"exclude has {pattern!r}, which is not text; patterns look like 'layers.0' or 'mlp.*'")
        if not pattern or any(part == "" for part in pattern.split(".")):
            raise ConfigError(
                f"exclude has {pattern!r}, with an empty name part; patterns look like 'layers.0' or 'mlp.*'"
            )
        if "," in pattern or any(char.isspace() for char in pattern):
            raise ConfigError(f"exclude has {pattern!r}, with a comma or a blank; give one pattern per entry")
    return cast("tuple[str, ...]", patterns)


def _check_timeout(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"sync_timeout={value!r} must be a positive, finite number of seconds")
    return float(value)


def _check_acr(value: object, correction: str) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"acr={value!r} must be True or False")
    if value and correction != "tis":
        raise ConfigError(
            f"acr=True with correction={correction!r}: the adaptive clipping range makes up for what 'tis' truncates; "
            f"set correction='tis' or drop acr"
        )


def _check_number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{name}={value!r} must be a finite number")
    return float(value)


def _check_gather(value: object, precision: str) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"fp8_all_gather={value!r} must be True or False")
    if value and precision != "fp8-unified":
        raise ConfigError(
            f"fp8_all_gather=True contradicts precision={precision!r}: only 'fp8-unified' trains with FP8 weights; "
            f"leave it off or use 'fp8-unified'"
        )


def _check_checkpoints(config: Config) -> None:
    if not isinstance(config.resume_any, bool):
        raise ConfigError(f"resume_any={config.resume_any!r} must be True or False")
    if config.optimizer_states != "fp32" and config.fp8_all_gather:
        raise ConfigError(
            f"optimizer_states={config.optimizer_states!r} contradicts fp8_all_gather=True: its weights are tensors of "
            f"their own kind, which the 8-bit update was not tried on; leave one of them out"
        )


def _listed(allowed: tuple[str, ...]) -> str:
    return ", ".join(repr(a) for a in allowed)
