"""Which names of vLLM, verl, OpenRLHF, TRL, transformers and Ray the project touches, read from its own code.

- imported names, and the attributes read from them;
- targets of patches and hooks, with the parameters of their replacements;
- members of framework classes: of annotated variables, of ``self`` in subclasses and in replaced methods;
- calls of all these, and overridden methods: their signatures must fit.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from jetrl_patch.patching.guards import Difference
from jetrl_patch.patching.patch import OnImport, Patch
from scripts.anchors.patches import ROOT, is_framework, patches
from scripts.anchors.source import parameters

#: extensions that vLLM makes a base of its worker's class (``worker_extension_cls``): their ``self`` is the worker
MIXED_IN = {
    "openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap": "vllm.v1.worker.gpu_worker.Worker",
    "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension": "vllm.v1.worker.gpu_worker.Worker",
}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass
class Touched:
    """Dotted names with the places that touch them.

    Attributes:
        names: must exist.
        calls: ``(target, positional arguments, keywords, complete)``; incomplete with ``*args`` or ``**kwargs``.
        accepts: ``(target, our parameters)`` of overrides and replacements. The target of an override may be missing.
        optional: overrides, and names whose absence ``compat`` handles.
        set_here: attributes that the project itself adds to objects of the framework.
    """

    names: dict[str, str] = field(default_factory=dict)
    calls: dict[tuple[str, int, tuple[str, ...], bool], str] = field(default_factory=dict)
    accepts: dict[tuple[str, str], str] = field(default_factory=dict)
    optional: dict[str, str] = field(default_factory=dict)
    set_here: set[str] = field(default_factory=set)

    def every(self) -> list[str]:
        """All targets, sorted."""
        return sorted({*self.names, *self.optional, *(c[0] for c in self.calls), *(a[0] for a in self.accepts)})


def differences() -> list[Difference]:
    """The differences that the adapters declare."""
    found: list[Difference] = []
    for file in sorted((ROOT / "adapters").glob("*/compat.py")):
        found += importlib.import_module(f"jetrl_patch.adapters.{file.parent.name}.compat").DIFFERENCES
    return found


@functools.cache
def touched() -> Touched:
    """Everything, from all product code."""
    found = Touched()
    for package in ("adapters", "jetrl_patch"):
        for file in sorted((ROOT / package).rglob("*.py")):
            if not file.is_relative_to(ROOT / "jetrl_patch" / "adapters"):
                _Reader(found, str(file.relative_to(ROOT)), ast.parse(file.read_text())).read()
    for patch, place in patches():
        found.names[patch.module if isinstance(patch, OnImport) else patch.target] = place
        if isinstance(patch, Patch):
            _replacement(found, patch, place)
    ours = {name for name in found.every() if "jetrl" in name or found.set_here & _members(name)}
    found.names = {name: place for name, place in found.names.items() if name not in ours}
    found.calls = {call: place for call, place in found.calls.items() if call[0] not in ours}
    for difference in differences():
        found.names.pop(difference.target, None)
        found.optional[difference.target] = "compat"
    return found


def _members(target: str) -> set[str]:
    """The parts of a dotted name after the class."""
    parts = target.split(".")
    return set(parts[next((i + 1 for i, part in enumerate(parts) if part[0].isupper()), len(parts)) :])


def _replacement(found: Touched, patch: Patch, place: str) -> None:
    """The function that replaces the target: its parameters, and what it reads from ``self``."""
    make: Any = patch.make.func if isinstance(patch.make, functools.partial) else patch.make
    body = getattr(make, "__wrapped__", None)  # of a function under ``@replacement``, whose first argument is the original
    make = make if body is None else body
    with contextlib.suppress(OSError, TypeError):
        tree = ast.parse(textwrap.dedent(inspect.getsource(make)))
        function: Any = tree.body[0]
        if body is None:
            wanted = patch.attr.split(".")[-1]  # often also the name of the outer function
            inner = [n for n in ast.walk(tree) if n is not function and getattr(n, "name", "") == wanted]
            function = next((n for n in inner if isinstance(n, _FUNCTIONS[:2])), None)
            if function is None:
                return
        else:
            del function.args.args[0]
        found.accepts[patch.target, parameters(function)] = place
        if "." in patch.attr and function.args.args:
            owner = f"{patch.module}.{patch.attr.rpartition('.')[0]}"
            reader = _Reader(found, place, ast.parse(Path(inspect.getsourcefile(make) or "").read_text()))
            reader.function(function, {function.args.args[0].arg: MIXED_IN.get(owner, owner)})


class _Reader:
    """Reads one file."""

    def __init__(self, found: Touched, place: str, tree: ast.Module) -> None:
        self.found, self.place, self.tree = found, place, tree
        self.alias: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for name in node.names:
                    if is_framework(node.module):
                        self.alias[name.asname or name.name] = f"{node.module}.{name.name}"
            elif isinstance(node, ast.Import):
                for name in node.names:
                    if is_framework(name.name):
                        bound = name.asname or name.name.split(".")[0]
                        self.alias[bound] = name.name if name.asname else bound
                        found.names.setdefault(name.name, place)
        for target in self.alias.values():
            found.names.setdefault(target, place)
        self.classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}

    def read(self) -> None:
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef):
                self.class_(node)
            else:
                self.visit(node, {})

    def class_(self, node: ast.ClassDef) -> None:
        base = self.base(node)
        own = self.own(node)
        for item in node.body:
            if base and isinstance(item, _FUNCTIONS[:2]):
                target = f"{base}.{item.name}"
                if (item.name != "__init__" and not hasattr(torch.nn.Module, item.name)) or item.name == "forward":
                    self.found.optional.setdefault(target, self.place)
                    self.found.accepts.setdefault((target, parameters(item)), self.place)
                first = item.args.args[0].arg if item.args.args else ""
                self.function(item, {first: f"{base}!{'|'.join(sorted(own))}"} if first in ("self", "cls") else {})
                continue
            if base and isinstance(item, ast.Assign) and getattr(getattr(item.value, "func", None), "id", "") == "constant":
                for name in item.targets:  # a method by ``patching.patch.constant``
                    self.found.optional.setdefault(f"{base}.{ast.unparse(name)}", self.place)
            self.visit(item, {})

    def base(self, node: ast.ClassDef) -> str:
        for expression in node.bases:
            target = self.chain(expression.value if isinstance(expression, ast.Subscript) else expression, {})
            if target:
                return target
            if isinstance(expression, ast.Name) and expression.id in self.classes and expression.id != node.name:
                inherited = self.base(self.classes[expression.id])
                if inherited:
                    return inherited
        return ""

    def own(self, node: ast.ClassDef) -> set[str]:
        """Names that our own class defines."""
        names = {item.name for item in node.body if isinstance(item, (*_FUNCTIONS[:2], ast.ClassDef))}
        for item in ast.walk(node):
            if isinstance(item, (ast.Assign, ast.AnnAssign)):
                for target in item.targets if isinstance(item, ast.Assign) else [item.target]:
                    for inner in ast.walk(target):
                        if isinstance(inner, ast.Attribute) and getattr(inner.value, "id", "") == "self":
                            names.add(inner.attr)
                        elif isinstance(inner, ast.Name) and item in node.body:
                            names.add(inner.id)
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in self.classes and base.id != node.name:
                names |= self.own(self.classes[base.id])
        return names

    def function(self, node: Any, env: dict[str, str]) -> None:
        env = dict(env)
        for arg in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
            if arg.annotation is not None:
                kind = self.annotated(arg.annotation)
                if kind:
                    env.setdefault(arg.arg, kind)
            if arg.arg not in env or arg.arg in self.alias:
                env.setdefault(arg.arg, "")  # hides an import of the same name
        for item in node.body if isinstance(node.body, list) else [node.body]:
            self.visit(item, env)

    def annotated(self, node: ast.AST) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        if isinstance(node, ast.BinOp):
            return self.annotated(node.left) or self.annotated(node.right)
        return self.chain(node, {}) if isinstance(node, (ast.Name, ast.Attribute)) else ""

    def visit(self, node: ast.AST, env: dict[str, str]) -> None:
        if isinstance(node, _FUNCTIONS):
            self.function(node, env)
        elif isinstance(node, ast.ClassDef):
            self.class_(node)
        elif isinstance(node, ast.If) and (narrowed := self.narrowed(node.test, env)):
            self.visit(node.test, env)
            for item in node.body:
                self.visit(item, narrowed)
            for item in node.orelse:
                self.visit(item, env)
        else:
            if isinstance(node, ast.Call):
                self.call(node, env)
            if isinstance(node, ast.Attribute) and (target := self.chain(node, env)):
                self.found.names.setdefault(target, self.place)
                return
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                self.assign(node, env)
            for child in ast.iter_child_nodes(node):
                self.visit(child, env)

    def narrowed(self, test: ast.AST, env: dict[str, str]) -> dict[str, str] | None:
        if (
            isinstance(test, ast.Call)
            and getattr(test.func, "id", "") == "isinstance"
            and isinstance(test.args[0], ast.Name)
        ):
            kind = self.chain(test.args[1], env)
            return {**env, test.args[0].id: kind} if kind else None
        return None

    def assign(self, node: ast.Assign | ast.AnnAssign, env: dict[str, str]) -> None:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            own = isinstance(target, ast.Attribute) and not self.chain(target, env)
            if own and isinstance(target.value, ast.Name) and target.value.id == "layer":
                self.found.set_here.add(target.attr)
            if node.value is None:
                continue
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts))
            for name, value in pairs:
                if isinstance(name, ast.Name):
                    known = isinstance(value, (ast.Attribute, ast.Name))
                    env[name.id] = self.chain(value, env) if known else ""

    def call(self, node: ast.Call, env: dict[str, str]) -> None:
        function, target = node.func, ""
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Call):
            inner = function.value
            if getattr(inner.func, "id", "") == "super" and not inner.args:  # the class of the enclosing method
                base = (env.get("self") or env.get("cls") or "").partition("!")[0]
                if base and not hasattr(torch.nn.Module, function.attr):
                    target = f"{base}.{function.attr}"
                    self.found.names.setdefault(target, self.place)
                elif base and function.attr == "__init__":
                    target = base
        else:
            target = self.chain(function, env)
        if target:
            complete = not any(isinstance(a, ast.Starred) for a in node.args) and all(k.arg for k in node.keywords)
            words = tuple(sorted(k.arg for k in node.keywords if k.arg))
            count = sum(not isinstance(a, ast.Starred) for a in node.args)
            self.found.calls.setdefault((target, count, words, complete), self.place)

    def chain(self, node: ast.AST, env: dict[str, str]) -> str:
        """The dotted target of a name or attribute that starts at a framework; empty for others."""
        if isinstance(node, ast.Name):
            found = env[node.id] if node.id in env else self.alias.get(node.id, "")
            return "" if "!" in found else found
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and "!" in env.get(node.value.id, ""):
                base, _, own = env[node.value.id].partition("!")
                mine = node.attr in own.split("|") or hasattr(torch.nn.Module, node.attr) or node.attr.startswith("__")
                return "" if mine else f"{base}.{node.attr}"
            inner = self.chain(node.value, env)
            return f"{inner}.{node.attr}" if inner and not node.attr.startswith("__") else ""
        return ""
