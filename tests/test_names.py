"""Every name that a file takes from a module of the project exists there, in files too that only a GPU or a long command runs."""

from __future__ import annotations

import ast
import functools
import subprocess
from collections.abc import Iterator
from pathlib import Path

from scripts.house import sources

ROOT = Path(__file__).resolve().parents[1]
#: packages of the repository, besides the product's
OTHERS = ("benchmarks", "examples", "scripts", "tests")


@functools.cache
def modules() -> dict[str, Path]:
    """Dotted name -> file."""
    found = sources(ROOT)
    for folder in OTHERS:
        for path in (ROOT / folder).rglob("*.py"):
            found[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module's body, in blocks too, without those of functions and classes."""
    for node in body:
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            parts = ast.iter_child_nodes(node)
            yield from statements([part for part in parts if isinstance(part, (ast.stmt, ast.excepthandler))])


@functools.cache
def defined(module: str) -> frozenset[str]:
    """The names that a module binds, and its submodules."""
    found = {name.rpartition(".")[2] for name in modules() if name.rpartition(".")[0] == module}
    for node in statements(ast.parse(modules()[module].read_text()).body) if module in modules() else ():
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update(alias.asname or alias.name.split(".")[0] for alias in node.names)
        else:
            found.update(part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store))
    return frozenset(found)


def missing(source: str) -> list[str]:
    """What a file takes from modules of the project that do not have it."""
    tree, found, taken = ast.parse(source), [], {}
    for node in ast.walk(tree):
        module = (isinstance(node, ast.ImportFrom) and node.module) or ""
        for alias in node.names if module in modules() or module.startswith("jetrl_patch") else ():
            if alias.name in defined(module):
                taken.setdefault(alias.asname or alias.name, set()).add(f"{module}.{alias.name}")
            elif "__getattr__" not in defined(module):
                found.append(f"{module}.{alias.name}")
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and isinstance(node.ctx, ast.Load):
            names = taken.get(node.value.id, set()) if node.value.id not in bound else set()
            known = [defined(name) for name in names]
            if names and names <= modules().keys() and not any({node.attr, "__getattr__"} & own for own in known):
                found += [f"{name}.{node.attr}" for name in sorted(names) if not node.attr.startswith("__")]
    return found


def test_every_name_exists() -> None:
    files = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    wrong = {file: found for file in files if (found := missing((ROOT / file).read_text()))}
    assert wrong == {}


def test_a_name_that_has_moved_is_found() -> None:
    source = "from jetrl_patch.exact import attention, nowhere\nattention.mark(1)\nattention.attention_varlen()\n"
    assert missing(source) == ["jetrl_patch.exact.nowhere", "jetrl_patch.exact.attention.mark"]
    assert missing("from jetrl_patch.exact import attention\ndef f(attention):\n    attention.mark()\n") == []
