"""What a launch of OpenRLHF takes from its machine: GPUs, models, data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from jetrl_patch.trainer.interface import Needs, Place, Pool

__all__ = ["needs"]


def needs(args: Any) -> Needs:
    """Return what a launch with these arguments takes from its machine."""
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
    )


def _pools(args: Any) -> Iterator[Pool]:
    """The groups of actors that share no GPU, as ``train`` in ``train_ppo_ray.py`` places them."""
    everything = args.train.colocate_all

    def group(name: str) -> Pool:
        part = getattr(args, name)
        return Pool(f"--{name}.num_gpus_per_node", part.num_gpus_per_node, part.num_nodes)

    yield group("actor")
    if args.vllm.num_engines and not (everything and not args.train.async_enable):
        # an engine's GPUs are anywhere in the cluster, so they count as one node's
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
