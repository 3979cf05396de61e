"""Write the tables of ``docs/configuration.md`` from ``Config``, the table of variables and verl's presets.

Run: ``python scripts/fill_configuration.py``. Tables stand between ``<!-- name -->`` and ``<!-- /name -->``; a test
compares them with what this script would write.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from pathlib import Path

from jetrl_patch import env
from jetrl_patch.adapters.verl.preset import PRESETS
from jetrl_patch.config import Config

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"

#: options of ``jetrl run``, ``verl``, ``openrlhf`` and ``doctor`` beside ``--set``
FLAGS = {
    "precision": "`--precision P`, `--fp8-unified`",
    "align": "`--align A`",
    "correction": "`--correction C`",
    "correction_bounds": "`--correction-bounds B`",
    "acr": "`--acr`",
}


def meanings() -> dict[str, str]:
    """Field -> what the docstring of ``Config`` says about it."""
    attributes = inspect.cleandoc(Config.__doc__ or "").partition("Attributes:\n")[2]
    entries = re.split(r"^    (\w+): ", attributes, flags=re.MULTILINE)
    found = {name: " ".join(text.split()).rstrip(".") for name, text in zip(entries[1::2], entries[2::2])}
    return {name: re.sub('``"?(.*?)"?``', r"`\1`", text) for name, text in found.items()}


def values(hint: object) -> str:
    """The allowed values of a field, in words."""
    literals = [part for part in (hint, *typing.get_args(hint)) if typing.get_origin(part) is typing.Literal]
    choices = [f"`{choice}`" for literal in literals for choice in typing.get_args(literal)]
    if choices:
        return ", ".join(choices)
    known = {tuple[str, ...]: "patterns", float: "number", float | None: "number", int: "whole number", bool: "`true`, `false`"}
    known[tuple[float, ...] | None] = "cap, or low and high"
    known[float | None] = "number"
    return known.get(hint, str(hint))  # type: ignore[call-overload]


def options() -> str:
    """One row for each field of ``Config``."""
    variables = {field: variable for variable, field in env.FIELDS.items()}
    hints, meaning = typing.get_type_hints(Config), meanings()
    lines = [
        "| setting | values | default | meaning | environment | verl's YAML | command line |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for field in dataclasses.fields(Config):
        name = field.name
        default = {"None": "not set", "()": "none"}.get(str(getattr(Config(), name)), f"`{getattr(Config(), name)}`")
        kind = values(hints[name])
        flag = f"{FLAGS[name]}, " if name in FLAGS else ""
        example = "a,b" if kind == "patterns" else "…"
        lines.append(
            f"| `{name}` | {kind} | {default} | {meaning[name]} | `{variables[name]}` | `jetrl.{name}` "
            f"| {flag}`--set {name}={example}` |"
        )
    return "\n".join(lines)


def variables() -> str:
    """The variables that are no field of ``Config``."""
    lines = ["| variable | meaning |", "| --- | --- |"]
    lines += [f"| `{name}` | {text} |" for name, text in env.VARIABLES.items() if name not in env.FIELDS]
    return "\n".join(lines)


def presets() -> str:
    """The presets of verl's hydra."""
    lines = ["| preset | sets |", "| --- | --- |"]
    for name, chosen in PRESETS.items():
        lines.append(f"| `+jetrl={name}` | {', '.join(f'`{k}: {v}`' for k, v in chosen.items())} |")
    return "\n".join(lines)


def filled(text: str) -> str:
    """The page with its tables written anew."""
    for name, table in (("options", options()), ("variables", variables()), ("presets", presets())):
        pattern = rf"<!-- {name} -->.*?<!-- /{name} -->"
        assert len(re.findall(pattern, text, flags=re.DOTALL)) == 1, name
        text = re.sub(pattern, lambda _, n=name, t=table: f"<!-- {n} -->\n{t}\n<!-- /{n} -->", text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
