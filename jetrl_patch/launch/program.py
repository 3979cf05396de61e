"""Running a program in this process as ``python SCRIPT`` and ``python -m MODULE`` would.

In this process, because then exit status, signals, standard streams and process id are the program's own.
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
    """Put the program's folder at the head of ``sys.path``, and raise ConfigError if there is no such program.

    Nothing is imported to find that out.
    """
    if not getattr(sys.flags, "safe_path", False):  # else Python has put no folder there
        folder = os.getcwd() if is_module else os.path.dirname(os.path.realpath(target))
        sys.path[0] = folder  # until now the folder of the `jetrl` command
    if not is_module and not os.path.exists(target):
        raise ConfigError(explain("jetrl run", required=target, found="no such file", fix="give a script, or -m MODULE"))
    if is_module and not _module_exists(target):
        fix = "install it, or start from the folder that holds it"
        raise ConfigError(explain("jetrl run", required=f"-m {target}", found="no such module", fix=fix))


def run(target: str, is_module: bool, arguments: Sequence[str]) -> None:
    """Run it as ``__main__``. What it raises, SystemExit included, comes out of here as it is."""
    sys.argv[:] = [target, *arguments]
    if is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    elif os.path.isdir(target) or target.endswith(".pyc") or zipfile.is_zipfile(target):
        runpy.run_path(target, run_name="__main__")
    else:
        _run_script(target)


def _run_script(path: str) -> None:
    """As ``runpy.run_path``, but ``__file__`` is absolute, as it is under ``python SCRIPT``; sys.argv[0] is as given."""
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
