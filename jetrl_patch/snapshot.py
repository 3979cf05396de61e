"""What stands in this process, as data and as a table for people."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jetrl_patch.config import Config

__all__ = ["PatchStatus", "Status"]


@dataclass(frozen=True)
class PatchStatus:
    """One change: its dotted target, whether it stands or waits for an import, why, and when it may go."""

    target: str
    state: Literal["applied", "waiting"]
    reason: str
    remove_when: str


@dataclass(frozen=True)
class Status:
    """A snapshot of one process. ``failure`` tells why an earlier session of the process fell.

    ``layers`` are in FP8 now; ``guarded`` were, until the precision guard took them out.
    """

    enabled: bool
    config: Config | None
    pid: int
    versions: Mapping[str, str] = field(default_factory=dict)
    patches: tuple[PatchStatus, ...] = ()
    layers: tuple[str, ...] = ()
    guarded: tuple[str, ...] = ()
    backend: str = ""
    failure: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain lists and dicts, for JSON or for another process."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        if not self.enabled:
            return f"jetrl_patch: off in process {self.pid}" + (f" ({self.failure})" if self.failure else "")
        assert self.config is not None
        config = self.config
        lines = [
            f"jetrl_patch: on in process {self.pid}",
            f"  precision {config.precision}, align {config.resolved_align}",
            f"  scales    {config.scale_format}, backend {self.backend}",
            "  versions  " + ", ".join(f"{name} {version}" for name, version in self.versions.items()),
            f"  layers    {len(self.layers)} in FP8"
            + (f", {self.layers[0]} to {self.layers[-1]}" if self.layers else ""),
            f"  patches   {len(self.patches)}",
        ]
        if self.guarded:
            lines.insert(-1, f"  guarded   {len(self.guarded)} in BF16 by the precision guard: {', '.join(self.guarded)}")
        width = max((len(patch.target) for patch in self.patches), default=0)
        for patch in self.patches:
            lines.append(f"    {patch.state:7}  {patch.target:{width}}  {patch.reason}")
        return "\n".join(lines)
