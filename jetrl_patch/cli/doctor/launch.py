"""A launch command: the framework that it starts, its arguments and settings, and whether they work on this machine."""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

from jetrl_patch import registry
from jetrl_patch.config import Config, environment
from jetrl_patch.config.arguments import split
from jetrl_patch.config.launches import Needs, Place
from jetrl_patch.errors import ConfigError, JetrlError
from jetrl_patch.models.hub import how_to_download, is_hub_id, local_folder
from jetrl_patch.native import machine
from jetrl_patch.trainer.rules import Check, from_error, raised

# ---- Which of the plugin's settings are valid, and an error for each of the others ----------------

def usable(environ: Mapping[str, str], given: Mapping[str, Any]) -> tuple[Config, list[JetrlError]]:
    """The settings of an environment and of options (``given``) without the wrong ones, and all errors."""
    checks = (environment.check_names, environment.opted_in)
    errors = [error for check in checks for error in raised(functools.partial(check, environ))]
    known = {name: environ[name] for name in environment.FIELDS if name in environ}
    try:
        return Config.from_env(known, **given), errors
    except JetrlError as error:
        together = error
    alone = {name: [*raised(functools.partial(Config.parse, environment.FIELDS[name], known[name]))] for name in known}
    errors += [error for found in alone.values() for error in found] or [together]
    valid = {name: known[name] for name, found in alone.items() if not found}
    for left in (valid, {}):  # settings that are valid alone may contradict each other
        with contextlib.suppress(JetrlError):
            return Config.from_env(left, **given), errors
    return Config(), errors


# ---- Parse a launch command: which framework it starts, with which arguments and which settings of the plugin

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_OURS = ("jetrl_patch", "jetrl_patch.cli.main")


@dataclass(frozen=True)
class Started:
    """A parsed command.

    Attributes:
        target: dotted name of the module, or path of the script; the whole command if it starts neither.
        arguments: the arguments of the target.
        overrides: fields of ``Config`` from the command's ``jetrl`` options.
        by_us: whether ``jetrl`` starts it, which patches the driver of every framework.
        environ: variable assignments before the command, also those of ``env``.
        before: the other words before the program: wrappers, and the interpreter with its options.
    """

    target: str
    arguments: list[str]
    overrides: dict[str, Any] = field(default_factory=dict)
    by_us: bool = False
    environ: dict[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()

    @property
    def framework(self) -> str | None:
        """The training framework whose module the target is, or None."""
        root = self.target.partition(".")[0]
        return root if root in registry.programs() and not self.target.endswith(".py") else None


def recognise(command: Sequence[str]) -> Started:
    """Find ``-m MODULE``, ``SCRIPT.py`` or ``jetrl`` after any wrapper (env, torchrun, ray job submit …).

    A single word with blanks is split like a command line. Raises ConfigError for invalid options of ``jetrl``.
    """
    words = shlex.split(command[0]) if len(command) == 1 and " " in command[0] else list(command)
    environ: dict[str, str] = {}
    before: list[str] = []
    for i, word in enumerate(words):
        rest = words[i + 1 :]
        module = rest.pop(0) if word == "-m" and rest else ""
        if PurePath(word).name == "jetrl" or module in _OURS:
            return replace(_ours(rest), environ=environ, before=tuple(before))
        if (module and not module.startswith("-")) or word.endswith(".py"):
            return Started(module or _module_of(word), rest, environ=environ, before=tuple(before))
        if assignment := _ASSIGNMENT.fullmatch(word):
            environ[assignment[1]] = assignment[2]
        elif word != "env":
            before.append(word)
    return Started(" ".join(words), [], environ=environ)


def _ours(words: list[str]) -> Started:
    if not words or words[0] not in ("run", *registry.programs()):
        return Started(" ".join(["jetrl", *words[:1]]), words[1:])
    launch = split(words[0], words[1:], registry.programs())
    target = launch.target if launch.is_module else _module_of(launch.target)
    return Started(target, list(launch.arguments), launch.overrides, by_us=True)


def _module_of(script: str) -> str:
    """The module of a known program's script (``…/verl/trainer/main_ppo.py``); any other script stays a path."""
    dotted = ".".join(PurePath(script).with_suffix("").parts)
    return next((module for module in registry.programs().values() if dotted.endswith(module)), script)


# ---- What a launch needs on this machine: GPUs, models, data, the environment of its processes ----

_DATA = (".parquet", ".json", ".jsonl", ".csv", ".arrow")
_WEIGHTS = ("*.safetensors", "*.bin", "*.safetensors.index.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "tokenizer_config.json")
#: programs that start a command in a container or on another machine; also `ray job submit`
AWAY = ("docker", "podman", "apptainer", "singularity", "kubectl", "ssh", "srun", "sbatch", "sky", "modal")
#: programs that start a command in another environment
_ELSEWHERE = ("uv", "uvx", "conda", "mamba", "micromamba", "poetry", "pixi", "pipenv", "hatch", "ray", *AWAY)


def check_command(words: Sequence[str]) -> Iterator[Check]:
    """Check whether the words before the program (wrappers, interpreter and its options) start it with this Python."""
    names = [word for word in words if not word.startswith("-")]
    if any(PurePath(word).name in _ELSEWHERE for word in names):
        finding = f"`{shlex.join(words)}` has an environment of its own, of which nothing was checked"
        yield Check("environment", "unknown", finding, f"run jetrl doctor inside it: `{_inside(words)}`")
        return
    for word in names:
        if not PurePath(word).name.startswith("python"):
            continue
        found = shutil.which(word)
        if found is None:
            yield Check("environment", "problem", f"{word}: no such program", f"write {sys.executable}")
        elif not _is_this(found):
            finding = f"{word} is {found}, but {sys.executable} was checked"
            yield Check("environment", "unknown", finding, f"run `{found} -m jetrl_patch doctor -- …`, or write {sys.executable}")


def _missing(name: str, place: Place, found: str, fix: str) -> Check:
    return Check(name, "problem", f"{place.setting}={place.path or None}: {found}", fix)


def _gpus(framework: str, needs: Needs, on_cpu: bool, environ: Mapping[str, str]) -> Check:
    """Compare Ray's placement with the GPUs here. A CPU run places its processes by logical GPUs."""
    total = sum(pool.per_node * pool.nodes for pool in needs.pools)
    asked = ", ".join(f"{setting}={each} on {nodes} node{'s' * (nodes != 1)}" for setting, each, nodes in needs.pools)
    required = f"{total} {'logical ' * on_cpu}GPU{'s' * (total != 1)} required ({asked})"
    address = needs.cluster.path or environ.get("RAY_ADDRESS", "")
    if address not in ("", "local"):
        return Check("GPUs", "unknown", f"{required}; the Ray cluster at {address} was not asked", "ask it with `ray status`")
    setting, told = needs.num_gpus
    here = registry.platform().logical_gpus(framework) if on_cpu else machine.count_gpus()
    if told is not None:
        here = int(told) if on_cpu else min(int(told), here)
    several = any(pool.nodes > 1 for pool in needs.pools) and not on_cpu
    if several and max(pool.per_node for pool in needs.pools) <= here:
        fix = "start Ray on all nodes first, and ask it with `ray status`"
        return Check("GPUs", "unknown", f"{required}; this node has {here}, the others were not checked", fix)
    if total <= here:
        return Check("GPUs", "ok", f"{required}, {here} found")
    fix = f"set +{setting}={total}, or ask for fewer" if on_cpu and told is None else "ask for fewer, or use a larger machine"
    return Check("GPUs", "problem", f"{required}, {here} found", fix)


def _model(place: Place, framework: str) -> Check:
    setting, path = place
    if path.startswith("~"):
        found = f"neither {framework} nor transformers replaces the ~"
        return _missing("model", place, found, f"write the whole path in {setting}")
    if folder := local_folder(path):
        if not (Path(folder) / "config.json").is_file():
            return _missing("model", place, f"no config.json in {folder}", "give the folder of a complete checkpoint")
        if not any(next(Path(folder).glob(pattern), None) for pattern in _WEIGHTS):
            return _missing("model", place, f"no weights ({', '.join(_WEIGHTS[:2])}) in {folder}", "give a complete checkpoint")
        return Check("model", "ok", path if folder == path else f"{path}, in the cache: {folder}")
    if "://" in path:
        finding = f"{path} was not opened, so its family and its split were not checked"
        return Check("model", "unknown", finding, f"download it and set {setting} to its folder")
    if not is_hub_id(path):
        return _missing("model", place, "no such folder", f"check {setting}")
    download = f"{how_to_download(path)}, and set {setting} to that folder"
    if os.environ.get("HF_HUB_OFFLINE", "").strip().lower() in ("1", "true", "yes", "on"):
        return _missing("model", place, "neither a folder nor in the cache, and HF_HUB_OFFLINE forbids downloads", download)
    finding = f"{path!r} is neither a folder nor in the cache, so the model's family and its split were not checked"
    return Check("model", "unknown", finding, download)


def _data(needs: Needs) -> Iterator[Check]:
    found = []
    for place in needs.data:
        path = os.path.expanduser(place.path)
        if os.path.exists(path) or ("*" in path and glob.glob(path)):
            found.append(place.path)
        elif not place.path:
            yield _missing("data", place, "nothing to train on", f"set {place.setting}")
        elif needs.own_data or "://" in path:
            yield Check("data", "unknown", f"{place.setting}={place.path}: not a file here, and not opened", "")
        elif is_hub_id(path) and not path.endswith(_DATA):
            yield Check("data", "unknown", f"{place.setting}={place.path}: not a file here; a hub was not asked", "")
        else:
            yield _missing("data", place, "no such file", f"check {place.setting}")
    if found:
        yield Check("data", "ok", ", ".join(found))


def _resumed(place: Place) -> Check:
    """The checkpoint that the run resumes from. ``check_settings`` compares its record with the settings."""
    if os.path.isdir(place.path):
        return Check("checkpoint", "ok", f"the run resumes from {place.path}")
    finding = f"{place.setting}: the run resumes from {place.path}, and there is no such folder here"
    return Check("checkpoint", "unknown", finding, f"check {place.setting}, or run jetrl doctor where the folder is")


def _interpreter(place: Place) -> Check:
    words = shlex.split(place.path)
    found = shutil.which(words[0])
    if found is None:
        return _missing("environment", place, f"no program {words[0]} here", f"set {place.setting}=null")
    if len(words) == 1 and _is_this(found):
        return Check("environment", "ok", f"{place.setting} is this Python")
    finding = f"{place.setting}={place.path}: Ray's workers have an environment of their own, of which nothing was checked"
    fix = f"install jetrl_patch there, and run `{_inside(words)}` with {place.setting}=null"
    return Check("environment", "unknown", finding, fix)


def _inside(words: Sequence[str]) -> str:
    """The doctor in the environment that these words start."""
    last = max((i for i, word in enumerate(words) if PurePath(word).name.startswith("python")), default=None)
    return f"{shlex.join(words if last is None else words[:last])} python -m jetrl_patch doctor -- …"


def _is_this(program: str) -> bool:
    """Whether a program is in this Python's environment. Compares folders, because an environment's python may be a link."""
    return Path(program).absolute().parent == Path(sys.executable).absolute().parent


# ---- Judge a launch through the framework's adapter (``jetrl_patch.config.launches.Launch``) -----------

def check_launch(framework: str, settings: Any, config: Config, environ: Mapping[str, str]) -> Iterator[Check]:
    """Check what a launch in this environment needs here: GPUs, models, data, the environment of its workers."""
    launches = registry.launches(framework)
    needs = launches.needs(settings)
    on_cpu = registry.platform().is_cpu_run(config)
    path, setting = launches.model_path(settings)
    yield _model(Place(setting, path), framework)
    yield _gpus(framework, needs, on_cpu, environ)
    for place in needs.models:
        yield _model(place, framework)
    folder = local_folder(needs.tokenizer.path)
    if folder and not any((Path(folder) / name).is_file() for name in _TOKENIZERS):
        found = f"none of {', '.join(_TOKENIZERS)} in the folder"
        yield _missing("tokenizer", needs.tokenizer, found, "save the tokenizer there")
    yield from _data(needs)
    for place in needs.files:
        if not Path(place.path).is_file():
            yield _missing("code", place, "no such file", f"check {place.setting}")
    if needs.resumes.path:
        yield _resumed(needs.resumes)
    if needs.interpreter.path:
        yield _interpreter(needs.interpreter)


def check_settings(framework: str, settings: Any, config: Config) -> Iterator[Check]:
    """Check each setting and the model's ``config.json``, and list what the plugin would change. Modifies ``settings``."""
    launches = registry.launches(framework)
    found: list[BaseException] = []
    try:
        for problem in launches.problems(settings, config):
            found.append(problem)
    except JetrlError as error:
        found.append(error)
    except Exception as error:  # a broken config.json or a missing key would stop the framework as well
        found.append(ConfigError(f"{type(error).__name__}: {' '.join(str(error).split())}"))
    yield from (from_error(f"{framework} setting", error) for error in found)
    if not found:
        yield Check(f"{framework} settings", "ok", "no conflict with the plugin's settings")
    changes = launches.complete(settings, config)
    yield Check(f"{framework} changes", "ok", "; ".join(changes) or "none of your settings")
