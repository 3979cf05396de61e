"""Run a program in this process, as ``python SCRIPT`` or ``python -m MODULE`` would.

Staying in this process keeps exit status, signals, standard streams and process id the program's own.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
import zipfile
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType

from jetrl_patch.errors import ConfigError, explain
from jetrl_patch.patching.guards import module_exists

__all__ = ["prepare", "run"]


def prepare(target: str, is_module: bool) -> None:
    """Put the program's folder first on ``sys.path``. Raises ConfigError if there is no such program.

    The check imports nothing.
    """
    if not getattr(sys.flags, "safe_path", False):  # with safe_path Python adds no folder
        folder = os.getcwd() if is_module else os.path.dirname(os.path.realpath(target))
        sys.path[0] = folder  # replaces the folder of the `jetrl` command
    if not is_module and not os.path.exists(target):
        raise ConfigError(explain("jetrl run", required=target, found="no such file", fix="give a script, or -m MODULE"))
    if is_module and not _module_exists(target):
        fix = "install it, or start from the folder that contains it"
        raise ConfigError(explain("jetrl run", required=f"-m {target}", found="no such module", fix=fix))


def run(target: str, is_module: bool, arguments: Sequence[str]) -> None:
    """Run the program as ``__main__``. Its exceptions, SystemExit included, propagate unchanged."""
    sys.argv[:] = [target, *arguments]
    if is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    elif os.path.isdir(target) or target.endswith(".pyc") or zipfile.is_zipfile(target):
        runpy.run_path(target, run_name="__main__")
    else:
        _run_script(target)


def _run_script(path: str) -> None:
    """Like ``runpy.run_path``, but with an absolute ``__file__``, as under ``python SCRIPT``; ``sys.argv[0]`` is as given."""
    main = ModuleType("__main__")
    main.__file__ = os.path.abspath(path)
    main.__loader__ = SourceFileLoader("__main__", main.__file__)
    main.__dict__.update(__builtins__=__builtins__, __cached__=None)
    with io.open_code(main.__file__) as file:
        code = compile(file.read(), main.__file__, "exec", dont_inherit=True)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _module_exists(name: str) -> bool:
    try:
        return module_exists(name)
    except (ImportError, ValueError):  # a name with empty parts
        return False
