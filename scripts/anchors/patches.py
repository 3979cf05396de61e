"""The patches and hooks of all adapters, from their modules and their sources."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jetrl_patch._versions import SUPPORTED
from jetrl_patch.patching.patch import OnImport, Patch

ROOT = Path(__file__).resolve().parents[2]
FRAMEWORKS = tuple(name for name in SUPPORTED if name != "torch")


def is_framework(dotted: str) -> bool:
    """Whether a dotted name belongs to one of ``FRAMEWORKS``."""
    return dotted.split(".")[0] in FRAMEWORKS


def patches() -> Iterator[tuple[Patch | OnImport, str]]:
    """Every patch and hook in a module of the adapters, including those that a function constructs."""
    for file in sorted((ROOT / "adapters").rglob("*.py")):
        text = file.read_text()
        if ("Patch(" not in text and "OnImport(" not in text) or file.name == "base.py":
            continue
        place = str(file.relative_to(ROOT))
        module = importlib.import_module("jetrl_patch." + place.removesuffix(".py").replace("/", "."))
        for value in list(vars(module).values()):
            for patch in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(patch, (Patch, OnImport)) and is_framework(patch.module):
                    yield patch, place
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("Patch", "OnImport"):
                words = {k.arg: _constant(module, k.value) for k in node.keywords}
                words |= {name: _constant(module, value) for name, value in zip(("module", "attr"), node.args)}
                if words.get("module") and is_framework(words["module"]):
                    attr = words.get("attr") if node.func.id == "Patch" else ""
                    if attr:
                        yield Patch(words["module"], attr, make=lambda f: f, reason="", remove_when=""), place
                    elif node.func.id == "OnImport":
                        yield OnImport(words["module"], "", lambda m, j: None, ""), place


def _constant(module: Any, node: ast.AST) -> str:
    value = node.value if isinstance(node, ast.Constant) else getattr(module, getattr(node, "id", ""), "")
    return value if isinstance(value, str) else ""
