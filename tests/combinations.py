"""Random settings of the plugin: what a framework's driver accepts, it completes to what it accepts again."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from jetrl_patch.config import SETTINGS, Config
from jetrl_patch.config.corrections import KINDS
from jetrl_patch.errors import ConfigError
from tests.models import config_of

#: settings whose values are not words or switches -> values
_OTHERS: dict[str, tuple[Any, ...]] = {
    "exclude": ((), ("layers.0",)),
    "correction_bounds": (None, (2.0,), (0.5, 2.0)),
    "guard_sqnr": (None, 20.0),
    "smoothing": (None, 0.5),
    "invariant_scale": (None, 1.5),
    "upstream_fixes": (None, True, False),
    "decode_graphs": ("auto", True, False),
    "monitor_every": (10, 0),
}
#: settings that a driver completes the framework's settings for: more often than at random
_OFTEN: tuple[dict[str, Any], ...] = ({}, {}, *({"correction": kind} for kind in KINDS), {"correction": "tis", "acr": True})
#: settings that choose a device, and those that no driver's check reads
_LEFT = ("platform", "backend", "audit_fraction", "sync_timeout", "monitor_sqnr", "monitor_underflow", "resume_any")


def settings_of(draw: random.Random) -> Config:
    """A valid ``Config`` in which a few settings differ from their defaults."""
    names = [name for name in SETTINGS if name not in _LEFT]
    while True:
        chosen = {"precision", "align", *draw.sample(names, draw.randint(0, 4))}
        given = {name: draw.choice(_values(name)) for name in sorted(chosen)} | draw.choice(_OFTEN)
        try:
            return Config(**given)
        except ConfigError:
            continue


def _values(name: str) -> tuple[Any, ...]:
    found = SETTINGS[name]
    return _OTHERS.get(name) or (*found.choices, *((None,) if found.default is None else ())) or (True, False)


def models(factory: pytest.TempPathFactory) -> list[Path]:
    """Folders with the configurations of a dense model and a mixture."""
    made = []
    for family in ("qwen3", "qwen3_moe"):
        made.append(factory.mktemp(family))
        config_of(family).save_pretrained(made[-1])
    return made
