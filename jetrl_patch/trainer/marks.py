"""Settings that the driver hands to every process inside the framework's own; each process compares them with its own."""

from __future__ import annotations

from collections.abc import Mapping

from jetrl_patch import env
from jetrl_patch.config import Config
from jetrl_patch.errors import ConflictError, NotPatchedError, differences

__all__ = ["MARK", "check", "require_same"]

#: key of the plugin's settings in a framework's settings and in reports
MARK = "jetrl"


def check(mark: Mapping[str, str] | None, config: Config, where: str, unpatched: str) -> None:
    """Compare the settings that the driver wrote with those of this process.

    Args:
        where: names this process in errors.
        unpatched: the message if the driver wrote none.

    Raises NotPatchedError if there is no mark, ConflictError if it differs.
    """
    if not mark:
        raise NotPatchedError(unpatched)
    require_same(where, required=mark, found=config.to_env())


def require_same(where: str, *, required: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Raise ConflictError if the settings of a process (``Config.to_env``) differ from those of the run."""
    if required != found:
        raise ConflictError(
            differences(
                f"settings of {where}",
                required=env.by_field(required),
                found=env.by_field(found),
                fix="give every process of the run the same settings",
            )
        )
