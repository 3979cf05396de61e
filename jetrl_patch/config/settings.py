"""Frozen settings. Everything that can be wrong about them is said here, before anything changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from jetrl_patch import env
from jetrl_patch.config import checks, text
from jetrl_patch.correction.kinds import Kind, check_bounds
from jetrl_patch.errors import ConfigError
from jetrl_patch.monitor.settings import check_monitor
from jetrl_patch.precision.settings import check_precision
from jetrl_patch.scaling.settings import DEFAULT_SMOOTHING, check_scaling

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

#: fields that take one word of a few
_CHOICES = {
    "precision": get_args(Precision),
    "kv_cache": get_args(KvCache),
    "head_dtype": get_args(HeadDtype),
    "rollout_granularity": get_args(Granularity),
    "align": get_args(Align),
    "scale_format": get_args(ScaleFormat),
    "backend": get_args(Backend),
    "platform": get_args(Platform),
    "monitor_action": get_args(MonitorAction),
    "correction": get_args(Kind),
    "optimizer_states": get_args(OptimizerStates),
}
_SWITCHES = ("fp8_all_gather", "monitor_layers", "acr", "resume_any")
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
                checks.check_choice(name, value, allowed)
        for name in _SWITCHES:
            checks.check_switch(name, getattr(self, name))
        for name in ("monitor_sqnr", "monitor_underflow", *(() if self.guard_sqnr is None else ("guard_sqnr",))):
            self._keep(name, checks.number(name, getattr(self, name)))
        self._keep("exclude", checks.patterns(self.exclude))
        self._keep("sync_timeout", checks.seconds("sync_timeout", self.sync_timeout))
        self._keep("correction_bounds", check_bounds(self.correction, self.correction_bounds))
        checks.check_together(self)
        check_monitor(self)
        check_scaling(self)
        check_precision(self)

    def _keep(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

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
        fields = {variable: text.written(getattr(self, name)) for variable, name in env.FIELDS.items()}
        return {env.SWITCH: "1", **fields}

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Config:
        """The settings of the ``JETRL_*`` variables (see ``jetrl_patch/env.py``), defaults for the rest.

        ``overrides`` are fields that stand above the variables. Raises ConfigError for one that does not exist.
        """
        read = text.from_text(env.read_fields(environ))
        return cls().replace(**{**read, **overrides})
