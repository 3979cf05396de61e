"""What a launch of verl takes from its machine: GPUs, models, data, an interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jetrl_patch.adapters.verl.paths import MODEL, ROLLOUT
from jetrl_patch.trainer.interface import Needs, Place, Pool

__all__ = ["needs"]

_RAY = "ray_kwargs.ray_init"
_REWARD = "reward.reward_model"


def needs(verl_config: Any) -> Needs:
    """Return what a launch with this configuration takes from its machine."""
    from omegaconf import OmegaConf

    def select(path: str) -> Any:
        return OmegaConf.select(verl_config, path, default=None)

    reward = select("reward.custom_reward_function.path")
    reader = select("data.custom_cls.path")
    name = f"{MODEL}.tokenizer_path" if select(f"{MODEL}.tokenizer_path") else f"{MODEL}.path"
    return Needs(
        pools=tuple(_pools(select)),
        num_gpus=(f"{_RAY}.num_gpus", select(f"{_RAY}.num_gpus")),
        cluster=_place(select, f"{_RAY}.address"),
        models=tuple(_models(select)),
        tokenizer=_place(select, name),
        data=tuple(_data(select)),
        files=tuple(
            Place(setting, str(path))
            for setting, path in (("reward.custom_reward_function.path", reward), ("data.custom_cls.path", reader))
            if path
        ),
        own_data=bool(reader),
        interpreter=_place(select, f"{_RAY}.runtime_env.py_executable"),
    )


def _place(select: Callable[[str], Any], setting: str) -> Place:
    return Place(setting, str(select(setting) or ""))


def _pools(select: Callable[[str], Any]) -> Iterator[Pool]:
    """verl gives each of these a resource pool of its own."""
    owners = ["trainer"]
    if select(f"{_REWARD}.enable_resource_pool"):
        owners.append(_REWARD)
    if select("distillation.enabled"):
        owners.append("distillation")
    if select("trainer.use_v1") and select("trainer.v1.trainer_mode") == "separate_async":
        owners.append(ROLLOUT)
    if select("rollout"):  # the asynchronous programs'
        owners.append("rollout")
    for owner in owners:
        setting = f"{owner}.n_gpus_per_node"
        yield Pool(setting, int(select(setting) or 0), int(select(f"{owner}.nnodes") or 0))


def _models(select: Callable[[str], Any]) -> Iterator[Place]:
    asked = select("critic.enable")
    if asked or (asked is None and select("algorithm.adv_estimator") == "gae"):
        yield _place(select, "critic.model.path")
    if select(f"{_REWARD}.enable"):
        yield _place(select, f"{_REWARD}.model_path")


def _data(select: Callable[[str], Any]) -> Iterator[Place]:
    from omegaconf import ListConfig

    for setting in ("data.train_files", "data.val_files"):
        value = select(setting)
        for path in value if isinstance(value, ListConfig) else [value]:
            yield Place(setting, str(path or ""))
