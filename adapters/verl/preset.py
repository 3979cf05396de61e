"""Settings in verl's own configuration: ``+jetrl=unified`` on the command line, or a ``jetrl:`` section in YAML.

No environment variable is needed:

- The presets are in Hydra's ``ConfigStore``, from the import of Hydra on. Each has all fields of ``Config``; ``null`` keeps a
  field's default.
- Wrappers see verl's composed configuration before verl uses it (``watch_verl``). If it has a ``jetrl`` section, they patch the
  process before Ray starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from jetrl_patch import session
from jetrl_patch.adapters.verl import settings
from jetrl_patch.adapters.verl.yaml_settings import SECTION, given
from jetrl_patch.config import SETTINGS, Config, environment, from_text
from jetrl_patch.errors import ConflictError, NotPatchedError, explain
from jetrl_patch.patching.patch import apply_patch, gated, replacement, watch
from jetrl_patch.registry import Journal, Patch

_UNIFIED = SETTINGS["precision"].default

#: preset -> its settings; the other precisions have presets of their own name, with underscores
PRESETS: dict[str, dict[str, str]] = {
    "unified": {"precision": _UNIFIED},
    **{align: {"precision": _UNIFIED, "align": align} for align in SETTINGS["align"].choices},
    **{name.replace("-", "_"): {"precision": name} for name in SETTINGS["precision"].choices if name != _UNIFIED},
}


def store(_: ModuleType | None = None) -> None:
    """Store the presets in Hydra's ConfigStore, as group ``jetrl``."""
    from hydra.core.config_store import ConfigStore

    every = {field.name: None for field in dataclasses.fields(Config)}
    for name, chosen in PRESETS.items():
        ConfigStore.instance().store(group=SECTION, name=name, node={**every, **chosen}, provider="jetrl_patch")


def config_of(verl_config: Any, environ: Mapping[str, str] | None = None) -> Config | None:
    """Return the settings of verl's ``jetrl`` section, completed by the ``JETRL_*`` variables; None without a section.

    Raises ConflictError if a variable contradicts the section, ConfigError if either is invalid.
    """
    asked = given(verl_config)
    if asked is None:
        return None
    if environment.switched_off(environ):
        what, required = f"{environment.SWITCH}=0", f"no {SECTION} section in verl's configuration"
        fix = f"unset {environment.SWITCH}, or remove the section"
        raise ConflictError(explain(what, required=required, found=f"{SECTION}={asked}", fix=fix))
    variables = {field: variable for variable, field in environment.FIELDS.items()}
    for name, value in from_text(environment.read_fields(environ)).items():
        if name in asked and asked[name] != value:
            what, found = f"{SECTION}.{name} in verl's configuration", f"{variables[name]}={value!r} in the environment"
            raise ConflictError(explain(what, required=repr(asked[name]), found=found, fix="set it in one place only"))
    return Config.from_env(environ, **asked)


def activate(verl_config: Any) -> None:
    """Patch this process if verl's configuration asks for it. In a patched process ``settings.check`` compares the two."""
    if session.is_active():
        return
    wanted = config_of(verl_config)
    if wanted is not None:
        session.enable(wanted)


@replacement
def _first_look(original: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
    activate(config)
    return original(config, *args, **kwargs)


def _validate_config(original: Callable[..., Any]) -> Callable[..., Any]:
    # verl's main has already imported this function by name, so it never calls the replacement that enable() installs
    return _first_look(gated(settings.settled(original), original, session.is_active))


@replacement
def _trainer_init(original: Any, self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    asked = given(config)
    if asked is not None and not session.is_active():
        raise NotPatchedError(
            f"verl's configuration has {SECTION}={asked}, but this process is not patched: the driver started without "
            "jetrl_patch. Start with `python -m verl.trainer.main_ppo`, or call jetrl_patch.enable() before ray.init."
        )
    original(self, config, *args, **kwargs)


_REMOVE = "verl calls its plugins (entry points verl.plugins) with the composed Hydra config before run_ppo calls ray.init"
_UNSEEN = "verl does not pass its composed configuration to plugins, so a jetrl section would be ignored"
_IMPORTED = "verl's main imports this function by name before enable() replaces it, so the driver's checks would not run"
_UNPATCHED = "a run whose configuration has a jetrl section could go on unpatched"

WATCHES: tuple[Patch, ...] = (
    Patch("verl.utils.device", "auto_set_device", _first_look, reason=_UNSEEN, remove_when=_REMOVE),
    Patch("verl.utils.config", "validate_config", _validate_config, reason=_IMPORTED, remove_when=_REMOVE),
    Patch("verl.trainer.ppo.ray_trainer", "RayPPOTrainer.__init__", _trainer_init, reason=_UNPATCHED, remove_when=_REMOVE),
    Patch("verl.trainer.ppo.v1.trainer_base", "PPOTrainer.__init__", _trainer_init, reason=_UNPATCHED, remove_when=_REMOVE),
)


def watch_verl() -> None:
    """Look for the ``jetrl`` section where verl reads its configuration, for the life of this process."""
    journal = Journal()
    for patch in WATCHES:
        watch(patch.module, lambda module, patch=patch: apply_patch(patch, module, journal))  # type: ignore[misc]
