"""``jetrl run``, ``jetrl verl`` and ``jetrl openrlhf``: parse the command line, enable the plugin, run the program."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from jetrl_patch import env
from jetrl_patch.config import SETTINGS
from jetrl_patch.errors import ConfigError, JetrlError, explain
from jetrl_patch.launch.arguments import FLAG, PROGRAMS, Launch, split
from jetrl_patch.launch.program import prepare, run
from jetrl_patch.launch.supported import program_problem

__all__ = ["COMMANDS", "main"]

COMMANDS = ("run", *PROGRAMS)


def _options() -> str:
    """The usage text's lines on options: one for each setting with an option of its own, and one for ``--set``."""
    lines = [(FLAG, "FP8 on both sides; can also be given among ARGS, before a lone --")]
    for found in SETTINGS.values():
        if found.option is not None:
            lines.append((f"{found.flag} {found.option}".strip(), found.help))
    lines.append(("--set KEY=VALUE", f"any setting: {', '.join(SETTINGS)}"))
    return "\n".join(f"  {option:28} {text}" for option, text in lines)


USAGE = f"""\
usage: jetrl run [OPTIONS] (-m MODULE | SCRIPT) ARGS...
       jetrl verl [OPTIONS] ARGS...          the same as: jetrl run -m {PROGRAMS["verl"]}
       jetrl openrlhf [OPTIONS] ARGS...      the same as: jetrl run -m {PROGRAMS["openrlhf"]}

Run a program with the plugin enabled in all its processes. Without a precision the program runs unpatched.

{_options()}
  -h, --help                   show this text (after `jetrl verl` or `jetrl openrlhf`: the program's help)

ARGS reach the program byte for byte. Options override JETRL_* variables.
"""


def main(command: str, words: Sequence[str]) -> None:
    """Run the program of a command line; ``command`` is one of ``COMMANDS``.

    An error before the program starts is printed on one line, with exit status 2. After that, output and exit status are
    the program's own.
    """
    try:
        launch = split(command, words)
        if launch.help:
            print(USAGE, end="")
            return
        prepare(launch.target, launch.is_module)
        if _wanted(launch):
            problem = program_problem(launch.target)
            if problem is not None:
                raise problem
            _enable(launch.overrides)
    except JetrlError as error:
        print(f"jetrl: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)
    run(launch.target, launch.is_module, launch.arguments)


def _wanted(launch: Launch) -> bool:
    """Whether the plugin is requested. Raises ConfigError for settings given without a precision."""
    if "precision" in launch.overrides:
        if env.switched_off():
            raise ConfigError(
                explain(
                    "jetrl",
                    required=f"precision {launch.overrides['precision']}",
                    found=f"{env.SWITCH}=0 in the environment, which disables the plugin",
                    fix="drop one of the two",
                )
            )
        return True
    if env.opted_in():
        return True
    if launch.overrides:
        raise ConfigError(
            explain(
                "jetrl",
                required=", ".join(f"{name}={value!r}" for name, value in launch.overrides.items()),
                found="no precision, so nothing would be patched",
                fix="add --fp8-unified or --precision NAME",
            )
        )
    return False


def _enable(overrides: dict[str, Any]) -> None:
    """Patch this process and list the patches on stderr, one per line. Of several ranks only rank 0 prints."""
    from jetrl_patch import runtime

    status = runtime.enable(**overrides)
    if os.environ.get("RANK", "0") != "0":
        return
    assert status.config is not None
    waiting = sum(patch.state == "waiting" for patch in status.patches)
    correction = "" if status.config.correction == "none" else f"correction {status.config.correction}, "
    lines = [
        f"jetrl: precision {status.config.precision}, align {status.config.resolved_align}, {correction}"
        f"{len(status.patches)} changes in process {status.pid}, of which {waiting} wait for an import"
    ]
    lines += [f"jetrl:   {patch.state:7}  {patch.target}" for patch in status.patches]
    print("\n".join(lines), file=sys.stderr, flush=True)
