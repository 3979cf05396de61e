"""The plugin's settings as far as they are right, and an error for each that is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jetrl_patch import env
from jetrl_patch.config import SETTINGS, Config, from_text
from jetrl_patch.errors import JetrlError

__all__ = ["usable"]


def usable(environ: Mapping[str, str], given: Mapping[str, Any]) -> tuple[Config, list[JetrlError]]:
    """The settings of an environment and of options (``given``) without the wrong ones, and all errors."""
    errors: list[JetrlError] = []
    _tried(lambda: env.check_names(environ), errors)
    _tried(lambda: env.opted_in(environ), errors)
    known = {name: environ[name] for name in env.FIELDS if name in environ}
    whole: list[JetrlError] = []
    config = _tried(lambda: Config.from_env(known, **given), whole)
    if config is not None:
        return config, errors
    single: list[JetrlError] = []
    right = {name: text for name, text in known.items() if _tried(lambda n=name, t=text: _alone(n, t), single)}  # type: ignore[misc]
    # what is right by itself and wrong together is one error
    config = _tried(lambda: Config.from_env(right, **given), [])
    return config or _tried(lambda: Config(**given), []) or Config(), [*errors, *(single or whole)]


def _alone(name: str, text: str) -> bool:
    """Judge one variable. One that needs another setting is only read."""
    if SETTINGS[env.FIELDS[name]].joint:
        from_text({env.FIELDS[name]: text})
    else:
        Config.from_env({name: text})
    return True


def _tried(check: Callable[[], Any], errors: list[JetrlError]) -> Any:
    try:
        return check()
    except JetrlError as error:
        errors.append(error)
        return None
