"""OpenRLHF's arguments, checked and completed before any actor starts, so that the user changes nothing in them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from jetrl_patch import runtime
from jetrl_patch.adapters.openrlhf import correction, optimizer, precision
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, ConflictError, NotPatchedError, explain
from jetrl_patch.optim.settings import check_installed
from jetrl_patch.rules import Rule, broken, is_set, more_than_one, other_than, positive

__all__ = ["MARK", "START", "check", "check_mark", "complete", "get_strategy", "require_same"]

logger = logging.getLogger(__name__)

#: what to do where a process of a run is not patched
START = "start OpenRLHF's driver with `jetrl run`, or call jetrl_patch.enable() in it before ray.init"

#: attribute of OpenRLHF's arguments that carries our settings to every actor, and key of reports
MARK = "jetrl"


_WHOLE = "a trainer that holds whole layers and whole sequences"

RULES: tuple[Rule, ...] = (
    Rule("vllm.num_engines", lambda n: not n, "vLLM rollouts", "set it to 1 or more", "all", absent=True),
    Rule("ds.load_in_4bit", is_set, "no other quantization beside jetrl_patch", "leave it out", "quantized", ConflictError),
    Rule("ds.lora.rank", positive, "full weights", "set it to 0", "quantized", ConflictError),
    Rule("ds.tensor_parallel_size", more_than_one, _WHOLE, "set it to 1", "quantized"),
    Rule("ds.param_dtype", other_than("bf16"), "bf16", "set it so", "quantized"),
    Rule("ds.deepcompile", is_set, "layers that run as they are written", "leave it out", "quantized"),
    Rule("data.max_images_per_prompt", positive, "text models", "set it to 0", "quantized"),
    Rule("ds.ring_attn_size", more_than_one, _WHOLE, "set it to 1", "exact"),
    Rule(
        "ds.use_liger_kernel", is_set, "norm, RoPE and activation of exact mode", "leave it out", "exact", ConflictError
    ),
    Rule("rollout.top_p", other_than(1, 1.0), "1, which the trainer can reproduce", "set it so", "exact"),
    Rule("rollout.temperature", lambda t: float(t) <= 0, "a positive temperature", "set one", "exact"),
)


def check(args: Any, config: Config) -> None:
    """Raise ConfigError, ConflictError or ModelError for the first argument that cannot be kept; change nothing.

    Args:
        args: OpenRLHF's nested namespace (``openrlhf.utils.config.hierarchize``).
    """
    if _get(args, "vllm") is None or _get(args, "rollout") is None:
        raise ConfigError(
            explain(
                "jetrl_patch in OpenRLHF",
                required="openrlhf.cli.train_ppo_ray, which has a rollout",
                found="a training without one (SFT, reward model, DPO)",
                fix="run it without jetrl_patch",
            )
        )
    if config.fp8_all_gather:
        raise ConfigError(
            explain(
                "fp8_all_gather=True", required="FSDP2", found="OpenRLHF, which trains with DeepSpeed", fix="leave it off"
            )
        )
    rules = RULES
    if config.optimizer_states != "fp32":
        check_installed(config.optimizer_states)
        rules += optimizer.RULES
    for problem in broken(rules, lambda path: _get(args, path), config, lambda path: f"OpenRLHF's --{path}"):
        raise problem
    for problem in precision.problems(lambda path: _get(args, path), config):
        raise problem
    for problem in correction.problems(args, config):
        raise problem
    _check_model(args, config)


def _check_model(args: Any, config: Config) -> None:
    """The model's family and the rollout's tensor parallelism, from the model's config.json and without weights."""
    path = str(_get(args, "actor.model_name_or_path") or "")
    if not config.quantized_rollout or not os.path.isdir(path):
        return  # a remote path: the actors check when they have it
    from transformers import AutoConfig

    from jetrl_patch.fp8.preflight import check_model

    check_model(AutoConfig.from_pretrained(path), config, int(_get(args, "vllm.tensor_parallel_size") or 1))


def complete(args: Any, config: Config) -> list[str]:
    """Write into the arguments what our modes need and the user need not know; gives the changes in words."""
    changes = precision.complete(args, config)
    for name, value in correction.wanted(config).items():
        if getattr(args.algo.advantage, name) != value:
            setattr(args.algo.advantage, name, value)
            changes.append(f"--algo.advantage.{name} {value}: correction={config.correction!r}")
    if (config.exact or config.guard_sqnr is not None) and not _get(args, "vllm.enforce_eager"):
        args.vllm.enforce_eager = True
        why = "fuses ops and rounds them otherwise" if config.exact else "would go on with layers that left FP8"
        changes.append(f"--vllm.enforce_eager: a compiled graph {why}")
    if config.exact and _get(args, "train.async_enable"):
        changes.append(
            "asynchronous rollouts come from older weights than the trainer's: equality holds for those of the same "
            "weights only, and jetrl/stale_fraction shows the share of the others"
        )
    return changes


def check_mark(args: Any, where: str) -> None:
    """Compare the settings that the driver left in the arguments with those of this process.

    Raises NotPatchedError when there are none, ConflictError when they differ.
    """
    mark = getattr(args, MARK, None)
    mine = runtime.active_config().to_env()
    if not mark:
        raise NotPatchedError(f"OpenRLHF's driver is not patched, while {where} is; {START}")
    require_same(where, asked=mark, found=mine)


def require_same(where: str, *, asked: dict[str, str], found: dict[str, str]) -> None:
    """Raise ConflictError if the settings of a process are not those of the run."""
    if found != asked:
        raise ConflictError(
            explain(f"settings of {where}", required=asked, found=found, fix="give every process the same ones")
        )


def get_strategy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``openrlhf.utils.get_strategy``, the first thing that the driver does with its arguments."""

    def get_strategy(args: Any) -> Any:
        if runtime.is_active():
            config = runtime.active_config()
            check(args, config)
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
