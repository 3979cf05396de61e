"""Where the supported versions of a framework differ, as data.

Each adapter keeps its differences in one module, ``compat``: what it does about each, and a ``Difference`` that names the
version that ends it. Tests look every one up in the frameworks' wheels, and fail once the oldest supported version is past it.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Difference"]


@dataclass(frozen=True)
class Difference:
    """One name that only some of the supported versions have.

    Attributes:
        target: the dotted name, such as ``vllm.config.PassConfig.enable_sp``.
        changed_in: the first release on the other side of the change.
        added: whether that release added the name. Otherwise it removed it.
        handled: what the adapter does where the name is missing.
    """

    target: str
    changed_in: str
    added: bool
    handled: str

    @property
    def framework(self) -> str:
        """The top-level package of the target."""
        return self.target.partition(".")[0]
