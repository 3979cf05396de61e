"""What a package's sources say about a dotted name: whether it exists, and its signature. Nothing is imported.

The lookup follows re-exports, base classes and annotations of attributes. It finds, for example,
``vllm.config.VllmConfig.parallel_config.tensor_parallel_size``.
"""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterator
from pathlib import Path

#: the chain leaves the package, or its type is not annotated: the rest cannot be checked
OUTSIDE = "outside"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEEPEST = 12


class Sources:
    """The Python files of one package, in a wheel or in its installation folder."""

    def __init__(self, place: Path, package: str) -> None:
        self._package = package
        self._trees: dict[str, tuple[ast.Module, bool] | None] = {}
        if place.suffix == ".whl":
            self._wheel = zipfile.ZipFile(place)
            marks = (".data/purelib/", ".data/platlib/")
            self._names = {
                name.split(next((m for m in marks if m in name), "\0"))[-1]: name for name in self._wheel.namelist()
            }
        self._folder = None if place.suffix == ".whl" else place

    def _read(self, path: str) -> str | None:
        if self._folder is None:
            name = self._names.get(path)
            return None if name is None else self._wheel.read(name).decode(errors="replace")
        file = self._folder / path
        return file.read_text(errors="replace") if file.is_file() else None

    def module(self, dotted: str) -> tuple[ast.Module, bool] | None:
        """The parsed module, and whether it is a package; None if it does not exist."""
        if dotted.split(".")[0] != self._package:
            return None
        if dotted not in self._trees:
            base, found = dotted.replace(".", "/"), None
            for path, package in ((f"{base}/__init__.py", True), (f"{base}.py", False)):
                text = self._read(path)
                if text is not None:
                    found = ast.parse(text), package
                    break
            self._trees[dotted] = found
        return self._trees[dotted]

    def describe(self, target: str) -> str | None:
        """``module``, ``attribute``, a signature, or OUTSIDE; None if the name is missing."""
        parts = target.split(".")
        at = len(parts)
        while at and self.module(".".join(parts[:at])) is None:
            at -= 1
        if not at:
            return None
        module, rest = ".".join(parts[:at]), parts[at:]
        if not rest:
            return "module"
        found = self.find(module, rest[0])
        for attr in rest[1:]:
            if found is None or found is _ELSEWHERE:
                break
            found = self._step(*found, attr)
        if found is None:
            return None
        return OUTSIDE if found is _ELSEWHERE else self._words(*found)

    def _step(self, module: str, node: ast.AST | None, attr: str) -> _Found:
        if node is None:  # a module
            return self.find(module, attr)
        if isinstance(node, ast.ClassDef):
            return self._member(module, node, attr)
        kind = self._type_of(module, node)
        return _ELSEWHERE if kind is None else self._member(*kind, attr)

    def find(self, module: str, name: str, depth: int = 0) -> _Found:
        """Find a name of a module: ``(module, node)``, the node None for a submodule."""
        tree = self.module(module)
        if tree is None or depth > _DEEPEST:
            return None
        statements = list(_flat(tree[0].body))
        for node in statements:
            if (isinstance(node, (ast.ClassDef, *_FUNCTIONS)) and node.name == name) or name in _assigned(node):
                return module, node
        for node in statements:
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if alias.name == "*" or (alias.asname or alias.name) == name:
                        source = _absolute(module, tree[1], node)
                        if self.module(source) is None:
                            if alias.name != "*" and source.split(".")[0] != module.split(".")[0]:
                                return _ELSEWHERE
                            continue
                        found = self.find(source, name if alias.name == "*" else alias.name, depth + 1)
                        if found:
                            return found
            elif isinstance(node, ast.Import) and any((a.asname or a.name.split(".")[0]) == name for a in node.names):
                return _ELSEWHERE
        lazy = _lazily(statements, name)
        if lazy is not None:
            place, _, inner = lazy.partition(":")
            return self.find(module + place if place.startswith(".") else place, inner, depth + 1)
        return (f"{module}.{name}", None) if self.module(f"{module}.{name}") else None

    def _member(self, module: str, owner: ast.ClassDef, attr: str, depth: int = 0) -> _Found:
        for node in owner.body:
            if (isinstance(node, (ast.ClassDef, *_FUNCTIONS)) and node.name == attr) or attr in _assigned(node):
                return module, node
        for node in ast.walk(owner):  # self.attr = ...
            if any(t.attr == attr and _is_self(t.value) for t in _targets(node) if isinstance(t, ast.Attribute)):
                return module, node
        outside = False
        for base in owner.bases:
            kind = self._class(module, base)
            if kind is None:
                outside = outside or ast.unparse(base).split(".")[-1].split("[")[0] not in _PLAIN
                continue
            found = self._member(*kind, attr, depth + 1) if depth < _DEEPEST else None
            if found is _ELSEWHERE:
                outside = True
            elif found:
                return found
        return _ELSEWHERE if outside else None

    def _class(self, module: str, node: ast.AST) -> tuple[str, ast.ClassDef] | None:
        """The class that an annotation or a base names, if this package defines it."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        if isinstance(node, ast.BinOp):
            return self._class(module, node.left) or self._class(module, node.right)
        if isinstance(node, ast.Subscript):
            inner = (
                node.slice
                if ast.unparse(node.value).split(".")[-1] in ("Optional", "ClassVar", "Final")
                else node.value
            )
            return self._class(module, inner)
        if isinstance(node, (ast.Name, ast.Attribute)):
            found = self.find(module, ast.unparse(node).split(".")[-1] if isinstance(node, ast.Name) else node.attr)
            if found and found is not _ELSEWHERE and isinstance(found[1], ast.ClassDef):
                return found[0], found[1]
        return None

    def _type_of(self, module: str, node: ast.AST) -> tuple[str, ast.ClassDef] | None:
        if isinstance(node, ast.AnnAssign):
            return self._class(module, node.annotation)
        if isinstance(node, _FUNCTIONS) and node.returns is not None and "property" in _decorators(node):
            return self._class(module, node.returns)
        return None

    def _words(self, module: str, node: ast.AST | None) -> str:
        if node is None:
            return "module"
        if isinstance(node, ast.ClassDef):
            made = self._member(module, node, "__init__")
            if made and made is not _ELSEWHERE and isinstance(made[1], _FUNCTIONS):
                return f"class({parameters(made[1])})"
            return "class"
        if isinstance(node, _FUNCTIONS):
            kinds = [name for name in ("staticmethod", "classmethod") if name in _decorators(node)]
            if any("property" in name for name in _decorators(node)):
                return "attribute"
            if isinstance(node, ast.AsyncFunctionDef):
                kinds.append("async")
            return f"{' '.join([*kinds, 'def'])}({parameters(node)})"
        return "attribute"


_Found = tuple[str, "ast.AST | None"] | None
_ELSEWHERE: tuple[str, ast.AST | None] = ("", None)
#: bases outside the package that add no name the project could mean (members of nn.Module are left out by ``touched``)
_PLAIN = ("Module", "object", "ABC", "Protocol", "Generic", "Enum", "NamedTuple", "Exception", "RuntimeError")


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            for part in ("body", "orelse", "finalbody"):
                yield from _flat(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _flat(handler.body)


def _targets(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.Assign):
        return [inner for target in node.targets for inner in ast.walk(target)]
    return [node.target] if isinstance(node, ast.AnnAssign) else []


def _assigned(node: ast.AST) -> set[str]:
    return {target.id for target in _targets(node) if isinstance(target, ast.Name)}


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _decorators(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [ast.unparse(decorator).split("(")[0].split(".")[-1] for decorator in node.decorator_list]


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Names, kinds and which have a default, without annotations: ``self, a, b=, *, c=, **more``."""
    a = node.args
    places = [*a.posonlyargs, *a.args]
    plain = len(places) - len(a.defaults)
    found = [arg.arg + ("=" if i >= plain else "") for i, arg in enumerate(places)]
    if a.vararg or a.kwonlyargs:
        found.append(f"*{a.vararg.arg}" if a.vararg else "*")
    found += [arg.arg + ("" if default is None else "=") for arg, default in zip(a.kwonlyargs, a.kw_defaults)]
    return ", ".join([*found, *([f"**{a.kwarg.arg}"] if a.kwarg else [])])


def _absolute(module: str, package: bool, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".") if package else module.split(".")[:-1]
    return ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])


def _lazily(statements: list[ast.stmt], name: str) -> str | None:
    """The place of a name in a table such as vLLM's ``MODULE_ATTRS = {"LLM": ".entrypoints.llm:LLM"}``."""
    for node in statements:
        value = getattr(node, "value", None)
        if isinstance(value, ast.Dict):
            for key, place in zip(value.keys, value.values):
                text = getattr(place, "value", None)
                if isinstance(key, ast.Constant) and key.value == name and isinstance(text, str) and ":" in text:
                    return text
    return None
