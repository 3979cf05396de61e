"""The settings themselves: each stands here once, with its group, its default, its words and what it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from jetrl_patch.config.modes import DEFAULT, MODES, PRECISIONS, Granularity, Precision
from jetrl_patch.config.setting import setting, settings_of
from jetrl_patch.config.text import BOUNDS, PATTERNS, SECONDS, WHOLE
from jetrl_patch.correction.kinds import CORRECTIONS, KINDS, Kind

__all__ = ["SETTINGS", "Fields", "from_text"]

KvCache = Literal["auto", "fp8"]
HeadDtype = Literal["auto", "bfloat16", "float32"]
Align = Literal["exact", "linear"]
ScaleFormat = Literal["pow2", "fp32"]
MonitorAction = Literal["warn", "stop"]
Backend = Literal["auto", "native", "torch", "triton", "deep_gemm", "cublaslt", "te"]
Platform = Literal["auto", "cpu", "cuda"]
OptimizerStates = Literal["fp32", "8bit", "fp8"]

_UNIFIED = " and ".join(f"`{name}`" for name, mode in MODES.items() if mode.is_unified)
_SCALED = " and ".join(f"`{name}`" for name, mode in MODES.items() if mode.has_granularity)
_SMOOTHED = " and ".join(f"{mode.smoothing:g} for `{name}`" for name, mode in MODES.items() if mode.smoothing)
_ACR = " or ".join(name for name, found in CORRECTIONS.items() if found.takes_acr)


def _words(names: tuple[str, ...]) -> str:
    return ", ".join(names[:-1]) + f" or {names[-1]}"


@dataclass(frozen=True, kw_only=True)
class Fields:
    """The settings, flat as users give them. ``docs/configuration.md`` has them by group, ``SETTINGS`` as data."""

    precision: Precision = setting(
        DEFAULT, "precision", "; ".join(f"`{name}` {mode.meaning}" for name, mode in MODES.items()),
        choices=PRECISIONS, option="NAME", help=_words(PRECISIONS), note="; setting it opts in as JETRL_ENABLED=1 does",
    )
    align: Align | None = setting(
        None, "exactness",
        "`exact` makes trainer and rollout agree to the last bit, `linear` shares the FP8 linears only (Jet-RL as published). "
        f"`None` means `exact` for {_UNIFIED} and nothing for the rest",
        choices=get_args(Align), option="NAME", help=_words(get_args(Align)),
    )
    scale_format: ScaleFormat = setting(
        "pow2", "precision", "`pow2` rounds scales up to powers of two, `fp32` keeps them", choices=get_args(ScaleFormat),
    )
    exclude: tuple[str, ...] = setting(
        (), "precision",
        "patterns of modules that stay in BF16 on both sides. A pattern is matched part by part on whole dotted name parts, "
        "`fnmatch` within a part: `mlp.gate` never matches `mlp.gate_up_proj`",
        form=PATTERNS,
    )
    backend: Backend = setting(
        "auto", "exactness",
        "which GEMM computes the FP8 products; the same one on both sides. `auto` is native on a CPU with a compiler, "
        "deep_gemm or triton on Hopper, else torch, the reference; a name that cannot serve is an error",
        choices=get_args(Backend),
    )
    platform: Platform = setting(
        "auto", "process", "`cpu` also installs what lets verl run without an accelerator", choices=get_args(Platform),
    )
    sync_timeout: float = setting(
        300.0, "sync", "seconds after which a weight sync that makes no progress is a SyncError", form=SECONDS,
    )
    fp8_all_gather: bool = setting(
        False, "sync",
        "FSDP2 gathers the weights of FP8 layers as bytes and block scales, which is half the traffic of BF16 and the same "
        "numbers",
    )
    monitor_every: int = setting(
        10, "monitor",
        "every how many steps the FP8 layers are measured (amax, underflow, SQNR, scales, codes that moved); 0 never",
        form=WHOLE, note=", in steps",
    )
    monitor_layers: bool = setting(
        False, "monitor", "log the figures of every layer, not only the worst and the mean over layers",
    )
    monitor_sqnr: float = setting(
        20.0, "monitor", "SQNR in dB of a layer's weight, activation or gradient below which the monitor warns", note=", in dB",
    )
    monitor_underflow: float = setting(
        0.1, "monitor", "share of a tensor's values that became zero above which the monitor warns", note=", a share",
    )
    monitor_action: MonitorAction = setting(
        "warn", "monitor", "`warn` once per layer and figure, or `stop` the run", choices=get_args(MonitorAction),
    )
    guard_sqnr: float | None = setting(
        None, "monitor",
        "SQNR in dB below which a layer runs in BF16 on both sides from the next step on. `None`: no guard", note=", in dB",
    )
    correction: Kind = setting(
        "none", "correction",
        "the weight of a token, of ρ_t = π_old/μ, or of its product ρ over a sequence: "
        f"{', '.join(f'`{name}` {found.formula}' for name, found in CORRECTIONS.items())}. `none` only measures",
        choices=KINDS, option="NAME", help=_words(KINDS),
    )
    correction_bounds: tuple[float, ...] | None = setting(
        None, "correction", "the cap, or low and high; `None` means the default of the correction",
        form=BOUNDS, option="BOUNDS", help="the cap, or low,high; the default depends on the correction", joint=True,
    )
    acr: bool = setting(
        False, "correction",
        f"QuRL's adaptive clipping range on top of `{_ACR}`: where the ratio is truncated, the clip widens as much",
        option="", help=f"QuRL's adaptive clipping range, with --correction {_ACR}", joint=True,
    )
    rollout_granularity: Granularity = setting(
        "block", "rollout",
        f"scales of {_SCALED}: `block` (weights 128x128, activations 1x128), or `channel` (one per output channel, one per "
        "token)",
        choices=get_args(Granularity), joint=True,
    )
    smoothing: float | None = setting(
        None, "rollout",
        "how much of the activations' outliers goes into the weights on export, 0 (off) to 1; the model's function stays. "
        f"For scales per channel. `None` means {_SMOOTHED} and off for the rest",
        joint=True,
    )
    invariant_scale: float | None = setting(
        None, "rollout",
        "QuRL's factor: q, k, v, gate and up are divided by it once before training, the norms before them multiplied, so "
        "that an update weighs more against a quantized weight. `None`: no scaling",
        joint=True,
    )
    kv_cache: KvCache = setting(
        "auto", "rollout",
        "`fp8` keeps the rollout's keys and values in FP8; `auto` in the model's dtype. Never with `align=\"exact\"`: the "
        "trainer has no such cache",
        choices=get_args(KvCache), joint=True,
    )
    head_dtype: HeadDtype = setting(
        "auto", "precision",
        "in which dtype both sides compute logits: `auto` is the model's, `float32` multiplies the same weights in FP32 and "
        "rounds nothing",
        choices=get_args(HeadDtype), joint=True,
    )
    optimizer_states: OptimizerStates = setting(
        "fp32", "optimizer",
        "how AdamW's two moments are kept: `fp32` as the framework does, `8bit` or `fp8` by torchao, in blocks of 256, about "
        "a quarter of the memory",
        choices=get_args(OptimizerStates),
    )
    resume_any: bool = setting(
        False, "optimizer",
        "resume a checkpoint whatever settings it was saved with; else another precision, scale format or the like in its "
        "`jetrl.json` is an error",
    )  # fmt: skip


#: every setting by its name
SETTINGS = settings_of(Fields)


def from_text(fields: Mapping[str, str]) -> dict[str, Any]:
    """Fields of ``Config`` from their text, as variables carry them. Raises ConfigError for text of the wrong form."""
    return {name: SETTINGS[name].form.read(SETTINGS[name].variable, text) for name, text in fields.items()}
