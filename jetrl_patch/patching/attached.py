"""A value on a framework's own object, where the framework leaves no other place for it."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Attached(Generic[T]):
    """An attribute for such values.

    Prefer an argument, a subclass or a table of your own. Use this if the framework owns the object and every call between the
    code that knows the value and the code that needs it.

    Args:
        name: of the attribute.
        why: why no argument can carry the value. For readers, and ``repr``.
    """

    def __init__(self, name: str, why: str) -> None:
        self.name, self.why = name, why

    def __repr__(self) -> str:
        return f"Attached({self.name!r}: {self.why})"

    def set(self, holder: Any, value: T) -> None:
        """Set it on ``holder``. A torch module does not register it: no second parameter, buffer or submodule."""
        object.__setattr__(holder, self.name, value)

    def get(self, holder: Any) -> T | None:
        """Its value on ``holder``; None if it was not set."""
        found: T | None = getattr(holder, self.name, None)
        return found
