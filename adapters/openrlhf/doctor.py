"""OpenRLHF's arguments, read by its own parser, for ``jetrl doctor``.

The parser, and the checks that follow it, stand under ``if __name__ == "__main__"`` of ``train_ppo_ray.py``. They are
taken from its syntax tree and run alone: no ``import`` of OpenRLHF (torch, Ray, DeepSpeed, vLLM) and no training.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jetrl_patch.doctor.folders import file_of
from jetrl_patch.errors import ConfigError

__all__ = ["asked_for", "model_path", "needs_flash_attn", "read"]


def read(arguments: Sequence[str]) -> Any:
    """The nested namespace that OpenRLHF's ``train`` would get.

    Raises ConfigError with the parser's message, or with that of a check of OpenRLHF's own.
    """
    path, tools = file_of("openrlhf", "cli", "train_ppo_ray.py"), file_of("openrlhf", "utils", "config.py")
    if path is None or tools is None:
        raise ConfigError("openrlhf has no cli/train_ppo_ray.py here; install openrlhf")
    tree = ast.parse(path.read_text())
    body = next(
        (node.body for node in tree.body if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)), []
    )
    cut = next((i for i, node in enumerate(body) if "parse_args()" in ast.unparse(node)), None)
    if cut is None:
        raise ConfigError(f"{path} has no argument parser under __main__: this version of openrlhf does not fit")
    names: dict[str, Any] = {}
    _execute([node for node in tree.body if _is_stdlib_import(node)] + body[:cut], names, path)
    flat = _parse_args(names["parser"], arguments)
    names["args"] = _load(tools).hierarchize(flat)
    checks = [node for node in body[cut + 1 :] if not _imports_or_trains(node)]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            _execute(checks, names, path)
    except AssertionError as error:
        raise ConfigError(f"OpenRLHF refuses its arguments: {' '.join(str(error).split())}") from error
    return names["args"]


def asked_for(args: Any, environ: Mapping[str, str]) -> None:
    """OpenRLHF's parser takes no argument of ours."""


def model_path(args: Any) -> tuple[str, str]:
    """Where the model is, and the argument that says so."""
    return str(args.actor.model_name_or_path), "--actor.model_name_or_path"


def needs_flash_attn(args: Any) -> str:
    """Which argument needs flash-attn on a GPU; empty if none does."""
    chosen = args.ds.attn_implementation
    if chosen.startswith("flash"):
        return f"--ds.attn_implementation {chosen}"
    return "--ds.packing_samples" if args.ds.packing_samples else ""


def _parse_args(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    def error(message: str) -> NoReturn:
        raise ConfigError(f"OpenRLHF's parser: {message}; see --help of openrlhf.cli.train_ppo_ray")

    parser.error = error  # type: ignore[method-assign]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return parser.parse_args(list(arguments))
    except SystemExit:
        raise ConfigError("the arguments ask for OpenRLHF's help; leave --help out") from None


def _execute(body: list[ast.stmt], names: dict[str, Any], path: Path) -> None:
    exec(compile(ast.Module(body, []), str(path), "exec"), names)


def _is_stdlib_import(node: ast.stmt) -> bool:
    if isinstance(node, ast.Import):
        return all(alias.name.split(".")[0] in sys.stdlib_module_names for alias in node.names)
    return isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in sys.stdlib_module_names


def _imports_or_trains(node: ast.stmt) -> bool:
    for inner in ast.walk(node):
        if isinstance(inner, (ast.Import, ast.ImportFrom)):
            return True
        if isinstance(inner, ast.Call) and ast.unparse(inner.func) in ("train", "hierarchize"):
            return True
    return False


def _load(path: Path) -> Any:
    """The module in a file that imports nothing of its package."""
    spec = importlib.util.spec_from_file_location("_openrlhf_" + path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
