"""Our part of a job's ``runtime_env``, put beside the user's. Pure functions on plain data; Ray is not needed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from jetrl_patch import env
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, ConflictError, differences, explain

__all__ = ["HOOK", "HOOK_NAME", "HOOK_VARIABLE", "Hook", "check_variables", "merge_runtime_env", "take_hook", "take_ours"]

HOOK = "worker_process_setup_hook"
#: of our own hook, as Ray gives it back in ``get_runtime_context().runtime_env``
HOOK_NAME = "jetrl_patch_setup_hook"
#: where Ray keeps the hook's name or key in the workers' environment (``ray_constants``; a test compares)
HOOK_VARIABLE = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
#: Ray takes a hook of this form from its own store, under a key of one job
_BY_KEY = "ray_runtime_env_func::"
#: fields beside which Ray allows no hook
_ALONE = ("container", "image_uri")

Hook = Callable[[], Any] | str | None


def merge_runtime_env(
    given: Mapping[str, Any] | None, config: Config, make_hook: Callable[[Hook], Callable[[], None]]
) -> dict[str, Any]:
    """A new ``runtime_env`` with the user's content and ours; ``given`` is not changed.

    Args:
        given: the user's: a dict, a ``RuntimeEnv`` (which is one) or an OmegaConf container.
        config: the driver's settings; they go into ``env_vars``.
        make_hook: gets the user's hook or None, gives the one to install.

    Raises ConflictError if a ``JETRL_*`` variable of the user's says something else than ``config``, ConfigError if it
    does not exist, or if the ``runtime_env`` has a field beside which Ray allows no hook.
    """
    merged = _plain(given or {})
    for name in _ALONE:
        if merged.get(name):
            raise ConfigError(
                explain(
                    "runtime_env of ray.init",
                    required="a setup hook, which patches the workers",
                    found=f"{name!r}, beside which Ray allows none",
                    fix="start the nodes themselves in that image",
                )
            )
    variables = dict(merged.get("env_vars") or {})
    hook = take_hook(merged, variables)
    check_variables(variables, config)
    merged["env_vars"] = {**variables, **config.to_env()}
    merged[HOOK] = make_hook(hook)
    return merged


def take_ours(injected: Mapping[str, Any] | None, config: Config) -> tuple[dict[str, Any], Hook]:
    """Of the ``runtime_env`` of ``ray job submit``: what stays there, and its hook.

    Ray refuses a key that is given both there and in ``ray.init``, so what we are going to set is taken out: the
    ``JETRL_*`` settings, if they agree with ours, and the hook, which the caller chains.
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
    """Remove the user's hook from both places where it can stand, and return it.

    A process of a job that hands its own environment on (vLLM does, to its Ray workers) hands on our hook, by name and by
    the key of that job: it is renewed, and what it ran besides stays with that job.
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
                    required="a setup hook that can be run beside ours",
                    found=f"{HOOK_VARIABLE}, which refers to another job's function",
                    fix="give the hook by its dotted path",
                )
            )
        hook = inherited
    found: Hook = hook
    return found


def check_variables(variables: Mapping[str, Any], config: Config) -> None:
    """Raise ConflictError if a ``JETRL_*`` variable among these means something else than ``config``."""
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
                "runtime_env of the Ray job beside the driver's settings",
                required={name: ours.get(name, "") for name in wrong},
                found={name: given[name] for name in wrong},
                fix="leave them out, they are set for every worker anyway",
            )
        )


def _plain(value: Any) -> Any:
    """A copy in which every mapping is a dict: OmegaConf's containers are none, and Ray wants dicts."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return copy.deepcopy(value) if isinstance(value, list) else value
