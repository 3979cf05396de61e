"""``jetrl run``, ``jetrl verl`` and ``jetrl openrlhf``: parse the command line, enable the plugin, run the program."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shutil
import sys
import zipfile
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any, NoReturn

from jetrl_patch import registry
from jetrl_patch.config import SETTINGS, Config, environment
from jetrl_patch.config.arguments import FLAG, Launch, split
from jetrl_patch.config.environment import written
from jetrl_patch.config.fields import FIRST, GROUPS, SWITCH
from jetrl_patch.errors import ConfigError, JetrlError, explain, reading
from jetrl_patch.patching.guards import module_exists

# ---- Refuse a program of a training framework that the plugin does not support ------------------

def program_problem(target: str) -> JetrlError | None:
    """Return the error for an unsupported program of a framework's package; None for any other program.

    ``target`` is the dotted name of a module or the path of a script. This imports only the framework's adapter.
    """
    parts = re.split(r"[./\\\\]", target)
    framework = next((name for name in registry.programs() if name in parts), None)
    launches = registry.resolve(framework).launches() if framework else None
    return launches.program_problem(target) if launches is not None else None


# ---- Run a program in this process, as ``python SCRIPT`` or ``python -m MODULE`` would -----------
# Staying in this process keeps exit status, signals, standard streams and process id the program's own.

def prepare(target: str, is_module: bool) -> None:
    """Put the program's folder first on ``sys.path``. Raises ConfigError if there is no such module; imports nothing."""
    if not getattr(sys.flags, "safe_path", False):  # with safe_path Python adds no folder
        folder = os.getcwd() if is_module else os.path.dirname(os.path.realpath(target))
        sys.path[0] = folder  # replaces the folder of the `jetrl` command
    exists = not is_module
    with contextlib.suppress(ImportError, ValueError):  # ValueError: a name with empty parts
        exists = exists or module_exists(target)
    if not exists:
        fix = "install it, or start from the folder that contains it"
        raise ConfigError(explain("jetrl run", required=f"-m {target}", found="no such module", fix=fix))


#: how the names of shell scripts end
_SHELL = (".sh", ".bash", ".zsh", ".ksh")


def as_command(target: str) -> tuple[str, ...]:
    """The words that start a target that Python does not run: a shell script, or a command on the PATH. Empty for a program.

    Raises ConfigError if there is no such file or command.
    """
    if not os.path.exists(target):
        found = shutil.which(target)
        if found is None:
            fix = "give a script, a command, or -m MODULE"
            raise ConfigError(explain("jetrl run", required=target, found="no such file", fix=fix))
        return (found,)
    if not os.path.isfile(target):
        return ()
    with reading(target), open(target, "rb") as file:
        first = file.readline(200)
    if not target.endswith(_SHELL) and not (first.startswith(b"#!") and first.rstrip().endswith(b"sh")):
        return ()
    runs = first.startswith(b"#!") and os.access(target, os.X_OK)
    return (os.path.abspath(target),) if runs else ("bash", target)


def execute(command: Sequence[str], arguments: Sequence[str], overrides: dict[str, Any], wanted: bool) -> NoReturn:
    """Become a command. Its settings are ``JETRL_*`` variables, by which every process that imports torch is patched."""
    environ = dict(os.environ)
    if wanted:
        from jetrl_patch import session

        config = Config.given(None, overrides).resolved()
        session.preview(config)
        environ = {**environment.without_settings(), **config.to_env()}
        what = f"what {os.path.basename(command[-1])} starts is patched where it imports torch"
        _say(f"jetrl: precision {config.precision}, align {config.resolved_align}; {what}")
    sys.stdout.flush()
    os.execvpe(command[0], [*command, *arguments], environ)


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


# ---- The command line ----------------------------------------------------------------------------

def _options() -> str:
    """The usage text's lines on options: one for each setting with an option of its own, and one for ``--set``."""
    lines = {FLAG: "FP8 on both sides; can also be given among ARGS, before a lone --"}
    lines |= {f"{s.flag} {s.option}".strip(): s.help for s in SETTINGS.values() if s.option is not None}
    lines["--set KEY=VALUE"] = "any setting"
    return "\n".join(f"  {option:28} {text}" for option, text in lines.items())


def _settings() -> str:
    """The usage text's lines on settings: first the main ones with values and defaults, then the others by group."""
    lines = []
    for name in FIRST:
        found = SETTINGS[name]
        default = str(found.default).lower() if found.form is SWITCH else written(found.default) or "by precision"
        lines.append(f"  {name:28} {', '.join(found.choices) or found.form.values.replace('`', '')} (default: {default})")
    lines.append("and by group:")
    for group in GROUPS:
        names = [name for name, found in SETTINGS.items() if found.group == group and name not in FIRST]
        lines.append(f"  {group:28} {', '.join(names)}")
    return "\n".join(lines)


def usage() -> str:
    """The text that ``jetrl run --help`` prints."""
    programs = registry.programs()
    lines = [f"{f'jetrl {name} [OPTIONS] ARGS...':37} the same as: jetrl run -m {module}" for name, module in programs.items()]
    also = "\n       ".join(lines)
    return f"""\
usage: jetrl run [OPTIONS] (-m MODULE | SCRIPT | COMMAND) ARGS...
       {also}

Run a program, a shell script or any other command with the plugin enabled in all its processes. Without a precision it runs
unpatched.

{_options()}
  -h, --help                   show this text; the program's own: python -m MODULE --help

settings to decide on first:
{_settings()}
docs/configuration.md explains each.

ARGS reach the program byte for byte. Options override JETRL_* variables.
"""


def main(command: str, words: Sequence[str]) -> None:
    """Run the program of a command line; ``command`` is "run" or a training framework.

    An error before the program starts is printed on one line, with exit status 2. After that, output and exit status are
    the program's own.
    """
    try:
        with environment.only_looking():  # the options decide, too
            launch = split(command, words, registry.programs())
            if launch.help:
                print(usage(), end="")
                return
            _start(launch)
    except JetrlError as error:
        print(f"jetrl: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)
    run(launch.target, launch.is_module, launch.arguments)


def _start(launch: Launch) -> None:
    """Check a launch and enable the plugin if it asks for it. Does not return if the target is a command."""
    shell = () if launch.is_module else as_command(launch.target)
    wanted = _wanted(launch)
    if shell:
        if not wanted:
            _say_unpatched(launch)
        execute(shell, launch.arguments, launch.overrides, wanted)
    prepare(launch.target, launch.is_module)
    if wanted:
        problem = program_problem(launch.target)
        if problem is not None:
            raise problem
        _enable(launch.overrides)
    else:
        _say_unpatched(launch)


def _wanted(launch: Launch) -> bool:
    """Whether the plugin is requested. Raises ConfigError for settings without a precision, and for unknown variables."""
    if "precision" in launch.overrides:
        if environment.switched_off():
            required = f"precision {launch.overrides['precision']}"
            found = f"{environment.SWITCH}=0 in the environment, which disables the plugin"
            raise ConfigError(explain("the command line", required=required, found=found, fix="drop one of the two"))
        return True
    if not environment.switched_off():
        environment.check_names()
    if environment.opted_in():
        return True
    if launch.overrides:
        required = ", ".join(f"{name}={value!r}" for name, value in launch.overrides.items())
        found, fix = "no precision, so nothing would be patched", "add --fp8-unified or --precision NAME"
        raise ConfigError(explain("the command line", required=required, found=found, fix=fix))
    return False


def _say_unpatched(launch: Launch) -> None:
    """Print that nothing is patched, and why."""
    missing = f"no {FLAG}, no --precision and no {SETTINGS['precision'].variable}"
    why = f"{environment.SWITCH}=0" if environment.switched_off() else missing
    # a framework's own configuration may ask for the plugin
    theirs = [name for name, main in registry.programs().items() if main == launch.target and registry.resolve(name).has_section]
    unless = "".join(f", unless {name}'s configuration has a jetrl section" for name in theirs)
    _say(f"jetrl: {why}, so nothing is patched{unless}")


def _enable(overrides: dict[str, Any]) -> None:
    """Patch this process, and say in one line with which settings."""
    from jetrl_patch import session

    status = session.enable(**overrides)
    assert status.config is not None
    waiting = sum(patch.state == "waiting" for patch in status.patches)
    correction = "" if status.config.correction == "none" else f"correction {status.config.correction}, "
    _say(
        f"jetrl: precision {status.config.precision}, align {status.config.resolved_align}, {correction}"
        f"{len(status.patches)} changes in process {status.pid}, of which {waiting} wait for an import "
        "(jetrl_patch.status() lists them)"
    )


def _say(line: str) -> None:
    """Print on stderr. Of several ranks only rank 0 prints."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)
