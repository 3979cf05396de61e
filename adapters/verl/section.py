"""The ``jetrl`` section of verl's configuration: what it asks for, and whether this process runs so."""

from __future__ import annotations

from typing import Any

from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, ConflictError, JetrlError, differences, explain

__all__ = ["SECTION", "disagreement", "given"]

SECTION = "jetrl"


def given(verl_config: Any) -> dict[str, Any] | None:
    """The fields of ``Config`` that the section sets; None if there is no section. ``null`` sets nothing.

    Raises ConfigError for a section that is no mapping. What the fields may be is said by ``Config``.
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
                fix=f"write +{SECTION}=unified, or {SECTION}.precision=...",
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
    """The error to raise where the section asks for something else than ``config``, with which this process runs."""
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
            fix="say it in one place",
        )
    )
