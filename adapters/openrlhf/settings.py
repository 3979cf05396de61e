"""OpenRLHF's arguments, checked and completed before any actor starts, so that the user changes nothing in them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jetrl_patch import runtime
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, ConflictError, JetrlError, NotPatchedError, explain

__all__ = ["MARK", "check", "check_mark", "complete", "get_strategy"]

logger = logging.getLogger(__name__)

#: attribute of OpenRLHF's arguments that carries our settings to every actor, and key of reports
MARK = "jetrl"


@dataclass(frozen=True)
class Rule:
    """One argument of OpenRLHF that cannot stand beside ours.

    Attributes:
        path: dotted, as on the command line.
        bad: whether a value is refused; an absent argument never is.
        asked: what we need, in words.
        fix: what to do.
        scope: "all", "fp8" (FP8 in the rollout) or "exact".
        error: ConflictError where something else wants to do the same, ConfigError where we cannot do it.
    """

    path: str
    bad: Callable[[Any], bool]
    asked: str
    fix: str
    scope: str
    error: type[JetrlError] = ConfigError

    def applies(self, config: Config) -> bool:
        """Whether the rule holds in this mode."""
        return self.scope == "all" or (self.scope == "fp8" and config.fp8_rollout) or config.exact


def _set(value: Any) -> bool:
    return bool(value)


def _more_than_one(value: Any) -> bool:
    return value is not None and int(value) > 1


def _positive(value: Any) -> bool:
    return value is not None and int(value) > 0


def _other_than(*allowed: Any) -> Callable[[Any], bool]:
    return lambda value: value not in allowed


_WHOLE = "a trainer that holds whole layers and whole sequences"

RULES: tuple[Rule, ...] = (
    Rule("vllm.num_engines", lambda n: not n, "vLLM rollouts", "set it to 1 or more", "all"),
    Rule("ds.load_in_4bit", _set, "no other quantization beside jetrl_patch", "leave it out", "fp8", ConflictError),
    Rule("ds.lora.rank", _positive, "full weights", "set it to 0", "fp8", ConflictError),
    Rule("ds.tensor_parallel_size", _more_than_one, _WHOLE, "set it to 1", "fp8"),
    Rule("ds.param_dtype", _other_than("bf16"), "bf16", "set it so", "fp8"),
    Rule("ds.deepcompile", _set, "layers that run as they are written", "leave it out", "fp8"),
    Rule("data.max_images_per_prompt", _positive, "text models", "set it to 0", "fp8"),
    Rule("ds.ring_attn_size", _more_than_one, _WHOLE, "set it to 1", "exact"),
    Rule(
        "ds.use_liger_kernel", _set, "norm, RoPE and activation of exact mode", "leave it out", "exact", ConflictError
    ),
    Rule("rollout.top_p", _other_than(1, 1.0), "1, which the trainer can reproduce", "set it so", "exact"),
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
                asked="openrlhf.cli.train_ppo_ray, which has a rollout",
                found="a training without one (SFT, reward model, DPO)",
                fix="run it without jetrl_patch",
            )
        )
    for rule in RULES:
        if not rule.applies(config):
            continue
        value = _get(args, rule.path)
        if value is None and rule.path != "vllm.num_engines":
            continue
        if rule.bad(value):
            mode = f"precision={config.precision!r}, align={config.resolved_align!r}"
            raise rule.error(
                explain(f"OpenRLHF's --{rule.path} with {mode}", asked=rule.asked, found=repr(value), fix=rule.fix)
            )
    _check_model(args, config)


def _check_model(args: Any, config: Config) -> None:
    """The model's family and the rollout's tensor parallelism, from the model's config.json and without weights."""
    path = str(_get(args, "actor.model_name_or_path") or "")
    if not config.fp8_rollout or not os.path.isdir(path):
        return  # a remote path: the actors check when they have it
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from jetrl_patch.fp8.convert import select_layers
    from jetrl_patch.fp8.layers import check_splits

    hf_config = AutoConfig.from_pretrained(path)
    if config.exact:
        from jetrl_patch.exact.families import check_family

        check_family(hf_config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    modules = dict(model.named_modules())
    names = select_layers(model, config.exclude)
    tp = int(_get(args, "vllm.tensor_parallel_size") or 1)
    check_splits(((name, modules[name].in_features) for name in names), tp)


def complete(args: Any, config: Config) -> list[str]:
    """Write into the arguments what our modes need and the user need not know; gives the changes in words."""
    changes = []
    if config.exact and not _get(args, "vllm.enforce_eager"):
        args.vllm.enforce_eager = True
        changes.append("--vllm.enforce_eager: a compiled graph fuses ops and rounds them otherwise")
    if config.exact and _get(args, "train.async_enable"):
        changes.append(
            "asynchronous rollouts come from older weights than the trainer's: equality holds for those of the same "
            "weights only, and jetrl/bit_equal_fraction shows how many they are"
        )
    return changes


def check_mark(args: Any, where: str) -> None:
    """Compare the settings that the driver left in the arguments with those of this process.

    Raises NotPatchedError when there are none, ConflictError when they differ.
    """
    mark = getattr(args, MARK, None)
    mine = runtime.active_config().to_env()
    if not mark:
        raise NotPatchedError(
            f"OpenRLHF's driver is not patched, while {where} is; start it with `jetrl run`, or call "
            f"jetrl_patch.enable() in it before ray.init"
        )
    if mark != mine:
        raise ConflictError(
            explain(f"settings of {where}", asked=mark, found=mine, fix="give every process the same ones")
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
