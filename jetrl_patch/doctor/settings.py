"""Check the framework's own settings with its adapter (``jetrl_patch.trainer.interface.Trainer``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jetrl_patch import registry
from jetrl_patch.config import Config
from jetrl_patch.doctor.report import Check, from_error
from jetrl_patch.errors import ConfigError, JetrlError

__all__ = ["check_settings"]


def check_settings(framework: str, settings: Any, config: Config) -> Iterator[Check]:
    """Check each setting and the model, and list what the plugin would change. Modifies ``settings``."""
    found = [from_error(f"{framework} setting", error) for error in _problems(framework, settings, config)]
    yield from found
    if not found:
        yield Check(f"{framework} settings", "ok", "no conflict with the plugin's settings")
    yield _model(*registry.trainer(framework).model_path(settings))
    changes = registry.trainer(framework).complete(settings, config)
    yield Check(f"{framework} changes", "ok", "; ".join(changes) or "nothing would be changed")


def _problems(framework: str, settings: Any, config: Config) -> Iterator[BaseException]:
    try:
        yield from registry.trainer(framework).problems(settings, config)
    except JetrlError as error:
        yield error
    except Exception as error:  # a broken config.json or a missing key would stop the framework as well
        yield ConfigError(f"{type(error).__name__}: {' '.join(str(error).split())}")


def _model(path: str, setting: str) -> Check:
    if Path(path).expanduser().is_dir():
        return Check("model", "ok", path)
    return Check(
        "model",
        "warning",
        f"{path!r} is not a local folder, so the model's family and its tensor-parallel split were not checked",
        f"download it and set {setting} to its folder",
    )
