"""verl's configuration, composed by hydra as verl's main would, and judged by the verl adapter."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jetrl_patch import runtime
from jetrl_patch.config import Config
from jetrl_patch.doctor.folders import file_of
from jetrl_patch.doctor.report import Check, from_error
from jetrl_patch.errors import ConfigError, JetrlError

__all__ = ["check_settings", "compose_config", "needs_flash_attn", "wanted"]

MODEL = "actor_rollout_ref.model"


def compose_config(arguments: Sequence[str]) -> Any:
    """What ``python -m verl.trainer.main_ppo ARGUMENTS`` would get; hydra's own options count as well.

    Raises ConfigError with hydra's message.
    """
    from hydra import compose, initialize_config_dir
    from hydra._internal.utils import get_args_parser
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    trainer = file_of("verl", "trainer")
    if trainer is None:
        raise ConfigError("verl has no folder trainer here; install verl")
    runtime.reach("verl", "preset:store")()
    try:
        options = get_args_parser().parse_args(list(arguments))
    except SystemExit:
        raise ConfigError(f"hydra does not understand {' '.join(arguments)!r}; see its --hydra-help") from None
    overrides = list(options.overrides)
    if options.config_dir is not None:
        overrides.append(f"hydra.searchpath=[file://{os.path.abspath(options.config_dir)}]")
    folder = str(trainer / (options.config_path or "config"))  # an absolute path stays what it is
    GlobalHydra.instance().clear()
    try:
        with _no_plugins(), initialize_config_dir(folder, version_base=None):
            return compose(options.config_name or "ppo_trainer", overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"hydra cannot compose verl's configuration: {_one_line(error)}") from error


def wanted(verl_config: Any, environ: dict[str, str]) -> Config | None:
    """The settings of a ``jetrl`` section; None if there is none. Raises ConfigError and ConflictError."""
    config: Config | None = runtime.reach("verl", "preset:config_of")(verl_config, environ)
    return config


def check_settings(verl_config: Any, config: Config) -> Iterator[Check]:
    """Each setting that cannot be kept, the model, and what would be changed. ``verl_config`` is changed."""
    found = [from_error("verl setting", error) for error in _problems(verl_config, config)]
    yield from found
    if not found:
        yield Check("verl settings", "ok", "nothing in them stands against ours")
    yield _model(verl_config)
    changes = runtime.reach("verl", "settings:complete")(verl_config, config)
    yield Check("verl changes", "ok", "; ".join(changes) or "nothing would be changed")


def needs_flash_attn(verl_config: Any) -> str:
    """What in the configuration needs flash-attn on a GPU; empty if nothing does."""
    from omegaconf import OmegaConf

    chosen = OmegaConf.select(verl_config, f"{MODEL}.override_config.attn_implementation", default="flash_attention_2")
    if "flash" in str(chosen):
        return f"{MODEL}.override_config.attn_implementation={chosen}"
    if OmegaConf.select(verl_config, f"{MODEL}.use_remove_padding", default=False):
        return f"{MODEL}.use_remove_padding"
    return ""


def _problems(verl_config: Any, config: Config) -> Iterator[BaseException]:
    try:
        yield from runtime.reach("verl", "settings:problems")(verl_config, config)
    except JetrlError as error:
        yield error
    except Exception as error:  # a broken config.json, a missing key: verl would stumble over it as well
        yield ConfigError(f"{type(error).__name__}: {_one_line(error)}")


def _model(verl_config: Any) -> Check:
    from omegaconf import OmegaConf

    path = str(OmegaConf.select(verl_config, f"{MODEL}.path", default=""))
    if Path(path).expanduser().is_dir():
        return Check("model", "ok", path)
    return Check(
        "model",
        "warning",
        f"{path!r} is no local folder, so its family and its tensor-parallel split were not checked",
        f"download it and give its folder as {MODEL}.path",
    )


@contextlib.contextmanager
def _no_plugins() -> Iterator[None]:
    """A search path ``pkg://verl…`` makes hydra import verl, which would load its plugins, ours among them."""
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


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
