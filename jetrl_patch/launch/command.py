"""``jetrl run``, ``jetrl verl``, ``jetrl openrlhf``: split, enable, say what was done, run."""

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

__all__ = ["COMMANDS", "main"]

COMMANDS = ("run", *PROGRAMS)


def _options() -> str:
    """A line for each option that is a setting's own, and one for all of them."""
    lines = [(FLAG, "FP8 on both sides; may also stand among ARGS, before a lone --")]
    for found in SETTINGS.values():
        if found.option is not None:
            lines.append((f"{found.flag} {found.option}".strip(), found.help))
    lines.append(("--set KEY=VALUE", f"any setting: {', '.join(SETTINGS)}"))
    return "\n".join(f"  {option:28} {text}" for option, text in lines)


USAGE = f"""\
usage: jetrl run [OPTIONS] (-m MODULE | SCRIPT) ARGS...
       jetrl verl [OPTIONS] ARGS...          the same as: jetrl run -m {PROGRAMS["verl"]}
       jetrl openrlhf [OPTIONS] ARGS...      the same as: jetrl run -m {PROGRAMS["openrlhf"]}

Run a program with the plugin on in every process of it. Without a precision the program runs as it is.

{_options()}
  -h, --help                   this text (behind `jetrl verl` and `jetrl openrlhf`: that of the program)

ARGS reach the program byte for byte. JETRL_* variables count as well; an option has the last word.
"""


def main(command: str, words: Sequence[str]) -> None:
    """Run the program of a command line; ``command`` is one of ``COMMANDS``.

    What goes wrong before it starts is one line and exit status 2; from then on everything is the program's own.
    """
    try:
        launch = split(command, words)
        if launch.help:
            print(USAGE, end="")
            return
        prepare(launch.target, launch.is_module)
        if _wanted(launch):
            _enable(launch.overrides)
    except JetrlError as error:
        print(f"jetrl: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(2)
    run(launch.target, launch.is_module, launch.arguments)


def _wanted(launch: Launch) -> bool:
    """Whether the plugin is asked for. Raises ConfigError for settings without a precision to which they belong."""
    if "precision" in launch.overrides:
        if env.switched_off():
            raise ConfigError(
                explain(
                    "jetrl",
                    required=f"precision {launch.overrides['precision']}",
                    found=f"{env.SWITCH}=0 in the environment, which switches the plugin off",
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
                found="no precision, so that nothing would be patched",
                fix="add --fp8-unified or --precision NAME",
            )
        )
    return False


def _enable(overrides: dict[str, Any]) -> None:
    """Patch this process and tell on stderr what stands: one line per patch; of several ranks only the first tells."""
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
