"""Write the tables of ``docs/configuration.md`` from the settings, the environment variables, verl's presets and the patches.

Run: ``python -m scripts.fill_configuration``. Tables go between ``<!-- name -->`` and ``<!-- /name -->``. A test compares them
with this script's output.
"""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.harness import filled
from jetrl_patch import session
from jetrl_patch.adapters.verl.preset import PRESETS
from jetrl_patch.config import SETTINGS, Config, environment
from jetrl_patch.config.arguments import FLAG
from jetrl_patch.config.fields import GROUPS, Setting

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"

#: between them these apply every fix
_FIXED = (Config(precision="bf16", correction="mis", platform="cpu", upstream_fixes=True), Config(platform="cpu"))

_HEAD = (
    "| setting | values | default | meaning | environment | verl's YAML | command line |\n"
    "| --- | --- | --- | --- | --- | --- | --- |"
)


def meanings() -> dict[str, str]:
    """Field -> its description."""
    return {name: found.doc for name, found in SETTINGS.items()}


def row(found: Setting) -> str:
    """One line of a table."""
    default = {"None": "not set", "()": "none"}.get(str(found.default), f"`{found.default}`")
    options = [] if found.option is None else [f"`{f'{found.flag} {found.option}'.strip()}`"]
    options += [f"`{FLAG}`"] if found.name == "precision" else []
    options.append(f"`--set {found.name}={found.form.example}`")
    return (
        f"| `{found.name}` | {found.values} | {default} | {found.doc} | `{found.variable}` | `jetrl.{found.name}` "
        f"| {', '.join(options)} |"
    )


def options() -> str:
    """One table per group of settings."""
    parts = []
    for group, about in GROUPS.items():
        rows = [row(found) for found in SETTINGS.values() if found.group == group]
        parts.append("\n".join([f"### {group.capitalize()}", "", about, "", _HEAD, *rows]))
    return "\n\n".join(parts) + "\n"


def variables() -> str:
    """The variables that are not fields of ``Config``."""
    lines = ["| variable | meaning |", "| --- | --- |"]
    lines += [f"| `{name}` | {text} |" for name, text in environment.VARIABLES.items() if name not in environment.FIELDS]
    return "\n".join(lines)


def presets() -> str:
    """The Hydra presets for verl."""
    lines = ["| preset | sets |", "| --- | --- |"]
    for name, chosen in PRESETS.items():
        lines.append(f"| `+jetrl={name}` | {', '.join(f'`{k}: {v}`' for k, v in chosen.items())} |")
    return "\n".join(lines)


def fixes() -> str:
    """The fixes for bugs of other projects. Fixes with one reason share a row."""
    found: dict[tuple[str, ...], dict[str, None]] = {}
    for patch in (patch for config in _FIXED for patch in session.preview(config)):
        if patch.fixes:
            row = (patch.fixes, patch.reason, _thread(patch.upstream), patch.needed_by)
            found.setdefault(row, {})[f"`{patch.target}`"] = None
    lines = ["| fixed | bug of | what goes wrong without it | thread | always on for |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| {'<br>'.join(targets)} | {' | '.join(row)} |" for row, targets in found.items()]
    return "\n".join(lines)


def _thread(upstream: str) -> str:
    """A link as ``[vllm#8933](…)``; any other text unchanged."""
    match = re.fullmatch(r"https://github\.com/[\w-]+/([\w-]+)/(?:issues|pull)/(\d+)", upstream)
    return upstream if match is None else f"[{match[1]}#{match[2]}]({upstream})"


def page(text: str) -> str:
    """The page with its tables rewritten."""
    return filled(text, {"options": options(), "variables": variables(), "presets": presets(), "upstream-fixes": fixes()})


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
