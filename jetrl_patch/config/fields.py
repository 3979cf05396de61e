"""The table of settings: for each one its group, default, choices, description and text form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jetrl_patch.config.corrections import CORRECTIONS, KINDS, Kind
from jetrl_patch.config.formats import FORMATS, ScaleFormat
from jetrl_patch.config.modes import DEFAULT, MODES, PRECISIONS, Granularity, Precision
from jetrl_patch.errors import ConfigError

# ---- The text form of settings in variables and on command lines: one form for each kind of value

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


@dataclass(frozen=True)
class Form:
    """The text form of one kind of value.

    Attributes:
        values: the allowed values, in words.
        read: (name of the variable, text) -> value. Raises ConfigError for malformed text.
        note: text appended to the description of a variable.
        example: an example of the text.
    """

    values: str
    read: Callable[[str, str], Any]
    note: str = ""
    example: str = "…"


def read_switch(name: str, text: str) -> bool:
    """Parse a word that means on or off. Raises ConfigError for any other."""
    word = text.strip().lower()
    if word not in _TRUE | _FALSE:
        raise ConfigError(f"{name}={text!r} is neither on nor off. Write 1 or 0.")
    return word in _TRUE


def _auto_switch(name: str, text: str) -> bool | str:
    return "auto" if text.strip().lower() == "auto" else read_switch(name, text)


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
AUTO_SWITCH = Form("`auto`, `true`, `false`", _auto_switch, ": auto, 1 or 0")
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
    "correction": "Importance weights that correct the remaining mismatch between trainer and rollout.",
    "optimizer": "The format of the optimizer state, and which checkpoints can be resumed.",
    "process": "The device of the run, and whether bugs of the frameworks are fixed.",
}

#: the settings that a new user decides on, the most important first; the defaults of the others are rarely changed
FIRST = (
    "precision", "align", "correction", "decode_graphs", "on_mismatch", "old_log_probs", "audit_fraction", "monitor_every",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One field of ``Config``.

    Attributes:
        name: of the field; the variable, verl's key and the command-line option derive from it.
        default: its default value.
        group: a key of ``GROUPS``.
        doc: its description, in Markdown.
        form: its text form.
        choices: the allowed words, from its type; empty if the setting is not an enumeration.
        option: placeholder in its command-line option, such as ``"NAME"``; ``""`` for a switch; None if it has no option of
            its own, only ``--set``.
        help: the option's line in the usage text.
        note: text appended to the description of its variable.
        joint: whether its check involves another setting.
    """

    name: str
    default: Any
    group: str
    doc: str
    form: Form
    note: str
    choices: tuple[str, ...] = ()
    option: str | None = None
    help: str = ""
    joint: bool = False

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


def setting(default: Any, group: str, doc: str, **more: Any) -> Any:
    """A dataclass field with attributes of its ``Setting``; ``_of`` derives the others."""
    return dataclasses.field(default=default, metadata={"default": default, "group": group, "doc": doc, **more})


def _of(field: dataclasses.Field[Any], hint: Any) -> Setting:
    """The setting of a field. Its type has the choices, and without ``form`` the choices or the default decide the form."""
    more = dict(field.metadata)
    words = next((get_args(part) for part in (hint, *get_args(hint)) if get_origin(part) is Literal), ())
    form = more.pop("form", WORD if words else SWITCH if isinstance(field.default, bool) else NUMBER)
    more.setdefault("note", form.note)
    return Setting(name=field.name, form=form, choices=words if form is WORD else (), **more)


# ---- The table -----------------------------------------------------------------------------------

_UNIFIED = " and ".join(f"`{name}`" for name, mode in MODES.items() if mode.is_unified)
_SCALED = " and ".join(f"`{name}`" for name, mode in MODES.items() if mode.has_granularity)
_SMOOTHED = " and ".join(f"{mode.smoothing:g} for `{name}`" for name, mode in MODES.items() if mode.smoothing)
_ACR = " or ".join(name for name, found in CORRECTIONS.items() if found.takes_acr)


def _words(names: tuple[str, ...]) -> str:
    return ", ".join(names[:-1]) + f" or {names[-1]}"


@dataclass(frozen=True, kw_only=True)
class Fields:
    """The settings as flat fields. ``docs/configuration.md`` lists them by group."""

    precision: Precision = setting(
        DEFAULT, "precision", "; ".join(f"`{name}` {mode.meaning}" for name, mode in MODES.items()),
        option="NAME", help=_words(PRECISIONS), note="; also enables the plugin, like JETRL_ENABLED=1",
    )
    align: Literal["exact", "linear"] | None = setting(
        None, "exactness",
        "`exact` makes trainer and rollout bit-equal. `linear` makes only the FP8 linear layers the same (Jet-RL as published); "
        "vLLM then adds tensor-parallel sums in BF16. "
        f"`None` means `exact` for {_UNIFIED} and no alignment for the other precisions",
        option="NAME", help="exact or linear",
    )
    scale_format: ScaleFormat = setting(
        "pow2", "precision",
        "the scales of FP8: " + "; ".join(f"`{name}` {form.meaning}" for name, form in FORMATS.items())
        + f". Only {_UNIFIED} has blocks other than 128x128",
    )
    exclude: tuple[str, ...] = setting(
        (), "precision",
        "name patterns of modules that stay in BF16 on both sides. A pattern matches whole parts of the dotted name, and an "
        "`fnmatch` wildcard stays within one part: `mlp.gate` does not match `mlp.gate_up_proj`",
        form=PATTERNS,
    )
    on_cut: Literal["refuse", "bf16"] = setting(
        "refuse", "precision",
        "what to do with layers in which the rollout's tensor parallelism cuts a block of 128, or one of another "
        "`scale_format`: `refuse` stops the run and lists them; `bf16` keeps them in BF16 on both sides and logs their names. "
        "Per-channel scales have no blocks to cut",
    )
    backend: Literal["auto", "native", "torch", "triton", "deep_gemm", "cublaslt", "te"] = setting(
        "auto", "exactness",
        "the GEMM backend for FP8 products, the same on both sides. `auto` picks `native` on a CPU with a compiler, "
        "`deep_gemm` or `triton` on Hopper, and otherwise `torch`, the reference. Any other choice that cannot run here "
        "is an error",
    )
    old_log_probs: Literal["auto", "recompute", "rollout"] = setting(
        "auto", "exactness",
        "where a step's old log-probs come from. `recompute` runs the framework's forward pass; `rollout` skips that pass and "
        "uses the rollout's log-probs. `rollout` needs `align=\"exact\"`, where both are bit-equal; the first update of a step "
        "checks this before its backward pass. `auto` means `rollout` in exact mode unless the framework's own settings need the "
        "pass, and otherwise `recompute`",
        joint=True,
    )
    audit_fraction: float = setting(
        0.0625, "exactness",
        "share of the samples that go through the pass for old log-probs in a step that otherwise skips it. It matters in steps "
        "with several updates, where only the first update can check the rollout's log-probs",
        note=", a share", joint=True,
    )
    on_mismatch: Literal["stop", "recompute"] = setting(
        "stop", "exactness",
        "what exact mode does when a token's two log-probs differ under the same weights: `stop` ends the run before the update "
        "(in verl's bypass mode after it, because the loss compares them); `recompute` logs an error and computes old log-probs "
        "from then on",
        joint=True,
    )
    router_replay: Literal["none", "R3"] = setting(
        "none", "exactness",
        "for mixture-of-experts models in verl. With `R3` the trainer sends each token to the experts that the rollout chose, in "
        "the pass for old log-probs and in every update, and weights them by its own logits. It needs an FP8 rollout and does "
        "not work with `align=\"exact\"`, where routes are equal anyway. It also measures routes, as `measure_routes` does",
        joint=True,
    )
    decode_graphs: Literal["auto"] | bool = setting(
        "auto", "exactness",
        "in exact mode on a GPU, vLLM replays its decoding steps from CUDA graphs, without a compiler: the same kernels and "
        "therefore the same bits, with one launch per step. `auto` does so unless the engine's own settings turn graphs off "
        "(`enforce_eager=True`, `cudagraph_mode=NONE`, `VLLM_USE_V2_MODEL_RUNNER=1`); `true` also overrides `enforce_eager`; "
        "`false` always runs eagerly. When the engine starts, every graph is compared with the eager step. If one bit differs, "
        "the engine runs eagerly and logs it. Ignored on a CPU. Not yet run on a GPU",
        form=AUTO_SWITCH,
    )
    exact_attention: Literal["auto", "triton", "flash3"] = setting(
        "auto", "exactness",
        "the attention kernel of both sides in exact mode on a GPU: `triton` is this project's own, `flash3` is the "
        "FlashAttention-3 in vLLM's wheels, in one fixed configuration. `auto` uses `flash3` on a Hopper GPU if a trial finds "
        "that its rows do not depend on the batch, and otherwise `triton`. Ignored on a CPU. Not yet run on a GPU",
    )
    platform: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "process",
        "the device of the run: `auto` means `cpu` if the installed vLLM is a CPU build. `cpu` also applies the patches that let "
        "the frameworks run without an accelerator",
    )
    upstream_fixes: bool | None = setting(
        None, "process",
        "whether to fix [bugs of other projects](extending.md#upstream-fixes) that affect runs with this plugin. `None` means "
        "on, but off for `bf16`, which measures the frameworks as they are. Bugs that keep a run from starting are always fixed",
        form=SWITCH,
    )
    sync: Literal["full", "delta"] = setting(
        "full", "sync",
        "what a weight sync sends: `full` sends every tensor; `delta` sends only the bytes that changed since the last completed "
        "sync, unless that would be more. The same digests verify the result. For `delta`, trainer and engine each keep the "
        "weights of the last sync in CPU memory. It only pays off if the rollout has its own devices",
        joint=True,
    )
    sync_timeout: float = setting(
        300.0, "sync", "seconds without progress after which a weight sync raises SyncError", form=SECONDS,
    )
    fp8_all_gather: bool = setting(
        False, "sync",
        "FSDP2 gathers the weights of FP8 layers as FP8 bytes and block scales: half the traffic of BF16, with the same result",
    )
    monitor_every: int = setting(
        10, "monitor",
        "how many steps apart the monitor measures the FP8 layers (amax, underflow, SQNR, scales, changed codes); 0 turns it off",
        form=WHOLE, note=", in steps",
    )
    monitor_layers: bool = setting(
        False, "monitor", "log the figures of every layer, not only summaries over the layers",
    )
    monitor_sqnr: float = setting(
        20.0, "monitor", "the monitor acts if the SQNR of a weight, activation or gradient is below this many dB", note=", in dB",
    )
    monitor_underflow: float = setting(
        0.1, "monitor", "the monitor acts if more than this share of a tensor's values is rounded to zero", note=", a share",
    )
    monitor_action: Literal["warn", "stop"] = setting(
        "warn", "monitor",
        "what the monitor does when a figure crosses its threshold: `warn` once per layer and figure, or `stop` the run",
    )
    measure_routes: bool = setting(
        False, "monitor",
        "for mixture-of-experts models in verl, log the share of routes (one per token and block) for which trainer and rollout "
        "choose different experts. The rollout then stores and sends one byte per layer and chosen expert for every token",
    )
    guard_sqnr: float | None = setting(
        None, "monitor",
        "a layer whose SQNR is below this many dB switches to BF16 on both sides from the next step on. `None` means no guard",
        note=", in dB",
    )
    correction: Kind = setting(
        "none", "correction",
        "the importance weight of a token, computed from its ratio ρ_t = π_old/μ or from the product ρ over the sequence: "
        f"{', '.join(f'`{name}` {found.formula}' for name, found in CORRECTIONS.items())}. `none` only measures",
        option="NAME", help=_words(KINDS),
    )
    correction_bounds: tuple[float, ...] | None = setting(
        None, "correction", "the cap, or the low and high bound. `None` means the correction's default",
        form=BOUNDS, option="BOUNDS", help="the cap, or low,high; the default depends on the correction", joint=True,
    )
    acr: bool = setting(
        False, "correction",
        f"add QuRL's adaptive clipping range to `{_ACR}`: where the ratio is truncated, the upper clip limit grows by the same "
        "factor",
        option="", help=f"QuRL's adaptive clipping range, with --correction {_ACR}", joint=True,
    )
    rollout_granularity: Granularity = setting(
        "block", "rollout",
        f"granularity of the scales of {_SCALED}: `block` (weights 128x128, activations 1x128) or `channel` (weights per output "
        "channel, activations per token)",
        joint=True,
    )
    smoothing: float | None = setting(
        None, "rollout",
        "SmoothQuant's α, from 0 (off) to 1: how much of the activation outliers moves into the weights that are sent. The model "
        f"computes the same function. It needs per-channel scales. `None` means {_SMOOTHED} and off for the other precisions",
        joint=True,
    )
    invariant_scale: float | None = setting(
        None, "rollout",
        "QuRL's scale: before training, q, k, v, gate and up are divided by it and the norms before them are multiplied by it, "
        "which makes updates larger relative to the quantized weights. `None` means no scaling",
        joint=True,
    )
    kv_cache: Literal["auto", "fp8"] = setting(
        "auto", "rollout",
        "`fp8` stores the rollout's keys and values in FP8, `auto` in the model's dtype. With `align=\"exact\"` each token and "
        "head has its own scale, and the trainer rounds its keys and values in the same way",
        joint=True,
    )
    head_dtype: Literal["auto", "bfloat16", "float32"] = setting(
        "auto", "precision",
        "dtype in which both sides compute logits: `auto` is the model's dtype; `float32` multiplies the same weights in FP32 "
        "and does not round the logits",
        joint=True,
    )
    optimizer_states: Literal["fp32", "8bit", "fp8"] = setting(
        "fp32", "optimizer",
        "format of AdamW's two moments: `fp32` leaves them as the framework stores them; `8bit` and `fp8` use torchao's "
        "optimizers, which scale blocks of 256 values and need about a quarter of the memory",
    )
    resume_any: bool = setting(
        False, "optimizer",
        "allow resuming a checkpoint that was saved with other settings. By default it is an error if the precision, scale "
        "format or a similar setting in its `jetrl.json` differs",
    )  # fmt: skip


#: name -> setting
SETTINGS = {field.name: _of(field, get_type_hints(Fields)[field.name]) for field in dataclasses.fields(Fields)}
