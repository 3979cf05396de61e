"""Our settings in verl's own configuration: ``+jetrl=unified`` on the command line, or a ``jetrl:`` section in YAML.

Two things make it work, both without an environment variable:

- the presets stand in hydra's ``ConfigStore`` (its means for configuration that a library brings along), stored
  when hydra is imported. Every preset has all fields of ``Config``; ``null`` leaves a field to its default.
- verl's first look at its composed configuration is watched (``watch_verl``). Where it has a ``jetrl`` section,
  the process is patched there, before Ray starts; where it has none, nothing happens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from jetrl_patch import env, runtime
from jetrl_patch.adapters.base import Journal, Patch
from jetrl_patch.adapters.verl import settings
from jetrl_patch.adapters.verl.section import SECTION, given
from jetrl_patch.config import SETTINGS, Config, from_text
from jetrl_patch.errors import ConflictError, NotPatchedError, explain
from jetrl_patch.patching.hooks import watch
from jetrl_patch.patching.patch import apply_patch

_UNIFIED = SETTINGS["precision"].default

#: name of the preset -> what it sets; a precision of its own has a preset of its name, in hydra's spelling
PRESETS: dict[str, dict[str, str]] = {
    "unified": {"precision": _UNIFIED},
    **{align: {"precision": _UNIFIED, "align": align} for align in SETTINGS["align"].choices},
    **{name.replace("-", "_"): {"precision": name} for name in SETTINGS["precision"].choices if name != _UNIFIED},
}


def store(_: ModuleType | None = None) -> None:
    """Put the presets into hydra's ConfigStore, as group ``jetrl``."""
    from hydra.core.config_store import ConfigStore

    every = {field.name: None for field in dataclasses.fields(Config)}
    for name, chosen in PRESETS.items():
        ConfigStore.instance().store(group=SECTION, name=name, node={**every, **chosen}, provider="jetrl_patch")


def config_of(verl_config: Any, environ: Mapping[str, str] | None = None) -> Config | None:
    """The settings that verl's configuration asks for, the ``JETRL_*`` variables filling in; None without a section.

    Raises ConflictError where a variable says something else than the section, ConfigError where either is wrong.
    """
    asked = given(verl_config)
    if asked is None:
        return None
    if env.switched_off(environ):
        raise ConflictError(
            explain(f"{env.SWITCH}=0", required="no patching", found=f"{SECTION}: {asked}", fix="unset one of the two")
        )
    fields = {field: variable for variable, field in env.FIELDS.items()}
    for name, theirs in from_text(env.read_fields(environ)).items():
        if name in asked and asked[name] != theirs:
            raise ConflictError(
                explain(
                    f"{SECTION}.{name} in verl's configuration",
                    required=repr(asked[name]),
                    found=f"{fields[name]}={theirs!r} in the environment",
                    fix="say it in one place",
                )
            )
    return Config.from_env(environ, **asked)


def activate(verl_config: Any) -> None:
    """Patch this process as verl's configuration asks; nothing if it does not. Where it is patched, ``check`` judges."""
    if runtime.is_active():
        return
    wanted = config_of(verl_config)
    if wanted is not None:
        runtime.enable(wanted)


def _first_look(original: Callable[..., Any]) -> Callable[..., Any]:
    def with_activation(config: Any, *args: Any, **kwargs: Any) -> Any:
        activate(config)
        return original(config, *args, **kwargs)

    return with_activation


def _validate_config(original: Callable[..., Any]) -> Callable[..., Any]:
    # verl's main has bound this very function, so it never calls the one that enable() puts in its place
    return _first_look(settings.validate_config(original))


def _trainer_init(original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        asked = given(config)
        if asked is not None and not runtime.is_active():
            raise NotPatchedError(
                f"verl's configuration has {SECTION}: {asked}, but the driver started without it and this process is not "
                "patched; call jetrl_patch.enable() before ray.init, or start with `python -m verl.trainer.main_ppo`"
            )
        original(self, config, *args, **kwargs)

    return __init__


_REMOVE = "verl hands its composed configuration to plugins"
_TRAINERS = (
    ("verl.trainer.ppo.ray_trainer", "RayPPOTrainer.__init__"),
    ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer.__init__"),
)

WATCHES: tuple[Patch, ...] = (
    Patch(
        module="verl.utils.device",
        attr="auto_set_device",
        make=_first_look,
        reason="the first call that gets verl's composed configuration; it may ask for us",
        remove_when=_REMOVE,
    ),
    Patch(
        module="verl.utils.config",
        attr="validate_config",
        make=_validate_config,
        reason="the same, and the checks that the driver makes before Ray starts",
        remove_when=_REMOVE,
    ),
    *(
        Patch(
            module=module,
            attr=attr,
            make=_trainer_init,
            reason="a run whose configuration asks for us does not go on unpatched",
            remove_when=_REMOVE,
        )
        for module, attr in _TRAINERS
    ),
)


def offer() -> None:
    """Make the presets known to hydra, now or when it is imported."""
    watch("hydra.core.config_store", store)


def watch_verl() -> None:
    """Look for our section where verl reads its configuration. These few wrappers stay for the life of the process."""
    journal = Journal()
    for patch in WATCHES:
        watch(patch.module, lambda module, patch=patch: apply_patch(patch, module, journal))  # type: ignore[misc]
