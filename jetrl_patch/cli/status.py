"""``jetrl status`` and ``jetrl doctor --status``: versions, what the environment asks for, and the patches it enables."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from jetrl_patch._versions import SUPPORTED
from jetrl_patch.config import SETTINGS, Config, environment
from jetrl_patch.native.machine import check_framework, check_python
from jetrl_patch.patching.guards import installed_version, is_installed
from jetrl_patch.patching.identity import identity

if TYPE_CHECKING:
    from jetrl_patch.snapshot import PatchStatus


def brief() -> int:
    """Print three lines. Returns 1 if an installed version is unsupported.

    Raises ConfigError for a wrong variable.
    """
    rows, config = _frameworks(), _asked()
    said: dict[str, list[str]] = {"ok": [], "unsupported": [], "not installed": []}
    for name, row in rows.items():
        said[row["state"]].append(name if row["found"] == "-" else f"{name} {row['found']}")
    print(f"jetrl_patch {identity()}, Python {check_python()[1]}")
    print("; ".join(f"{state}: {', '.join(names)}" for state, names in said.items() if names))
    print(_environment(config))
    return _exit_status(rows)


def full(as_json: bool) -> int:
    """Print the versions as a table, what the environment asks for, and counts of patches; or one JSON object with each patch.

    Returns and raises as ``brief``.
    """
    rows, config = _frameworks(), _asked()
    finding = ""
    planned: list[PatchStatus] = []
    if config is not None:
        from jetrl_patch.cli.doctor.checks import check_patches

        check, planned = check_patches(config)
        finding = check.finding
    if as_json:
        asked = None if config is None else dataclasses.asdict(config)
        patches = [dataclasses.asdict(patch) for patch in planned]
        print(json.dumps({"version": identity(), "frameworks": rows, "config": asked, "patches": patches}))
        return _exit_status(rows)
    console = Console(highlight=False)
    console.print(f"jetrl_patch {identity()}, Python {check_python()[1]}")
    versions = table("package", "supported", "tested", "installed", "")
    for name, row in rows.items():
        versions.add_row(name, row["required"], row["tested"], row["found"], row["state"])
    console.print(versions)
    console.print(_environment(config), soft_wrap=True)
    if config is not None:
        console.print(f"patches: {finding}", soft_wrap=True)
        fixes = sum(bool(patch.fixes) for patch in planned)
        console.print(f"{fixes} of them fix bugs of other projects; --json lists every patch with its reason", soft_wrap=True)
    return _exit_status(rows)


def _frameworks() -> dict[str, dict[str, str]]:
    """Package -> the supported range, the tested and the installed version, and whether that is supported."""
    rows = {}
    for name, (required, tested) in SUPPORTED.items():
        found, state = "-", "not installed"
        if is_installed(name):
            found, state = installed_version(name) or "unknown", "ok" if check_framework(name)[0] else "unsupported"
        rows[name] = {"required": required, "tested": tested, "found": found, "state": state}
    return rows


def _asked() -> Config | None:
    environment.check_names()
    return Config.from_env() if environment.opted_in() else None


def _environment(config: Config | None) -> str:
    """What the environment asks for: the settings without a default value."""
    if config is None:
        why = f"{environment.SWITCH}=0" if environment.switched_off() else f"no {SETTINGS['precision'].variable}"
        return f"off: {why} in the environment"
    defaults = Config(precision=config.precision)
    changed = [
        f"{name} {getattr(config, name)}"
        for name in SETTINGS
        if name != "align" and getattr(config, name) != getattr(defaults, name)
    ]
    return ", ".join((f"on: precision {config.precision}", f"align {config.resolved_align}", *changed))


def _exit_status(rows: dict[str, dict[str, str]]) -> int:
    return 1 if any(row["state"] == "unsupported" for row in rows.values()) else 0


def table(*columns: str, title: str | None = None) -> Table:
    """A table in which only the last column wraps."""
    made = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for column in columns[:-1]:
        made.add_column(column, no_wrap=True)
    made.add_column(columns[-1], overflow="fold")
    return made
