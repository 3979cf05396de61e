"""``jetrl parity`` as data: modes, prompts, samples of the rollout, scores of the trainer, and the share of each op."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from jetrl_patch.config import SETTINGS, Config
from jetrl_patch.config.formats import FORMATS, POW2
from jetrl_patch.config.modes import MODES, Precision
from jetrl_patch.errors import ConfigError, ModelError, explain, reading
from jetrl_patch.measure.pictures import Picture, check_images
from jetrl_patch.models.hub import how_to_download, is_hub_id
from jetrl_patch.models.structure import check_structure

if TYPE_CHECKING:
    from torch import Tensor

    from jetrl_patch.exact.support import Support
    from jetrl_patch.measure.routes import Routes

# ---- What the two sides return: samples from the rollout, scores from the trainer ----------------

@dataclass(frozen=True, kw_only=True)
class Draw:
    """How the tokens of a request are drawn: vLLM's ``SamplingParams`` of these names, and its defaults."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def divisor(self) -> float:
        """By what vLLM divides the logits whose log-probs it returns. Greedy requests keep theirs."""
        return self.temperature or 1.0

    @property
    def limited(self) -> bool:
        """Whether tokens are left out. Of a greedy request vLLM drops these numbers."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass(frozen=True)
class Sample:
    """One request: token ids of prompt and response, and the response's log-probs as the rollout returned them.

    ``routes`` are the experts chosen for every token but the last, which never enters the model: int64 [tokens, layers, k], or
    None if the engine returned no routes. ``pictures`` are the images of the prompt, in order, which holds a placeholder for each
    of their tokens. ``support`` holds the tokens that each token was drawn from, if ``draw`` leaves some out. ``every`` are the
    log-probs of the whole vocabulary, FP32 [response, V], if the job wants them: −inf for tokens that were left out. A comparison
    of samples ignores all of these.
    """

    prompt: list[int]
    response: list[int]
    log_probs: list[float]
    routes: Tensor | None = field(default=None, compare=False)
    pictures: Sequence[Picture] = field(default=(), compare=False)
    draw: Draw = field(default=Draw(), compare=False)
    support: Support | None = field(default=None, compare=False)
    every: Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Sampled:
    """Samples, response tokens per second if the job measures the cost, and how the engine executed its model."""

    samples: list[Sample]
    tokens_per_second: float | None = None
    execution: str = "eager"


@dataclass(frozen=True)
class Scored:
    """FP32 log-probs [tokens] of all responses, and tokens per second of a training step if the job measures the cost.

    ``routes`` compares the trainer's routes with the rollout's; None for a model without. ``full`` compares what the job's "full"
    asks for; None without.
    """

    log_probs: Tensor
    tokens_per_second: float | None = None
    routes: Routes | None = None
    full: Full | None = None


@dataclass(frozen=True)
class Full:
    """Comparisons of trainer and rollout over the vocabulary, and of the trainer with itself in batches of one sequence.

    Attributes:
        values: log-probs of all tokens that could be drawn, at every position.
        equal: share of them with equal bits. apart: the largest |Δ|.
        alone_equal: share of the sampled tokens whose log-prob the trainer computes with equal bits in both kinds of batches.
        alone_apart: the largest |Δ| of these.
    """

    values: int
    equal: float
    apart: float
    alone_equal: float
    alone_apart: float


# ---- The standard error of a mean ----------------------------------------------------------------

def standard_error(difference: Tensor, samples: Sequence[Sample]) -> float | None:
    """The standard error of the mean of |Δ log-prob|, from the spread of the responses' means; None for a single response.

    Tokens of one response depend on each other; responses do not. Assumes that responses are equally long.
    """
    if len(samples) < 2:
        return None
    parts = difference.abs().double().split([len(s.response) for s in samples])
    return statistics.stdev(float(part.mean()) for part in parts) / math.sqrt(len(parts))


# ---- What each op adds to the mismatch, over the depth of the model and the length of the response

#: what exact mode makes equal, in the order of ``jetrl parity --explain``
OPS = ("FP8 linears", "norms", "RoPE", "activation", "router", "attention", "delta net", "lm_head", "log-softmax")
#: equal parts of a response, from its first token to its last
RESPONSE_PARTS = 4


@dataclass(frozen=True)
class Step:
    """A trainer in which ``op`` and all ops before it are exact, compared with an exact rollout.

    Attributes:
        op: name in ``OPS``; empty for the unchanged Hugging Face model.
        mean: mean of |Δ log-prob| over the sampled tokens.
        max: its largest value.
        equal: share of tokens whose log-probs are equal.
        alone: the mean if all ops but this one are exact. None in the first step.
        parts: the mean in each part of the responses.
        depth: after each block, |h − h_exact| / |h_exact|, with h the hidden states.
    """

    op: str
    mean: float
    max: float
    equal: float
    alone: float | None
    parts: list[float]
    depth: list[float]


# ---- Stock installations: vLLM samples and Hugging Face scores, each with its own kernels and without any patch

@dataclass(frozen=True, kw_only=True)
class Stock:
    """One common setup without the plugin.

    Attributes:
        precision: that of the settings that describe the measurement and are never enabled.
        engine: additional arguments of vLLM's ``LLM``.
        environment: environment variables of the process.
    """

    precision: Precision = "bf16"
    engine: tuple[tuple[str, str], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    def config(self) -> Config:
        return Config(precision=self.precision).resolved()


#: name -> setup. vLLM's online quantization scales weights in blocks of 128, like verl's FP8 rollout.
STOCK: dict[str, Stock] = {
    **{mode.dtype: Stock(precision=mode.name) for mode in MODES.values() if not mode.quantizes},
    "fp8-online": Stock(engine=(("quantization", "fp8_per_block"),)),
    "batch-invariant": Stock(environment=(("VLLM_BATCH_INVARIANT", "1"),)),
}


def chosen(names: Sequence[str] | None) -> tuple[str, ...]:
    """The setups that ``--stock`` selects: none without the option, all without a name. Raises ConfigError for an unknown one."""
    if names is None:
        return ()
    for name in names:
        if name not in STOCK:
            required, fix = f"one of {', '.join(STOCK)}", "choose one, or write --stock alone to measure all"
            raise ConfigError(explain(f"--stock {name}", required=required, found=repr(name), fix=fix))
    return tuple(dict.fromkeys(names)) or tuple(STOCK)


# ---- Choose the modes to compare, and check the model before anything is loaded ------------------

#: compared by default, from no FP8 to FP8 on both sides
BY_DEFAULT = ("bf16", "fp8-rollout", "fp8-unified")
UNIFIED = SETTINGS["precision"].default


@dataclass(frozen=True, kw_only=True)
class Job:
    """One mode of one model, as sent to the process that measures it.

    Attributes:
        model: directory of a Hugging Face checkpoint.
        config: settings of the mode.
        tp: tensor parallel size of the rollout.
        batch: requests per batch.
        tokens: minimum number of response tokens.
        length: tokens per response.
        draws: how tokens are drawn; requests take these in turn.
        seed: seed of prompts and sampling.
        prompts: text file with one prompt per line, or None.
        prompt_tokens: maximum length of a prompt; longer ones are cut.
        engine: further arguments of vLLM's ``LLM``.
        stock: name in ``STOCK``: nothing is enabled, and ``config`` only gives the dtype.
        cost: whether to time both sides.
        full: whether to compare the log-probs of the whole vocabulary too, and the trainer with itself in other batches.
        explain: whether to attribute the mismatch of a stock trainer to its ops.
    """

    model: str
    config: Config
    tp: int = 1
    batch: int = 32
    tokens: int = 2048
    length: int = 64
    draws: tuple[Draw, ...] = (Draw(),)
    seed: int = 0
    prompts: str | None = None
    prompt_tokens: int = 256
    engine: tuple[tuple[str, Any], ...] = ()
    stock: str | None = None
    cost: bool = False
    full: bool = False
    explain: bool = False

    @property
    def ep(self) -> int:
        """Expert parallel size of the rollout. vLLM's ranks either split every expert or hold whole ones."""
        return self.tp if dict(self.engine).get("enable_expert_parallel") else 1

    @property
    def label(self) -> tuple[str, str]:
        """What the table calls the mode: precision and align."""
        return (self.stock, "stock") if self.stock else (self.config.precision, self.config.resolved_align)

    @property
    def name(self) -> str:
        """What messages call the mode."""
        return f"stock {self.stock}" if self.stock else self.config.precision

    @property
    def promises_equality(self) -> bool:
        """Whether a difference in this mode is a failure."""
        return self.config.exact


def in_turn(numbers: Mapping[str, Sequence[float]]) -> tuple[Draw, ...]:
    """The draws of successive requests, from the numbers that each field of ``Draw`` takes in turn."""
    count = math.lcm(*map(len, numbers.values()))
    every = ({name: values[i % len(values)] for name, values in numbers.items()} for i in range(count))
    return tuple(Draw(**fields) for fields in every)  # type: ignore[arg-type]


def choose(precisions: list[str], aligns: list[str], granularity: str = "block", **common: Any) -> list[Config]:
    """The modes that the command line selects, or the default ones.

    ``aligns`` apply to fp8-unified, and select it if no precision is named. ``granularity`` applies to the modes that support
    more than one. Raises ConfigError for unknown or contradictory values.
    """
    if not precisions and not aligns:
        precisions, aligns = [*BY_DEFAULT], ["linear", "exact"]
    elif not precisions:
        precisions = [UNIFIED]
    elif aligns and UNIFIED not in precisions:
        raise ConfigError(
            f"--align {', '.join(aligns)} applies to precision {UNIFIED}, but --precision is {', '.join(precisions)}; "
            f"add {UNIFIED} or remove --align"
        )
    configs = []
    for precision in dict.fromkeys(precisions):
        choices: list[str | None] = [*dict.fromkeys(aligns)] if precision == UNIFIED and aligns else [None]
        for align in choices:
            scales = {"rollout_granularity": granularity} if precision in MODES and MODES[precision].has_granularity else {}
            if precision != UNIFIED and not FORMATS[common.get("scale_format", POW2.name)].square:  # only there
                scales["scale_format"] = SETTINGS["scale_format"].default
            # with the same fixes in every row, rows differ only by their modes
            named: dict[str, Any] = {"precision": precision, "align": align, "upstream_fixes": True}
            wanted = Config(**{**named, **common, **scales})
            configs.append(wanted.resolved())
    return configs


def check_model(path: str, configs: list[Config], tp: int = 1) -> bool:
    """Check what can be checked without loading the model. Returns whether the prompts of the model have images.

    Raises:
        ModelError: there is no checkpoint, the model has a vision tower that is not supported or no image processor, exact mode
            does not support its family, or ``tp`` does not divide its heads.
        JetrlError: a package that processes images is not installed.
    """

    def refuse(required: str, found: str, fix: str) -> ModelError:
        return ModelError(explain(f"--model {path}", required=required, found=found, fix=fix))

    file = Path(path) / "config.json"
    if not file.is_file():
        fix = "give the folder of a model"
        if is_hub_id(path) and not Path(path).exists():
            fix = f"run {how_to_download(path)} and give that folder"
        raise refuse("the directory of a Hugging Face checkpoint", f"no {file.name} in it", fix)
    try:
        with reading(file):
            settings = json.loads(file.read_text())
        if not isinstance(settings, dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise ModelError(f"--model {path}: {file.name} is not valid JSON ({error})") from None
    if not any(Path(path).glob("*.safetensors")) and not any(Path(path).glob("*.bin")):
        raise refuse("weights (*.safetensors or *.bin)", f"only {file.name}", "give a complete checkpoint")
    sees = "vision_config" in settings
    if sees:
        check_images(path, settings.get("model_type"))
    _check_heads(path, {**settings, **settings.get("text_config", {})}, tp)
    if not sees:  # transformers reads older files of models with a tower
        for config in configs:
            _check_text_model(SimpleNamespace(**settings), config)
    return sees


def _check_text_model(hf_config: Any, config: Config) -> None:
    if config.quantized_rollout:
        check_structure(hf_config, config)
    if config.exact:
        from jetrl_patch.exact.modules import check_family

        check_family(hf_config)


def _check_heads(path: str, settings: dict[str, Any], tp: int) -> None:
    """vLLM gives each rank equally many attention heads, and either whole key/value heads or a copy of one."""
    heads = settings.get("num_attention_heads")
    groups = settings.get("num_key_value_heads") or heads
    if not isinstance(heads, int) or not isinstance(groups, int):
        return
    sizes = [n for n in range(1, heads + 1) if heads % n == 0 and (groups % n == 0 or n % groups == 0)]
    if tp not in sizes:
        required = f"a size that divides its {heads} attention and {groups} key/value heads"
        fix = f"use one of {', '.join(map(str, sizes))}"
        raise ModelError(explain(f"--tp {tp} with {path}", required=required, found=str(tp), fix=fix))
