"""Findings as data, and the verdict on all of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from jetrl_patch.config import Config
from jetrl_patch.errors import split_fix
from jetrl_patch.snapshot import PatchStatus

__all__ = ["Check", "Report", "from_error"]

State = Literal["ok", "warning", "problem", "skipped"]


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: what was checked, in a word or two.
        state: "problem" stops a run, "warning" does not, "skipped" was not checked.
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
    def problems(self) -> int:
        """Number of checks that stop a run."""
        return sum(check.state == "problem" for check in self.checks)

    @property
    def verdict(self) -> str:
        """Whether a run would start, in one line."""
        number = self.problems
        if not number:
            return "a run would start"
        return f"a run would NOT start: {number} problem{'s' if number > 1 else ''}"

    def as_dict(self) -> dict[str, Any]:
        """Plain lists and dicts, for JSON."""
        return {
            "verdict": self.verdict,
            "starts": self.problems == 0,
            "config": None if self.config is None else dataclasses.asdict(self.config),
            "checks": [dataclasses.asdict(check) for check in self.checks],
            "patches": [dataclasses.asdict(patch) for patch in self.patches],
        }


def from_error(name: str, error: BaseException) -> Check:
    """A problem from a JetrlError, whose last part says what to do (see ``errors.split_fix``)."""
    return Check(name, "problem", *split_fix(str(error)))
