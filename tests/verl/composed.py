"""verl's configuration for many tests: composed once, and then changed by each test's overrides as hydra does it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf


@contextmanager
def composer(own: Sequence[str]) -> Iterator[Callable[..., Any]]:
    """A function from further overrides to verl's configuration with these and ``own``. Composing anew takes a second."""
    GlobalHydra.instance().clear()
    with initialize_config_module("verl.trainer.config", version_base=None):
        plain, parser = compose("ppo_trainer", list(own)), OverridesParser.create()

        def make(*extra: str) -> Any:
            overrides = parser.parse_overrides(list(extra))
            if any(override.is_delete() or "." not in override.key_or_group for override in overrides):  # or a config group
                return compose("ppo_trainer", [*own, *extra])
            config = copy.deepcopy(plain)
            for override in overrides:
                adds = override.is_add() or override.is_force_add()
                OmegaConf.update(config, override.key_or_group, override.value(), merge=True, force_add=adds)
            return config

        yield make
