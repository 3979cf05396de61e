"""The status of one process, as data and as a readable table: what ``jetrl_patch.status()`` returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jetrl_patch.config import Config
from jetrl_patch.models.structure import units
from jetrl_patch.patching.patch import OnImport, Patch


@dataclass(frozen=True)
class PatchStatus:
    """One change.

    Attributes:
        state: "applied", or "waiting" for the import of its module.
        target, reason, remove_when, upstream, fixes, needed_by: those of the ``Patch``.
    """

    target: str
    state: Literal["applied", "waiting"]
    reason: str
    remove_when: str
    upstream: str = ""
    fixes: str = ""
    needed_by: str = ""

    @classmethod
    def of(cls, what: Patch | OnImport, state: Literal["applied", "waiting"]) -> PatchStatus:
        """The status of a planned change."""
        return cls(what.target, state, what.reason, what.remove_when, what.upstream, what.fixes, what.needed_by)


@dataclass(frozen=True)
class Status:
    """A snapshot of one process.

    Attributes:
        enabled: whether the process is patched.
        config: the active settings; None if it is not patched.
        pid: the process id.
        versions: framework -> installed version; ``jetrl_patch`` -> version and digest of the sources.
        patches: the changes, applied or waiting.
        layers: names of the layers in FP8.
        cut: names of the layers in BF16 because the rollout's tensor parallelism cuts one of their blocks (``on_cut``).
        guarded: names of the layers that the precision guard took out of FP8.
        backend: the GEMM backend.
        attention: the exact attention, if it is not the backend's own; else empty.
        failure: why the last session of the process failed; empty if it did not.
    """

    enabled: bool
    config: Config | None
    pid: int
    versions: Mapping[str, str] = field(default_factory=dict)
    patches: tuple[PatchStatus, ...] = ()
    layers: tuple[str, ...] = ()
    cut: tuple[str, ...] = ()
    guarded: tuple[str, ...] = ()
    backend: str = ""
    attention: str = ""
    failure: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain dicts, tuples and text, for JSON or another process."""
        return dataclasses.asdict(self)

    @property
    def upstream_fixes(self) -> tuple[PatchStatus, ...]:
        """The fixes for other projects' bugs among ``patches``."""
        return tuple(patch for patch in self.patches if patch.fixes)

    def __str__(self) -> str:
        config = self.config
        if config is None:
            return f"jetrl_patch: off in process {self.pid}" + (f" ({self.failure})" if self.failure else "")
        lines = [
            f"jetrl_patch: on in process {self.pid}",
            f"  precision {config.precision}, align {config.resolved_align}",
            f"  scales    {config.scale_format}, backend {self.backend}" + f", attention {self.attention}" * bool(self.attention),
            "  versions  " + ", ".join(f"{name} {version}" for name, version in self.versions.items()),
            f"  layers    {len(self.layers)} in FP8" + (f", {self.layers[0]} to {self.layers[-1]}" if self.layers else ""),
        ]
        if self.cut:
            lines.append(f"  cut       {len(self.cut)} in BF16, on_cut={config.on_cut!r}: {', '.join(self.cut)}")
        if self.guarded:
            lines.append(f"  guarded   {len(self.guarded)} in BF16 by the precision guard: {', '.join(units(self.guarded))}")
        own = [patch for patch in self.patches if not patch.fixes]
        width = max((len(patch.target) for patch in self.patches), default=0)
        lines.append(f"  patches   {len(own)}")
        lines += [f"    {patch.state:7}  {patch.target:{width}}  {patch.reason}" for patch in own]
        fixes = self.upstream_fixes
        lines.append(f"  upstream  {len(fixes)} fixes for bugs of other projects, upstream_fixes={config.fixes_upstream}")
        lines += [f"    {p.state:7}  {p.target:{width}}  {p.fixes}: {p.reason} ({p.upstream})" for p in fixes]
        return "\n".join(lines)
