"""verl's ``Launch`` and ``Merger``: compose its configuration as its main does, and read it."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

from jetrl_patch.adapters.verl import checkpoint, preset, veomni
from jetrl_patch.adapters.verl.checkpoint import merge
from jetrl_patch.adapters.verl.preset import config_of as asked_for
from jetrl_patch.adapters.verl.rollout import expert_parallel, tensor_parallel
from jetrl_patch.adapters.verl.settings import PROGRAM, chosen, complete, problems, program_problem
from jetrl_patch.adapters.verl.settings import TRAINERS as programs
from jetrl_patch.adapters.verl.yaml_settings import ACTOR, MODEL, ROLLOUT, Select, data_files, selector, whole
from jetrl_patch.config import Config
from jetrl_patch.config.launches import Needs, Place, Pool, Saves, Storage, Stored
from jetrl_patch.errors import ConfigError, explain
from jetrl_patch.patching.guards import file_of

__all__ = [
    "asked_for", "chosen", "complete", "merge", "model_path", "needs", "needs_flash_attn", "problems",
    "program_problem", "programs", "read", "saves", "storage",
]  # fmt: skip

_RAY = "ray_kwargs.ray_init"
_REWARD = "reward.reward_model"


def needs(verl_config: Any) -> Needs:
    """Return what a launch with this configuration needs on its machine."""
    select = selector(verl_config)
    code = ("reward.custom_reward_function.path", "data.custom_cls.path")
    return Needs(
        pools=tuple(_pools(select)),
        num_gpus=(f"{_RAY}.num_gpus", select(f"{_RAY}.num_gpus")),
        cluster=_place(select, f"{_RAY}.address"),
        models=tuple(_models(select)),
        tokenizer=_place(select, f"{MODEL}.tokenizer_path" if select(f"{MODEL}.tokenizer_path") else f"{MODEL}.path"),
        data=tuple(itertools.starmap(Place, data_files(select))),
        files=tuple(_place(select, setting) for setting in code if select(setting)),
        own_data=bool(select("data.custom_cls.path")),
        interpreter=_place(select, f"{_RAY}.runtime_env.py_executable"),
        resumes=checkpoint.resumed(select),
    )


def storage(verl_config: Any, config: Config) -> Storage:
    """Return where verl keeps the policy: FSDP's FP32 masters, gradients and moments per rank. Other engines are unknown."""
    select = selector(verl_config)
    rollout: dict[str, Any] = {
        "tensor_parallel": tensor_parallel(select),
        "expert_parallel": expert_parallel(select, config),
        "utilization": select(f"{ROLLOUT}.gpu_memory_utilization"),
    }
    strategy, fsdp = select(f"{ACTOR}.strategy"), f"{ACTOR}.fsdp_config"
    if strategy not in ("fsdp", "fsdp2"):
        return Storage(trainer=f"how {strategy} splits the model is not read", **rollout)
    ranks = max(1, whole(select, "trainer.n_gpus_per_node") * whole(select, "trainer.nnodes"))
    group = whole(select, f"{fsdp}.fsdp_size", -1)
    ranks = group if 0 < group < ranks else ranks
    each = _bytes(select)
    weights = bool(select(f"{fsdp}.offload_policy") or select(f"{fsdp}.param_offload"))
    moments = bool(select(f"{fsdp}.offload_policy") or select(f"{fsdp}.optimizer_offload"))
    return Storage(
        trainer=f"{strategy} over {ranks} rank{'' if ranks == 1 else 's'}",
        weights=Stored(each, ranks),
        gradients=Stored(each, ranks),
        optimizer=Stored(0.0, ranks),
        reshards=select(f"{fsdp}.reshard_after_forward") is not False,
        offloaded=("weights", "gradients") * weights + ("optimizer",) * moments,
        **rollout,
    )


#: entry of save_contents -> its name in ``Saves``; what is left out is small
_CONTENTS = {"model": "model", "optimizer": "optimizer", "hf_model": "exported"}


def saves(verl_config: Any) -> Saves:
    """Return what verl's trainer validates and writes: FSDP's shards in the masters' dtype, and what save_contents adds."""
    select = selector(verl_config)
    contents = select(f"{ACTOR}.checkpoint.save_contents") or ()
    first = "before training (trainer.val_before_train)" if select("trainer.val_before_train") is not False else ""
    later = _every(select, "trainer.test_freq")
    kept = select("trainer.max_actor_ckpt_to_keep")
    return Saves(
        validates=" and ".join(filter(None, (first, later))),
        when=_every(select, "trainer.save_freq"),
        contents=tuple(_CONTENTS[name] for name in contents if name in _CONTENTS),
        exported=_bytes(select),
        folder=str(select("trainer.default_local_dir") or ""),
        kept=kept if isinstance(kept, int) else None,
    )


def _bytes(select: Select) -> float:
    """Bytes of a parameter in FSDP's masters."""
    return 2.0 if "16" in str(select(f"{ACTOR}.fsdp_config.model_dtype")) else 4.0


def _every(select: Select, setting: str) -> str:
    steps = select(setting)
    return f"every {steps} steps and after the last one ({setting})" if isinstance(steps, int) and steps > 0 else ""


def _place(select: Select, setting: str) -> Place:
    return Place(setting, str(select(setting) or ""))


def _pools(select: Select) -> Iterator[Pool]:
    """The resource pools that verl creates."""
    owners = {
        "trainer": True,
        _REWARD: select(f"{_REWARD}.enable_resource_pool"),
        "distillation": select("distillation.enabled"),
        ROLLOUT: select("trainer.use_v1") and select("trainer.v1.trainer_mode") == "separate_async",
        "rollout": select("rollout"),  # the asynchronous programs' own section
    }
    for owner in (name for name, has_pool in owners.items() if has_pool):
        setting = f"{owner}.n_gpus_per_node"
        yield Pool(setting, whole(select, setting, 0), whole(select, f"{owner}.nnodes", 0))


def _models(select: Select) -> Iterator[Place]:
    critic = select("critic.enable")
    if critic or (critic is None and select("algorithm.adv_estimator") == "gae"):
        yield _place(select, "critic.model.path")
    if select(f"{_REWARD}.enable"):
        yield _place(select, f"{_REWARD}.model_path")


def read(arguments: Sequence[str], target: str = PROGRAM) -> Any:
    """Return the configuration of ``python -m TARGET ARGUMENTS``. Hydra's own options count too.

    Raises ConfigError with Hydra's message.
    """
    from hydra import compose, initialize_config_dir
    from hydra._internal.utils import get_args_parser
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    trainer, program = (file_of("verl", *name.split(".")[1:-1]) for name in (PROGRAM, target))
    if trainer is None or program is None:
        required = f"the program {target}"
        raise ConfigError(explain("verl in this environment", required=required, found="none", fix="install verl 0.9"))
    preset.store()
    try:
        options = get_args_parser().parse_args(list(arguments))
    except SystemExit:
        raise ConfigError(f"Hydra cannot parse {' '.join(arguments)!r}. See --hydra-help.") from None
    overrides = list(options.overrides)
    # the asynchronous programs extend the main program's configuration; verl's scripts find it from verl's checkout
    places = [] if program == trainer else [str(trainer / "config")]
    if options.config_dir is not None:
        places.append(os.path.abspath(options.config_dir))
    if places:
        overrides.append(f"hydra.searchpath=[{','.join(f'file://{place}' for place in places)}]")
    folder = str(program / (options.config_path or "config"))  # joining keeps an absolute path
    GlobalHydra.instance().clear()
    try:
        with _no_plugins(), initialize_config_dir(folder, version_base=None):
            return compose(options.config_name or programs[target], overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"Hydra cannot compose verl's configuration: {' '.join(str(error).split())}") from error


def model_path(verl_config: Any) -> tuple[str, str]:
    """Return the model's path and the setting that gives it."""
    return str(selector(verl_config)(f"{MODEL}.path") or ""), f"{MODEL}.path"


def needs_flash_attn(verl_config: Any) -> str:
    """Return the setting that needs flash-attn on a GPU; empty if none does."""
    from omegaconf import OmegaConf

    if OmegaConf.select(verl_config, f"{ACTOR}.strategy") == veomni.STRATEGY:
        own = f"{ACTOR}.veomni.attn_implementation"
        attention = OmegaConf.select(verl_config, own)
        return f"{own}={attention}" if "flash" in str(attention) else ""
    attention = OmegaConf.select(verl_config, f"{MODEL}.override_config.attn_implementation", default="flash_attention_2")
    if "flash" in str(attention):
        return f"{MODEL}.override_config.attn_implementation={attention}"
    if OmegaConf.select(verl_config, f"{MODEL}.use_remove_padding", default=False):
        return f"{MODEL}.use_remove_padding"
    return ""


@contextlib.contextmanager
def _no_plugins() -> Iterator[None]:
    """Disable verl's plugins. A search path ``pkg://verl…`` makes Hydra import verl, which would load jetrl_patch as one."""
    name = "VERL_USE_EXTERNAL_PLUGINS"
    before = os.environ.get(name)
    os.environ[name] = "none"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
