"""Check and complete OpenRLHF's arguments before any actor starts, so that the user need not edit them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any

from jetrl_patch import runtime
from jetrl_patch.adapters.openrlhf import checkpoint, correction, extensions, optimizer, precision, seeing
from jetrl_patch.config import Config
from jetrl_patch.errors import UNQUANTIZED, ConfigError, ConflictError, JetrlError, ModelError, explain
from jetrl_patch.gate import while_active
from jetrl_patch.launch.arguments import PROGRAMS
from jetrl_patch.optim.settings import check_installed
from jetrl_patch.structure import expert_sizes, require_attention, sees
from jetrl_patch.trainer import marks
from jetrl_patch.trainer.marks import MARK
from jetrl_patch.trainer.preflight import checkpoint_problems, cut_note, read_config, say_share
from jetrl_patch.trainer.rules import Rule, broken, is_set, more_than_one, other_than, positive, raised, temperature

__all__ = ["START", "check", "check_mark", "chosen", "complete", "get_strategy", "model_problems", "problems", "program_problem"]

logger = logging.getLogger(__name__)

#: the fix for a process that is not patched
START = "Start OpenRLHF's driver with `jetrl run`, or call jetrl_patch.enable() in it before ray.init."

_FULL = "full weights without LoRA"
_LIGER = "exact mode's own norm, RoPE and activation"
_REMOVE = "remove the flag"

RULES: tuple[Rule, ...] = (
    Rule("vllm.num_engines", lambda n: not n, "at least one vLLM engine", "set it to 1 or more", "all", absent=True),
    Rule("ds.load_in_4bit", is_set, "no quantization but jetrl_patch's", _REMOVE, "quantized", ConflictError),
    Rule("ds.lora.rank", positive, _FULL, "set it to 0", "quantized", ConflictError),
    Rule("ds.tensor_parallel_size", more_than_one, "whole layers on each rank", "set it to 1", "quantized"),
    Rule("ds.param_dtype", other_than("bf16"), "bf16", "set it to bf16", "quantized"),
    Rule("ds.deepcompile", is_set, "uncompiled layers", _REMOVE, "quantized"),
    Rule("ds.ring_attn_size", more_than_one, "whole sequences on each rank", "set it to 1", "exact"),
    Rule("ds.use_liger_kernel", is_set, _LIGER, _REMOVE, "exact", ConflictError),
    Rule("rollout.top_p", other_than(1, 1.0), "1, the only value that the trainer reproduces", "set it to 1", "exact"),
    temperature("rollout.temperature"),
)


def check(args: Any, config: Config) -> None:
    """Raise ConfigError, ConflictError or ModelError for the first argument that the mode does not support; change nothing."""
    for problem in problems(args, config):
        raise problem


def problems(args: Any, config: Config) -> Iterator[JetrlError]:
    """Yield an error for each argument that the mode does not support.

    Args:
        args: OpenRLHF's nested namespace (``openrlhf.utils.config.hierarchize``).
    """
    if _get(args, "vllm") is None or _get(args, "rollout") is None:
        yield _without_rollout("OpenRLHF")
        return
    if config.fp8_all_gather:
        yield ConfigError(
            explain(
                "fp8_all_gather=True",
                required="FSDP2",
                found="OpenRLHF, which trains with DeepSpeed",
                fix="set fp8_all_gather=False",
            )
        )
    if config.returns_routes:
        what, off = "measure_routes=True", "measure_routes=False"
        if config.router_replay != "none":
            what, off = f"router_replay={config.router_replay!r}", "router_replay='none'"
        required, runs = "verl, whose samples carry the rollout's routes", "OpenRLHF, whose samples do not"
        yield ConfigError(explain(what, required=required, found=runs, fix=f"set {off}"))
    yield from extensions.abandoned()
    rules = RULES
    if config.optimizer_states != "fp32":
        yield from raised(lambda: check_installed(config.optimizer_states))
        rules += optimizer.RULES

    def select(path: str) -> Any:
        return _get(args, path)

    yield from broken(rules, select, config, lambda path: f"OpenRLHF's --{path}")
    yield from reward_problems(args)
    yield from precision.problems(select, config)
    yield from correction.problems(args, config)
    yield from checkpoint.problems(select, config)
    found = list(checkpoint_problems(*_checkpoint(args, config), trust_remote_code=True))  # as OpenRLHF loads every model
    yield from found
    if not found:
        hf_config = read_config(*_checkpoint(args, config)[:2], trust_remote_code=True)
        if hf_config is not None:
            yield from model_problems(args, hf_config, config)


def reward_problems(args: Any) -> Iterator[JetrlError]:
    """Yield an error where nothing scores the samples: OpenRLHF starts its actors all the same, or ends in a traceback."""
    sources = ("reward.remote_url", "reward.model_name_or_path", "train.agent_func_path")
    if not any(_get(args, path) for path in sources):
        required = "a reward: a file or a server (--reward.remote_url), a model, or an agent (--train.agent_func_path)"
        fix = "add --reward.remote_url FILE.py with a reward_func(queries, prompts, labels)"
        yield ConfigError(explain("OpenRLHF's arguments", required=required, found="none", fix=fix))


def model_problems(args: Any, hf_config: Any, config: Config) -> Iterator[JetrlError]:
    """Yield an error for a model that a mode with a quantized rollout covers, but not with OpenRLHF or with these arguments."""
    what = "the model with OpenRLHF and a quantized rollout"
    if not sees(hf_config):
        yield from raised(lambda: require_attention(hf_config, what, f"use {UNQUANTIZED}"))
    elif expert_sizes(hf_config) is not None:
        required, fix = "no experts beside a vision tower (they have not run so)", f"use a dense model, or {UNQUANTIZED}"
        yield ModelError(explain(what, required=required, found=f"model_type={hf_config.model_type!r}", fix=fix))
    yield from seeing.problems(lambda path: _get(args, path), hf_config, config)


def _checkpoint(args: Any, config: Config) -> tuple[Any, Config, int]:
    """Return the model's folder, the settings, and the rollout's tensor-parallel size."""
    return _get(args, "actor.model_name_or_path"), config, int(_get(args, "vllm.tensor_parallel_size") or 1)


def chosen(args: Any, asked: Config) -> Config:
    """Return the plugin's settings unchanged: OpenRLHF has one training engine."""
    return asked


def complete(args: Any, config: Config) -> list[str]:
    """Set what the mode needs in the arguments; return a description of each change."""
    changes = precision.complete(args, config) + cut_note(*_checkpoint(args, config))
    for name, value in correction.wanted(config).items():
        if getattr(args.algo.advantage, name) != value:
            setattr(args.algo.advantage, name, value)
            changes.append(f"--algo.advantage.{name} {value}: correction={config.correction!r}")
    eager = (config.exact or config.guard_sqnr is not None) and not config.decode_graphs
    if eager and not _get(args, "vllm.enforce_eager"):
        args.vllm.enforce_eager = True
        why = "fuses ops and rounds differently" if config.exact else "would keep running layers that have left FP8"
        changes.append(f"--vllm.enforce_eager: a compiled graph {why}")
    if config.exact and _get(args, "train.async_enable"):
        changes.append(
            "asynchronous rollouts may use older weights than the trainer's: exact mode covers only samples of the same "
            "weights, and jetrl/stale_fraction reports the share of the others"
        )
    return changes


def program_problem(target: str) -> JetrlError | None:
    """Return the error for a training of OpenRLHF without a rollout; None for any other program."""
    module = ".".join(PurePath(target).with_suffix("").parts) if target.endswith(".py") else target
    trains = re.search(r"(^|\.)openrlhf\.cli\.train_\w+$", module)
    if trains is None or module.endswith(PROGRAMS["openrlhf"]):
        return None
    return _without_rollout(trains[0].lstrip("."))


def _without_rollout(where: str) -> ConfigError:
    return ConfigError(
        explain(
            f"jetrl_patch in {where}",
            required=f"{PROGRAMS['openrlhf']}, which has a rollout",
            found="training without a rollout (SFT, reward model, DPO)",
            fix="start this training without jetrl_patch",
        )
    )


def check_mark(args: Any, where: str) -> None:
    """Compare the settings that the driver stored in the arguments with those of this process."""
    unpatched = f"OpenRLHF's driver is not patched, but {where} is. {START}"
    marks.check(getattr(args, MARK, None), runtime.active_config(), where, unpatched)


@while_active
def get_strategy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``openrlhf.utils.get_strategy``, which the driver calls first with its arguments."""

    def get_strategy(args: Any) -> Any:
        config = runtime.active_config()
        check(args, config)
        say_share(*_checkpoint(args, config))
        for change in complete(args, config):
            logger.warning("jetrl_patch: %s", change)
        setattr(args, MARK, config.to_env())
        return original(args)

    return get_strategy


def _get(args: Any, path: str) -> Any:
    for part in path.split("."):
        args = getattr(args, part, None)
        if args is None:
            return None
    return args
