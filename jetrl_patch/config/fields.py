"""The settings: each one is defined here, with its group, default, choices, description and text form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from jetrl_patch.config.corrections import CORRECTIONS, KINDS, Kind
from jetrl_patch.config.modes import DEFAULT, MODES, PRECISIONS, Granularity, Precision
from jetrl_patch.errors import ConfigError

__all__ = [
    "BOUNDS",
    "GROUPS",
    "NUMBER",
    "PATTERNS",
    "PREFIX",
    "SECONDS",
    "SETTINGS",
    "SWITCH",
    "WHOLE",
    "WORD",
    "Fields",
    "Form",
    "Setting",
    "from_text",
    "read_switch",
    "setting",
    "settings_of",
    "written",
]  # fmt: skip


# ---- The text form of settings in variables and on command lines: one form for each kind of value

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


@dataclass(frozen=True)
class Form:
    """The text form of one kind of value.

    Attributes:
        values: the allowed values, in words.
        read: (name of the variable, text) -> value. Raises ConfigError for malformed text.
        note: addition to the description of a variable.
        example: an example of the text.
    """

    values: str
    read: Callable[[str, str], Any]
    note: str = ""
    example: str = "…"


def written(value: object) -> str:
    """The value of a field as text that its form can read; empty for ``None``."""
    if value is None:
        return ""
    if isinstance(value, tuple):
        return ",".join(map(written, value))
    if isinstance(value, bool):
        return str(int(value))
    return value if isinstance(value, str) else repr(value)


def read_switch(name: str, text: str) -> bool:
    """Parse a word that means on or off. Raises ConfigError for any other."""
    word = text.strip().lower()
    if word not in _TRUE | _FALSE:
        raise ConfigError(f"{name}={text!r} is neither on nor off. Write 1 or 0.")
    return word in _TRUE


def _word(variable: str, text: str) -> str:
    return text


def _patterns(variable: str, text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _bounds(variable: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise ConfigError(f"{variable}={text!r} is neither a cap nor low,high. Write one or two numbers.") from None


def _number(kind: Callable[[str], float], what: str = "number") -> Callable[[str, str], float]:
    def read(variable: str, text: str) -> float:
        try:
            return kind(text)
        except ValueError:
            raise ConfigError(f"{variable}={text!r} is not a {what}") from None

    return read


WORD = Form("a word", _word)
SWITCH = Form("`true`, `false`", read_switch, ": 1 or 0")
NUMBER = Form("number", _number(float))
SECONDS = Form("number", _number(float, "number of seconds"), ", in seconds")
WHOLE = Form("whole number", _number(int, "whole number"))
PATTERNS = Form("patterns", _patterns, ", separated by commas", "a,b")
BOUNDS = Form("cap, or low and high", _bounds, ": the cap, or low,high")


# ---- The metadata of one setting, which is a field of ``Config`` ---------------------------------

PREFIX = "JETRL_"

#: group of settings -> its subject, in the order of the documentation
GROUPS = {
    "precision": "Number formats shared by trainer and rollout.",
    "exactness": "How closely the two sides agree, and which backend computes their products.",
    "rollout": "Number formats of the rollout only.",
    "sync": "How weights move between processes.",
    "monitor": "Measurements of the quantized layers, and the actions they trigger.",
    "correction": "Importance weights against the remaining mismatch between trainer and rollout.",
    "optimizer": "The format of the optimizer state, and which checkpoints can be resumed.",
    "process": "The device the run uses, and whether bugs of the frameworks are fixed.",
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One field of ``Config``.

    Attributes:
        name: of the field; the variable, verl's key and the command-line option derive from it.
        default: its default value.
        group: a key of ``GROUPS``.
        doc: its description, in Markdown.
        form: its text form.
        choices: the allowed words; empty if the setting is not an enumeration.
        option: placeholder of its command-line option, ``"NAME"``; ``""`` for a switch; None if only ``--set`` sets it.
        help: the option's line in the usage text.
        note: addition to the description of its variable.
        joint: whether it depends on another setting, so that the two are checked together.
    """

    name: str
    default: Any
    group: str
    doc: str
    form: Form
    choices: tuple[str, ...]
    option: str | None
    help: str
    note: str
    joint: bool

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        """Name of the command-line option."""
        return "--" + self.name.replace("_", "-")

    @property
    def values(self) -> str:
        """The allowed values, in Markdown."""
        return ", ".join(f"`{choice}`" for choice in self.choices) or self.form.values


def setting(
    default: Any,
    group: str,
    doc: str,
    *,
    choices: tuple[str, ...] = (),
    form: Form | None = None,
    option: str | None = None,
    help: str = "",
    note: str = "",
    joint: bool = False,
) -> Any:
    """A dataclass field with its metadata. Without ``form``, the choices or the default decide it."""
    if form is None:
        form = WORD if choices else SWITCH if isinstance(default, bool) else NUMBER
    found = {
        "default": default, "group": group, "doc": doc, "form": form, "choices": choices, "option": option, "help": help,
        "note": note or form.note, "joint": joint,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=found)


def settings_of(kind: type) -> dict[str, Setting]:
    """Name -> setting, for the fields of a dataclass in their order."""
    return {field.name: Setting(name=field.name, **field.metadata) for field in dataclasses.fields(kind)}


# ---- The settings: each one is defined here, with its group, default, choices and description ----

KvCache = Literal["auto", "fp8"]
HeadDtype = Literal["auto", "bfloat16", "float32"]
Align = Literal["exact", "linear"]
ScaleFormat = Literal["pow2", "fp32"]
MonitorAction = Literal["warn", "stop"]
OnCut = Literal["refuse", "bf16"]
Backend = Literal["auto", "native", "torch", "triton", "deep_gemm", "cublaslt", "te"]
ExactAttention = Literal["auto", "triton", "flash3"]
Platform = Literal["auto", "cpu", "cuda"]
OptimizerStates = Literal["fp32", "8bit", "fp8"]
OldLogProbs = Literal["auto", "recompute", "rollout"]
RouterReplay = Literal["none", "R3"]
OnMismatch = Literal["stop", "recompute"]
Sync = Literal["full", "delta"]

_UNIFIED = " and ".join(f"`{name}`" for name, mode in MODES.items() if mode.is_unified)
_SCALED = " and ".join(f"`{name}`" for name, mode in MODES.items() if mode.has_granularity)
_SMOOTHED = " and ".join(f"{mode.smoothing:g} for `{name}`" for name, mode in MODES.items() if mode.smoothing)
_ACR = " or ".join(name for name, found in CORRECTIONS.items() if found.takes_acr)


def _words(names: tuple[str, ...]) -> str:
    return ", ".join(names[:-1]) + f" or {names[-1]}"


@dataclass(frozen=True, kw_only=True)
class Fields:
    """The settings as flat fields. ``docs/configuration.md`` lists them by group; ``SETTINGS`` has them as data."""

    precision: Precision = setting(
        DEFAULT, "precision", "; ".join(f"`{name}` {mode.meaning}" for name, mode in MODES.items()),
        choices=PRECISIONS, option="NAME", help=_words(PRECISIONS), note="; also enables the plugin, like JETRL_ENABLED=1",
    )
    align: Align | None = setting(
        None, "exactness",
        "`exact` makes trainer and rollout bit-equal, `linear` shares only the FP8 linears (Jet-RL as published), "
        "and vLLM adds the sums of tensor-parallel ranks in BF16. "
        f"`None` means `exact` for {_UNIFIED} and no alignment for the other precisions",
        choices=get_args(Align), option="NAME", help=_words(get_args(Align)),
    )
    scale_format: ScaleFormat = setting(
        "pow2", "precision", "`pow2` rounds scales up to powers of two, `fp32` leaves them unrounded",
        choices=get_args(ScaleFormat),
    )
    exclude: tuple[str, ...] = setting(
        (), "precision",
        "name patterns of modules that stay in BF16 on both sides. A pattern matches whole parts of the dotted name, with "
        "`fnmatch` wildcards within a part: `mlp.gate` does not match `mlp.gate_up_proj`",
        form=PATTERNS,
    )
    on_cut: OnCut = setting(
        "refuse", "precision",
        "what happens to layers in which the rollout's tensor parallelism cuts a block of 128: `refuse` stops the run with their "
        "names, `bf16` leaves them in BF16 on both sides and names them in the log. Scales per channel have no blocks to cut",
        choices=get_args(OnCut),
    )
    backend: Backend = setting(
        "auto", "exactness",
        "the GEMM backend for FP8 products, the same on both sides. `auto` picks `native` on a CPU with a compiler, "
        "`deep_gemm` or `triton` on Hopper, else `torch`, the reference. A named backend that cannot run here is an error",
        choices=get_args(Backend),
    )
    old_log_probs: OldLogProbs = setting(
        "auto", "exactness",
        "where a step's old log-probs come from: `recompute` runs the framework's forward pass for them, `rollout` takes those "
        "that the rollout returned and leaves the pass out. Needs `align=\"exact\"`, where both are the same bits; the first "
        "update of a step checks it before its backward pass. `auto`: `rollout` in exact mode, unless the framework's own "
        "settings need the pass",
        choices=get_args(OldLogProbs), joint=True,
    )
    audit_fraction: float = setting(
        0.0625, "exactness",
        "without the pass for old log-probs, the share of a step's samples that go through it all the same where a step has "
        "several updates, of which only the first can check",
        note=", a share", joint=True,
    )
    on_mismatch: OnMismatch = setting(
        "stop", "exactness",
        "in exact mode, what happens once a token's two log-probs differ under the same weights: `stop` the run before an update "
        "with it (in verl's bypass mode, whose loss compares, after that update), or log an error and `recompute` old log-probs "
        "by the pass from then on",
        choices=get_args(OnMismatch), joint=True,
    )
    router_replay: RouterReplay = setting(
        "none", "exactness",
        "of a mixture of experts in verl, `R3`: the trainer sends each token to the experts that the rollout chose for it, in "
        "the pass for old log-probs and in every update, with weights by its own logits. Not with `align=\"exact\"`, where "
        "routes are equal, nor without an FP8 rollout. Routes are compared as with `measure_routes`",
        choices=get_args(RouterReplay), joint=True,
    )
    decode_graphs: bool = setting(
        False, "exactness",
        "in exact mode on a GPU, vLLM replays its decoding steps from CUDA graphs, without a compiler: the same kernels, so the "
        "same bits, with one launch a step. Ignored on a CPU. Not run on a GPU yet",
    )
    exact_attention: ExactAttention = setting(
        "auto", "exactness",
        "in exact mode on a GPU, the attention of both sides: `triton` is the project's kernel, `flash3` the FlashAttention-3 in "
        "vLLM's wheels, in one configuration. `auto` takes `flash3` on a Hopper GPU where a trial finds its rows equal, else "
        "`triton`. Ignored on a CPU. Not run on a GPU yet",
        choices=get_args(ExactAttention),
    )
    platform: Platform = setting(
        "auto", "process", "`cpu` also applies the patches that let verl run without an accelerator", choices=get_args(Platform),
    )
    upstream_fixes: bool | None = setting(
        None, "process",
        "fix [bugs of other projects](#upstream-fixes) that runs of this plugin have met. `None` means on, and off for "
        "`bf16`, which measures the frameworks as they are. What keeps a run from starting is fixed in any case",
        form=SWITCH,
    )
    sync: Sync = setting(
        "full", "sync",
        "what a weight sync sends: `full` every tensor, `delta` only the bytes that changed since the last sync that the engine "
        "completed, where that is less. The result is proven by the same digests. Trainer and engine each keep the weights of "
        "the last sync in CPU memory. For rollouts with devices of their own",
        choices=get_args(Sync), joint=True,
    )
    sync_timeout: float = setting(
        300.0, "sync", "seconds without progress after which a weight sync raises SyncError", form=SECONDS,
    )
    fp8_all_gather: bool = setting(
        False, "sync",
        "FSDP2 gathers the weights of FP8 layers as FP8 bytes and block scales: half the traffic of BF16, the same result",
    )
    monitor_every: int = setting(
        10, "monitor",
        "interval in steps at which the FP8 layers are measured (amax, underflow, SQNR, scales, changed codes); 0 turns it "
        "off",
        form=WHOLE, note=", in steps",
    )
    monitor_layers: bool = setting(
        False, "monitor", "log the figures of every layer, not only the worst layer and the mean",
    )
    monitor_sqnr: float = setting(
        20.0, "monitor", "SQNR in dB of a weight, activation or gradient below which the monitor acts", note=", in dB",
    )
    monitor_underflow: float = setting(
        0.1, "monitor", "share of a tensor's values rounded to zero above which the monitor acts", note=", a share",
    )
    monitor_action: MonitorAction = setting(
        "warn", "monitor", "beyond a threshold, `warn` once per layer and figure or `stop` the run",
        choices=get_args(MonitorAction),
    )
    measure_routes: bool = setting(
        False, "monitor",
        "of a mixture of experts in verl, log the share of routes (token and block) in which the trainer chooses other experts "
        "than the rollout. The rollout keeps and sends the experts of every token: layers × experts per token, in bytes",
    )
    guard_sqnr: float | None = setting(
        None, "monitor",
        "SQNR in dB below which a layer switches to BF16 on both sides from the next step on. `None`: no guard",
        note=", in dB",
    )
    correction: Kind = setting(
        "none", "correction",
        "the importance weight of a token, from its ratio ρ_t = π_old/μ or the product ρ over the sequence: "
        f"{', '.join(f'`{name}` {found.formula}' for name, found in CORRECTIONS.items())}. `none` only measures",
        choices=KINDS, option="NAME", help=_words(KINDS),
    )
    correction_bounds: tuple[float, ...] | None = setting(
        None, "correction", "the cap, or low and high. `None` means the correction's default",
        form=BOUNDS, option="BOUNDS", help="the cap, or low,high; the default depends on the correction", joint=True,
    )
    acr: bool = setting(
        False, "correction",
        f"QuRL's adaptive clipping range on top of `{_ACR}`: where the ratio is truncated, the upper clip limit widens by "
        "the same factor",
        option="", help=f"QuRL's adaptive clipping range, with --correction {_ACR}", joint=True,
    )
    rollout_granularity: Granularity = setting(
        "block", "rollout",
        f"scales of {_SCALED}: `block` (weights 128x128, activations 1x128) or `channel` (weights per output channel, "
        "activations per token)",
        choices=get_args(Granularity), joint=True,
    )
    smoothing: float | None = setting(
        None, "rollout",
        "SmoothQuant's α: how far activation outliers move into the weights on export, 0 (off) to 1; the model's function does "
        f"not change. For per-channel scales. `None` means {_SMOOTHED} and off for the other precisions",
        joint=True,
    )
    invariant_scale: float | None = setting(
        None, "rollout",
        "QuRL's scale: before training, q, k, v, gate and up are divided by it and the norms before them multiplied by it, so "
        "that updates are larger relative to the quantized weights. `None`: no scaling",
        joint=True,
    )
    kv_cache: KvCache = setting(
        "auto", "rollout",
        "`fp8` stores the rollout's keys and values in FP8, `auto` in the model's dtype. Not with `align=\"exact\"`: the "
        "trainer has no KV cache",
        choices=get_args(KvCache), joint=True,
    )
    head_dtype: HeadDtype = setting(
        "auto", "precision",
        "dtype in which both sides compute logits: `auto` is the model's, `float32` multiplies the same weights in FP32 "
        "without rounding the logits",
        choices=get_args(HeadDtype), joint=True,
    )
    optimizer_states: OptimizerStates = setting(
        "fp32", "optimizer",
        "format of AdamW's two moments: `fp32` as the framework stores them, `8bit` or `fp8` by torchao, in blocks of 256, in "
        "about a quarter of the memory",
        choices=get_args(OptimizerStates),
    )
    resume_any: bool = setting(
        False, "optimizer",
        "resume a checkpoint saved with any settings. Otherwise a different precision, scale format or the like in its "
        "`jetrl.json` is an error",
    )  # fmt: skip


#: name -> setting
SETTINGS = settings_of(Fields)


def from_text(fields: Mapping[str, str]) -> dict[str, Any]:
    """Parse fields of ``Config`` from text, as in environment variables. Raises ConfigError for malformed text."""
    return {name: SETTINGS[name].form.read(SETTINGS[name].variable, text) for name, text in fields.items()}
