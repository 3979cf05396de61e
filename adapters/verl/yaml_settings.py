"""Paths of verl's configuration, how to read and set them, and its ``jetrl`` section. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, ConflictError, JetrlError, differences, explain

# ---- Dotted paths of verl's configuration ----

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
#: arguments that verl passes to vLLM's engine
ENGINE = f"{ROLLOUT}.engine_kwargs.vllm"

#: returns the value at a dotted path of verl's configuration, None if it is missing
Select = Callable[[str], Any]


def selector(verl_config: Any) -> Select:
    """Return a function that reads a dotted path of ``verl_config``."""
    from omegaconf import OmegaConf

    return lambda path: OmegaConf.select(verl_config, path, default=None)


def update(verl_config: Any, path: str, value: Any) -> None:
    """Set the value at a dotted path, also where the path does not exist yet."""
    from omegaconf import OmegaConf

    OmegaConf.update(verl_config, path, value, force_add=True)


def named(path: str) -> str:
    """Name the setting at ``path`` in an error."""
    return f"verl setting {path}"


def model_folder(select: Select) -> Any:
    """Return the folder or hub name from which the model's configuration is read."""
    return select(f"{MODEL}.hf_config_path") or select(f"{MODEL}.path")


def data_files(select: Select) -> Iterator[tuple[str, str]]:
    """Yield the setting and the path of each file of samples."""
    from omegaconf import ListConfig

    for setting in ("data.train_files", "data.val_files"):
        value = select(setting)
        for path in value if isinstance(value, ListConfig) else [value]:
            yield setting, str(path or "")


#: whose GPUs are a pool of their own; "rollout" is the asynchronous programs' own section
POOLS = ("trainer", "reward.reward_model", "distillation", ROLLOUT, "rollout")
ULYSSES = "ulysses_sequence_parallel_size"
#: every setting that the plugin reads as a whole number
WHOLE = (
    *(f"{ROLLOUT}.{kind}_parallel_size" for kind in ("tensor_model", "expert", "data", "pipeline_model")),
    *(f"{pool}.{key}" for pool in POOLS for key in ("nnodes", "n_gpus_per_node")),
    *(f"{role}.{key}" for role in (ACTOR, REF) for key in (ULYSSES, f"fsdp_config.{ULYSSES}", "veomni.ulysses_parallel_size")),
    *(f"{role}.megatron.{kind}_parallel_size" for role in (ACTOR, REF) for kind in ("tensor_model", "context")),
    f"{ACTOR}.fsdp_config.fsdp_size", f"{MODEL}.lora_rank", f"{MODEL}.lora.rank", "ray_kwargs.ray_init.num_cpus",
)  # fmt: skip


def whole(select: Select, path: str, default: int = 1) -> int:
    """Return the whole number at ``path``, or ``default`` for none, 0 and anything else, which ``number_problems`` reports."""
    assert path in WHOLE, path
    value = select(path)
    return value if _is_whole(value) and value else default


def number_problems(select: Select) -> Iterator[JetrlError]:
    """Yield an error for each setting in ``WHOLE`` that has another value."""
    for path in WHOLE:
        value = select(path)
        if value is not None and not _is_whole(value):
            yield ConfigError(explain(named(path), required="a whole number", found=repr(value), fix="write a number"))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def runs(strategy: str, select: Select, config: Config) -> bool:
    """Whether the engine ``strategy`` trains the actor or computes the reference, in a mode with a quantized rollout."""
    return config.quantized_rollout and strategy in (select(f"{ACTOR}.strategy"), select(f"{REF}.strategy"))


def mixed(strategy: str, select: Select) -> list[JetrlError]:
    """Return an error if actor and reference do not both use the engine ``strategy``; nothing if they do."""
    found = [select(f"{path}.strategy") for path in (ACTOR, REF)]
    if all(value in (None, strategy) for value in found):
        return []
    required, fix = "one engine for actor and reference", f"set model_engine={strategy}"
    what, words = f"verl settings {ACTOR}.strategy and {REF}.strategy", " and ".join(map(repr, found))
    return [ConfigError(explain(what, required=required, found=words, fix=fix))]


# ---- The ``jetrl`` section of verl's configuration ----

SECTION = "jetrl"


def given(verl_config: Any) -> dict[str, Any] | None:
    """Return the fields of ``Config`` that the section sets, without those that are ``null``; None without a section.

    Raises ConfigError if the section is not a mapping. ``Config`` checks the fields.
    """
    from omegaconf import OmegaConf

    section = selector(verl_config)(SECTION)
    if section is None:
        return None
    if not OmegaConf.is_dict(section):
        what, fix = f"{SECTION} in verl's configuration", f"use +{SECTION}=unified, or set {SECTION}.precision"
        raise ConfigError(explain(what, required="a mapping of settings", found=repr(section), fix=fix))
    plain = OmegaConf.to_container(section, resolve=True)
    assert isinstance(plain, dict)
    found = {str(k): tuple(v) if isinstance(v, list) else v for k, v in plain.items() if v is not None}
    cap = found.get("correction_bounds")
    if isinstance(cap, (int, float)) and not isinstance(cap, bool):
        found["correction_bounds"] = (float(cap),)
    return found


def disagreement(verl_config: Any, config: Config) -> JetrlError | None:
    """Return the error for a section that contradicts ``config``, the settings of this process; None if they agree."""
    try:
        asked = given(verl_config)
        if asked is None or config.replace(**asked).resolved() == config.resolved():
            return None
    except ConfigError as error:
        return error
    active = {name: getattr(config.resolved(), name) for name in asked}
    what, origin, fix = f"{SECTION} in verl's configuration", " from the environment or enable()", "set it in one place only"
    return ConflictError(differences(what, required=asked, found=active, origin=origin, fix=fix))
