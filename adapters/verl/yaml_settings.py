"""Paths of verl's configuration, which engine trains by it, and its ``jetrl`` section."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, ConflictError, JetrlError, differences, explain

__all__ = [
    "ACTOR", "ENGINE", "MODEL", "REF", "ROLLOUT", "SECTION", "Select", "disagreement", "given", "mixed", "model_folder",
    "named", "runs",
]  # fmt: skip


# ---- Dotted paths of verl's configuration --------------------------------------------------------

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
#: arguments that verl passes to vLLM's engine
ENGINE = f"{ROLLOUT}.engine_kwargs.vllm"


def named(path: str) -> str:
    """Name the setting at ``path`` in an error."""
    return f"verl setting {path}"


def model_folder(select: Callable[[str], Any]) -> Any:
    """Return the folder or name from which the model's configuration is read. ``select`` reads verl's setting at a path."""
    return select(f"{MODEL}.hf_config_path") or select(f"{MODEL}.path")


# ---- What the checks of Megatron and of VeOmni share: whether such an engine trains, and whether it computes the reference too

#: returns verl's setting at a dotted path, None where it is missing
Select = Callable[[str], Any]


def runs(strategy: str, select: Select, config: Config) -> bool:
    """Whether an engine trains the actor or computes the reference, in a mode with a quantized rollout."""
    return config.quantized_rollout and strategy in (select(f"{ACTOR}.strategy"), select(f"{REF}.strategy"))


def mixed(strategy: str, select: Select) -> ConfigError | None:
    """An error if another engine than this one trains the actor or computes the reference."""
    found = {path: select(f"{path}.strategy") for path in (ACTOR, REF)}
    if all(value is None or value == strategy for value in found.values()):
        return None
    required, fix = "one engine for actor and reference", f"set model_engine={strategy}"
    words = " and ".join(repr(value) for value in found.values())
    return ConfigError(explain(f"verl settings {ACTOR}.strategy and {REF}.strategy", required=required, found=words, fix=fix))


# ---- Read the ``jetrl`` section of verl's configuration, and compare it with the settings of this process

SECTION = "jetrl"


def given(verl_config: Any) -> dict[str, Any] | None:
    """Return the fields of ``Config`` that the section sets; None without a section. ``null`` sets nothing.

    Raises ConfigError if the section is not a mapping. ``Config`` checks the fields.
    """
    from omegaconf import OmegaConf

    section = OmegaConf.select(verl_config, SECTION, default=None)
    if section is None:
        return None
    if not OmegaConf.is_dict(section):
        raise ConfigError(
            explain(
                f"{SECTION} in verl's configuration",
                required="a mapping of settings",
                found=repr(section),
                fix=f"use +{SECTION}=unified, or set {SECTION}.precision",
            )
        )
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
    runs = {name: getattr(config.resolved(), name) for name in asked}
    return ConflictError(
        differences(
            f"{SECTION} in verl's configuration",
            required=asked,
            found=runs,
            origin=" from the environment or enable()",
            fix="set it in one place only",
        )
    )
