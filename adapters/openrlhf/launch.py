"""This adapter's ``Launch`` (``jetrl_patch/config/launches.py``): read OpenRLHF's arguments, and list what a launch needs."""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import operator
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jetrl_patch.adapters.openrlhf import checkpoint
from jetrl_patch.adapters.openrlhf.settings import PROGRAM, chosen, complete, problems, program_problem, reward_problems
from jetrl_patch.config import Config
from jetrl_patch.config.launches import Needs, Place, Pool, Saves, Storage, Stored
from jetrl_patch.errors import ConfigError, explain
from jetrl_patch.patching.guards import file_of

__all__ = [
    "asked_for", "chosen", "complete", "model_path", "needs", "needs_flash_attn", "problems", "program_problem",
    "programs", "read", "saves", "storage",
]  # fmt: skip


# ---- What a launch needs on its machine: GPUs, models, data --------------------------------------

def needs(args: Any) -> Needs:
    """Return what a launch with these arguments needs on its machine."""
    return Needs(
        pools=tuple(_pools(args)),
        num_gpus=("num_gpus of ray.init", None),
        cluster=Place("RAY_ADDRESS", ""),
        models=tuple(_models(args)),
        tokenizer=Place("--actor.model_name_or_path", str(args.actor.model_name_or_path or "")),
        data=tuple(_data(args)),
        files=tuple(_files(args)),
        own_data=False,
        interpreter=Place("", ""),
        resumes=checkpoint.resumed(lambda path: operator.attrgetter(path)(args)),
    )


def storage(args: Any, config: Config) -> Storage:
    """Return where OpenRLHF keeps the policy: 16-bit weights and gradients, FP32 masters and moments, by ZeRO stage."""
    stage = int(args.ds.zero_stage)
    ranks = max(1, args.actor.num_nodes * args.actor.num_gpus_per_node // args.ds.tensor_parallel_size)
    return Storage(
        trainer=f"ZeRO-{stage} over {ranks} rank{'' if ranks == 1 else 's'}",
        weights=Stored(2.0, ranks if stage == 3 else 1),
        gradients=Stored(4.0 if args.ds.grad_accum_dtype == "fp32" else 2.0, ranks if stage >= 2 else 1),
        optimizer=Stored(4.0, ranks if stage >= 1 else 1),
        offloaded=("optimizer",) * bool(args.ds.adam_offload),
        tensor_parallel=int(args.vllm.tensor_parallel_size or 1),
        utilization=args.vllm.gpu_memory_utilization,
    )


def saves(args: Any) -> Saves:
    """Return what OpenRLHF evaluates and writes: DeepSpeed's states every few steps, and the model in 16 bits at the end."""
    evaluates = args.eval.dataset and args.eval.steps > 0
    contents = ("model", "optimizer") * (not args.ckpt.disable_ds) + ("exported",) * bool(args.ckpt.save_hf)
    return Saves(
        validates=f"every {args.eval.steps} steps (--eval.steps)" if evaluates else "",
        when=f"every {args.ckpt.save_steps} steps (--ckpt.save_steps)" if args.ckpt.save_steps > 0 else "",
        contents=contents,
        exported=2.0,
        folder=str(args.ckpt.path),
        kept=int(args.ckpt.max_num),
        final=str(args.ckpt.output_dir),
    )


def _pools(args: Any) -> Iterator[Pool]:
    """The groups of actors that share no GPU, as placed by ``train`` in ``train_ppo_ray.py``."""
    everything = args.train.colocate_all

    def group(name: str) -> Pool:
        part = getattr(args, name)
        return Pool(f"--{name}.num_gpus_per_node", part.num_gpus_per_node, part.num_nodes)

    yield group("actor")
    if args.vllm.num_engines and not (everything and not args.train.async_enable):
        # an engine may be anywhere in the cluster, so all engines count as one node
        yield Pool("--vllm.num_engines x --vllm.tensor_parallel_size", args.vllm.num_engines * args.vllm.tensor_parallel_size, 1)
    if args.algo.kl.init_coef > 0 and not everything and not args.train.colocate_actor_ref:
        yield group("ref")
    if everything:
        return
    if args.critic.model_name_or_path:
        yield group("critic")
    if not args.reward.remote_url and not (args.critic.model_name_or_path and args.train.colocate_critic_reward):
        yield group("reward")


def _models(args: Any) -> Iterator[Place]:
    for name in ("critic", "reward"):
        part = getattr(args, name)
        wanted = name == "critic" or not args.reward.remote_url
        for path in (part.model_name_or_path or "").split(",") if wanted else ():
            if path:
                yield Place(f"--{name}.model_name_or_path", path.strip())


def _data(args: Any) -> Iterator[Place]:
    for setting, value in (("--data.prompt_dataset", args.data.prompt_dataset), ("--eval.dataset", args.eval.dataset)):
        if value or setting.startswith("--data"):
            for part in (value or "").split(","):
                yield Place(setting, part.split("@")[0].strip())


def _files(args: Any) -> Iterator[Place]:
    if args.train.agent_func_path:
        yield Place("--train.agent_func_path", args.train.agent_func_path)
        return
    for path in args.reward.remote_url or ():
        if os.path.splitext(path)[1] == ".py":  # anything else is the address of a server
            yield Place("--reward.remote_url", path)


# ---- Read OpenRLHF's arguments with its own parser, for ``jetrl doctor`` -------------------------
# The parser and the checks after it are under ``if __name__ == "__main__"`` in ``train_ppo_ray.py``. Only they are taken from the
# syntax tree and run, without importing OpenRLHF (torch, Ray, DeepSpeed, vLLM) and without training.

#: the program whose arguments can be read
programs = (PROGRAM,)


def read(arguments: Sequence[str], target: str = PROGRAM) -> Any:
    """Return the nested namespace that OpenRLHF's ``train`` gets.

    Raises ConfigError with the message of OpenRLHF's parser or of one of its checks.
    """
    path, tools = file_of("openrlhf", "cli", "train_ppo_ray.py"), file_of("openrlhf", "utils", "config.py")
    if path is None or tools is None:
        required, fix = "cli/train_ppo_ray.py and utils/config.py", "install openrlhf"
        raise ConfigError(explain("openrlhf in this environment", required=required, found="at most one of them", fix=fix))
    tree = ast.parse(path.read_text())
    body = next((node.body for node in tree.body if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)), [])
    cut = next((i for i, node in enumerate(body) if "parse_args()" in ast.unparse(node)), None)
    if cut is None:
        fix = "install a supported version of openrlhf"
        raise ConfigError(explain(str(path), required="an argument parser under __main__", found="none", fix=fix))
    names: dict[str, Any] = {}
    _execute([node for node in tree.body if _is_stdlib_import(node)] + body[:cut], names, path)
    helpers: dict[str, Any] = {}  # of a file that imports nothing from its package
    _execute(ast.parse(tools.read_text()).body, helpers, tools)
    names["args"] = helpers["hierarchize"](_parse_args(names["parser"], arguments))
    for problem in reward_problems(names["args"]):  # first, because OpenRLHF's checks fail on a missing reward
        raise problem
    checks = [node for node in body[cut + 1 :] if not _imports_or_trains(node)]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            _execute(checks, names, path)
    except AssertionError as error:
        raise ConfigError(f"OpenRLHF rejects these arguments: {' '.join(str(error).split())}") from error
    except Exception as error:  # its checks calculate with arguments that may be missing or zero
        line = next(frame.lineno for frame in reversed(traceback.extract_tb(error.__traceback__)) if frame.filename == str(path))
        words = f"OpenRLHF's checks of its arguments end in {type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(f"{words}. Look at line {line} of {path}, which reads an argument that is missing or zero.") from error
    return names["args"]


def asked_for(args: Any, environ: Mapping[str, str]) -> None:
    """Return None: OpenRLHF's parser accepts no arguments for jetrl_patch."""


def model_path(args: Any) -> tuple[str, str]:
    """Return the model's path and the argument that gives it."""
    return str(args.actor.model_name_or_path), "--actor.model_name_or_path"


def needs_flash_attn(args: Any) -> str:
    """Return what needs flash-attn on a GPU: an argument, or else OpenRLHF itself, which imports it in every run."""
    chosen = args.ds.attn_implementation
    if chosen.startswith("flash"):
        return f"--ds.attn_implementation {chosen}"
    return "--ds.packing_samples" if args.ds.packing_samples else "OpenRLHF itself (openrlhf.models.ring_attn_utils)"


def _parse_args(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    def error(message: str) -> NoReturn:
        raise ConfigError(f"OpenRLHF's parser: {message}. See --help of openrlhf.cli.train_ppo_ray.")

    parser.error = error  # type: ignore[method-assign]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return parser.parse_args(list(arguments))
    except SystemExit:
        raise ConfigError("The arguments request OpenRLHF's help. Remove --help.") from None


def _execute(body: list[ast.stmt], names: dict[str, Any], path: Path) -> None:
    exec(compile(ast.Module(body, []), str(path), "exec"), names)


def _is_stdlib_import(node: ast.stmt) -> bool:
    if isinstance(node, ast.Import):
        return all(alias.name.split(".")[0] in sys.stdlib_module_names for alias in node.names)
    return isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in sys.stdlib_module_names


def _imports_or_trains(node: ast.stmt) -> bool:
    for inner in ast.walk(node):
        if isinstance(inner, (ast.Import, ast.ImportFrom)):
            return True
        if isinstance(inner, ast.Call) and ast.unparse(inner.func) in ("train", "hierarchize"):
            return True
    return False
