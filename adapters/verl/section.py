"""Read the ``jetrl`` section of verl's configuration, and compare it with the settings of this process."""

from __future__ import annotations

from typing import Any

from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, ConflictError, JetrlError, differences, explain

__all__ = ["SECTION", "disagreement", "given"]

SECTION = "jetrl"


def given(verl_config: Any) -> dict[str, Any] | None:
    """Return the fields of ``Config`` that the section sets; None without a section. ``null`` sets nothing.

    Raises ConfigError if the section is not a mapping. ``Config`` checks the fields.
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
                fix=f"use +{SECTION}=unified, or set {SECTION}.precision",
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
    """Return the error for a section that contradicts ``config``, the settings of this process; None if they agree."""
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
            fix="set it in one place only",
        )
    )
