"""Findings as data, and the verdict on all of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from jetrl_patch.config import Config
from jetrl_patch.errors import split_fix
from jetrl_patch.snapshot import PatchStatus

__all__ = ["Check", "Report", "from_error"]

State = Literal["ok", "warning", "unknown", "problem", "skipped"]
#: verdict -> exit status
STATUS = {True: 0, False: 1, None: 2}


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: what was checked, in a word or two.
        state: "problem" stops a run, "unknown" may stop it and could not be checked, "warning" does not stop it, "skipped" does
            not concern it.
        finding: what was found.
        to_do: what to do about it; empty if nothing.
    """

    name: str
    state: State
    finding: str
    to_do: str = ""


@dataclass
class Report:
    """All results."""

    config: Config | None = None
    checks: list[Check] = field(default_factory=list)
    patches: list[PatchStatus] = field(default_factory=list)

    @property
    def starts(self) -> bool | None:
        """Whether a run would start; None if that cannot be told from here. What is sure to stop it goes first."""
        states = {check.state for check in self.checks}
        return False if "problem" in states else None if "unknown" in states else True

    @property
    def status(self) -> int:
        """The exit status: 0 if a run would start, 1 if not, 2 if that cannot be told."""
        return STATUS[self.starts]

    @property
    def verdict(self) -> str:
        """Whether a run would start, in one line."""
        if self.starts:
            return "a run would start"
        if self.starts is None:
            number = self._count("unknown")
            return f"cannot tell whether a run would start: {number} thing{_s(number)} could not be checked"
        number = self._count("problem")
        return f"a run would NOT start: {number} problem{_s(number)}"

    def _count(self, state: State) -> int:
        return sum(check.state == state for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Plain lists and dicts, for JSON."""
        return {
            "verdict": self.verdict,
            "starts": self.starts,
            "config": None if self.config is None else dataclasses.asdict(self.config),
            "checks": [dataclasses.asdict(check) for check in self.checks],
            "patches": [dataclasses.asdict(patch) for patch in self.patches],
        }


def from_error(name: str, error: BaseException) -> Check:
    """A problem from a JetrlError, whose last part says what to do (see ``errors.split_fix``)."""
    return Check(name, "problem", *split_fix(str(error)))


def _s(number: int) -> str:
    return "" if number == 1 else "s"
