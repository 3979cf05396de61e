"""Run a framework's example scripts with stubs in PATH, and collect the launches that they would make.

A script runs in a copy of its folder, with its own HOME, only stubs and read-only tools in PATH, and a time limit. Shell
redirections are not stubbed: a script that redirects to an absolute path writes there.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.official import stubs

__all__ = ["Expansion", "Launch", "expand", "find", "without_place"]

#: seconds for one script; with stubs it needs only a few
LIMIT = 60.0
_TEXT = (".sh", ".py", ".yaml", ".yml", ".json", ".jinja", ".txt", ".toml")
#: a placeholder that the user must fill in, which is a shell syntax error until then
_PLACEHOLDER = re.compile(r"=<([A-Z_]+)>")
#: bash's message about a variable that the user must set: from ``set -u`` or ``${NAME:?text}``
_UNSET = re.compile(r"line \d+: (\w+): (?:unbound variable|.*\bset\b)")
#: what a user would set; other variables that a script asks for become paths
_ANSWERS = {"INFER_BACKEND": "vllm", "KIMI_K2_6_MODEL_PATH": "moonshotai/Kimi-K2.6"}
#: arguments for a script that fails without any: number of GPUs, folder of checkpoints
_ARGUMENTS = ("8", "checkpoints")


@dataclass(frozen=True)
class Launch:
    """One command that starts a training.

    Attributes:
        script: path of the script below the folder of scripts.
        number: which launch of the script, from 1.
        command: the words of the command.
        environ: what the script exports.
    """

    script: str
    number: int
    command: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.script if self.number == 1 else f"{self.script} (launch {self.number})"

    @property
    def own_environment(self) -> bool:
        """Whether ``uv run`` starts it in uv's own environment."""
        return self.command[0] == "uv"


@dataclass(frozen=True)
class Expansion:
    """The launches of one script.

    Attributes:
        failure: why the script did not finish; empty if it did.
    """

    script: str
    launches: tuple[Launch, ...]
    failure: str = ""


def find(folder: Path) -> list[Path]:
    """The scripts of a folder, or of its ``examples`` if it is a whole checkout, in order."""
    inner = folder / "examples"
    return sorted((inner if inner.is_dir() else folder).rglob("*.sh"))


def expand(
    folder: Path, workplace: Path, environ: Mapping[str, str] | None = None, limit: float = LIMIT
) -> list[Expansion]:
    """Run all scripts of a checkout; return what they would launch.

    Args:
        workplace: an empty folder; launches may name files in it.
        environ: variables that the scripts read, besides PATH and HOME.
    """
    found = find(folder)
    if not found:
        raise FileNotFoundError(f"{folder}: no script (*.sh) in it or in its folder examples. Name a checkout.")
    tree, home = workplace / "checkout", workplace / "home"
    home.mkdir(parents=True)
    _copy(
        folder, tree, {path.relative_to(folder).parts[0] for path in found} if (folder / "examples").is_dir() else None
    )
    records = workplace / "records"
    path = stubs.make(workplace / "bin", records, workplace)
    base = {"PATH": str(path), "HOME": str(home), "USER": "user", "LANG": "C.UTF-8", "TMPDIR": str(home)}
    base |= {"BASH_ENV": str(stubs.preamble(workplace / "preamble")), **_ANSWERS, **(environ or {})}
    return [_expand(script.relative_to(folder), tree, records, base, limit) for script in found]


def without_place(text: str, workplace: Path) -> str:
    """A text without the temporary folder's name."""
    return text.replace(str(workplace / "home"), "$HOME").replace(str(workplace / "checkout"), ".")


def _copy(folder: Path, tree: Path, parts: Iterable[str] | None) -> None:
    """Copy the text files, because a script may look for one, and fill in placeholders."""

    def ignore(place: str, names: list[str]) -> list[str]:
        return [n for n in names if n.startswith(".") or (not Path(place, n).is_dir() and not n.endswith(_TEXT))]

    for part in parts if parts is not None else ["."]:
        shutil.copytree(folder / part, tree / part, ignore=ignore, dirs_exist_ok=True)
    for script in tree.rglob("*.sh"):
        text = script.read_text(errors="replace")
        filled = _PLACEHOLDER.sub(lambda match: f"=/{match[1].lower()}", text)
        if filled != text:
            script.write_text(filled)


def _expand(script: Path, tree: Path, records: Path, base: Mapping[str, str], limit: float) -> Expansion:
    """Run a script; repeat with each variable that it asks for, or with arguments."""
    environ = dict(base)
    arguments: tuple[str, ...] = ()
    while True:
        found = _run(script, arguments, tree, records, environ, limit)
        unset = _UNSET.search(found.failure)
        if unset and unset[1] not in environ:
            environ[unset[1]] = f"/user/{unset[1].lower()}"
        elif found.failure and not found.launches and not arguments:
            arguments = _ARGUMENTS
        else:
            return found


def _run(
    script: Path, arguments: Sequence[str], tree: Path, records: Path, base: Mapping[str, str], limit: float
) -> Expansion:
    for old in records.iterdir():
        old.unlink()
    failure = ""
    process = subprocess.Popen(
        [str(Path(base["PATH"]) / "bash"), str(script), *arguments], cwd=tree, env=dict(base), stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        _, said = process.communicate(timeout=limit)
        if process.returncode:
            lines = [line for line in said.splitlines() if line and not line.startswith("+")]
            failure = f"exit status {process.returncode}: {lines[-1] if lines else 'no message'}"
    except subprocess.TimeoutExpired:
        failure = f"no end in {limit:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stderr is not None:
            process.stderr.close()
    called = [json.loads(path.read_text()) for path in sorted(records.glob("*.json"))]
    commands = [
        (
            words,
            {name: value for name, value in call["environ"].items() if base.get(name) != value and name not in _SHELL},
        )
        for call in called
        if call["program"] in stubs.LAUNCHERS
        for words in _launches([call["program"], *call["arguments"]])
    ]
    launches = (Launch(script.as_posix(), i, words, environ) for i, (words, environ) in enumerate(commands, 1))
    return Expansion(script.as_posix(), tuple(launches), failure)


#: variables that the shell sets
_SHELL = ("_", "PWD", "OLDPWD", "SHLVL")


def _launches(words: Sequence[str]) -> list[tuple[str, ...]]:
    """The commands in a call that start a Python module or file, also inside ``bash -c TEXT``."""
    for i, word in enumerate(words[:-1]):
        if word == "-c" and words[i - 1].endswith("sh"):
            with contextlib.suppress(ValueError):
                parts = " ".join(shlex.quote(w) if w not in _BETWEEN else "\n" for w in _split(words[i + 1])).split(
                    "\n"
                )
                return [found for part in parts for found in _launches(shlex.split(part))]
    if words and ("-c" in words[:2] or not any(_starts(word, after) for word, after in itertools.pairwise(words))):
        return []
    return [tuple(words)] if words else []


_BETWEEN = ("&&", ";", "||", "&", "|")


def _split(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars="&|;")
    lexer.whitespace_split = True
    lexer.commenters = ""
    return list(lexer)


def _starts(word: str, after: str) -> bool:
    return (word in ("-m", "--module") and not after.startswith("-")) or after.endswith(".py")
