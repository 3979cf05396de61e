"""Merge the plugin's part of a job's ``runtime_env`` with the user's. Pure functions on plain data, without Ray."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from jetrl_patch import env
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, ConflictError, differences, explain

__all__ = [
    "HOOK",
    "HOOK_NAME",
    "HOOK_VARIABLE",
    "Hook",
    "check_variables",
    "merge_runtime_env",
    "take_hook",
    "take_ours",
]

HOOK = "worker_process_setup_hook"
#: name of the plugin's hook, as ``get_runtime_context().runtime_env`` returns it
HOOK_NAME = "jetrl_patch_setup_hook"
#: where Ray keeps the hook's name or key in the workers' environment (``ray_constants``; a test compares)
HOOK_VARIABLE = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
#: prefix of a hook that Ray keeps in its own store, under one job's key
_BY_KEY = "ray_runtime_env_func::"
#: fields that Ray does not combine with a hook
_ALONE = ("container", "image_uri")

Hook = Callable[[], Any] | str | None


def merge_runtime_env(
    given: Mapping[str, Any] | None, config: Config, make_hook: Callable[[Hook], Callable[[], None]]
) -> dict[str, Any]:
    """Return a new ``runtime_env`` with the user's content and the plugin's. ``given`` is unchanged.

    Args:
        given: the user's ``runtime_env``: a dict (``RuntimeEnv`` is one) or an OmegaConf container.
        config: the driver's settings; they go into ``env_vars``.
        make_hook: takes the user's hook or None, returns the one to install.

    Raises ConflictError if a ``JETRL_*`` variable of the user contradicts ``config``. Raises ConfigError if there is no such
    variable, or if the ``runtime_env`` has a field that Ray does not combine with a hook.
    """
    merged = _plain(given or {})
    for name in _ALONE:
        if merged.get(name):
            raise ConfigError(
                explain(
                    "runtime_env of ray.init",
                    required="a setup hook, which patches the workers",
                    found=f"{name!r}, which Ray does not combine with a hook",
                    fix="drop it and start the nodes themselves in that image",
                )
            )
    variables = dict(merged.get("env_vars") or {})
    hook = take_hook(merged, variables)
    check_variables(variables, config)
    merged["env_vars"] = {**variables, **config.to_env()}
    merged[HOOK] = make_hook(hook)
    return merged


def take_ours(injected: Mapping[str, Any] | None, config: Config) -> tuple[dict[str, Any], Hook]:
    """Split the ``runtime_env`` of ``ray job submit`` into what stays there and its hook.

    Ray refuses a key given both there and in ``ray.init``. So this removes what the plugin sets: the ``JETRL_*`` settings,
    if they agree with ``config``, and the hook, which the caller chains.
    """
    rest = _plain(injected or {})
    variables = dict(rest.pop("env_vars", None) or {})
    check_variables(variables, config)
    hook = take_hook(rest, variables)
    variables = {name: value for name, value in variables.items() if name not in config.to_env()}
    if variables:
        rest["env_vars"] = variables
    return rest, hook


def take_hook(runtime_env: dict[str, Any], variables: dict[str, Any]) -> Hook:
    """Remove the user's hook from both places where it can be, and return it.

    A process that passes on its own environment (as vLLM does to its Ray workers) passes on the plugin's hook, by name and
    by its job's key. That hook is replaced by a new one; the user hook it chained stays with that job.
    """
    hook = runtime_env.pop(HOOK, None)
    inherited = variables.pop(HOOK_VARIABLE, None)
    if hook == HOOK_NAME:
        return None
    if hook is None and inherited:
        if inherited.startswith(_BY_KEY):
            raise ConflictError(
                explain(
                    "runtime_env of ray.init",
                    required="a setup hook that this job can run",
                    found=f"{HOOK_VARIABLE}, which refers to another job's function",
                    fix="pass the hook by its dotted path",
                )
            )
        hook = inherited
    found: Hook = hook
    return found


def check_variables(variables: Mapping[str, Any], config: Config) -> None:
    """Raise ConflictError if a ``JETRL_*`` variable among these contradicts ``config``."""
    ours = config.to_env()
    given = {
        name: str(value) for name, value in variables.items() if name.startswith(env.PREFIX) and str(value).strip()
    }
    wrong = []
    for name, value in given.items():
        alone = {**ours, name: value}
        if not env.opted_in(alone) or Config.from_env(alone).resolved() != config.resolved():
            wrong.append(name)
    if wrong:
        raise ConflictError(
            differences(
                "JETRL_* variables in the runtime_env of the Ray job",
                required={name: ours.get(name, "") for name in wrong},
                found={name: given[name] for name in wrong},
                fix="remove them: the driver sets them for every worker",
            )
        )


def _plain(value: Any) -> Any:
    """Return a copy in which every mapping is a dict, as Ray requires: OmegaConf's containers are not."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return copy.deepcopy(value) if isinstance(value, list) else value
