"""A launch command: which framework it starts, with which arguments and settings, its needs on this machine, and a verdict."""

from __future__ import annotations

import glob
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

from jetrl_patch import registry
from jetrl_patch.config import SETTINGS, Config, environment, from_text
from jetrl_patch.config.arguments import PROGRAMS, split
from jetrl_patch.errors import ConfigError, JetrlError
from jetrl_patch.native import machine
from jetrl_patch.registry import Needs, Place
from jetrl_patch.trainer.preflight import is_hub_id, local_folder
from jetrl_patch.trainer.rules import Check, from_error

__all__ = ["Started", "check_command", "check_launch", "check_settings", "judge", "recognise", "usable"]


# ---- The valid ones of the plugin's settings, and an error for each of the others ---------

def usable(environ: Mapping[str, str], given: Mapping[str, Any]) -> tuple[Config, list[JetrlError]]:
    """The settings of an environment and of options (``given``) without the wrong ones, and all errors."""
    errors: list[JetrlError] = []
    _tried(lambda: environment.check_names(environ), errors)
    _tried(lambda: environment.opted_in(environ), errors)
    known = {name: environ[name] for name in environment.FIELDS if name in environ}
    whole: list[JetrlError] = []
    config = _tried(lambda: Config.from_env(known, **given), whole)
    if config is not None:
        return config, errors
    single: list[JetrlError] = []
    right = {name: text for name, text in known.items() if _tried(lambda n=name, t=text: _alone(n, t), single)}  # type: ignore[misc]
    # settings that are valid alone and contradict each other are one error
    config = _tried(lambda: Config.from_env(right, **given), [])
    return config or _tried(lambda: Config(**given), []) or Config(), [*errors, *(single or whole)]


def _alone(name: str, text: str) -> bool:
    """Judge one variable. One that needs another setting is only read."""
    if SETTINGS[environment.FIELDS[name]].joint:
        from_text({environment.FIELDS[name]: text})
    else:
        Config.from_env({name: text})
    return True


def _tried(check: Callable[[], Any], errors: list[JetrlError]) -> Any:
    try:
        return check()
    except JetrlError as error:
        errors.append(error)
        return None


# ---- Parse a launch command: which framework it starts, with which arguments and which settings of the plugin

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_OURS = ("jetrl_patch", "jetrl_patch.cli.main")


@dataclass(frozen=True)
class Started:
    """A parsed command.

    Attributes:
        framework: "verl", "openrlhf", or None for anything else.
        target: dotted name of the module, or path of the script.
        arguments: the arguments of the target.
        overrides: fields of ``Config`` from the command's ``jetrl`` options.
        by_us: whether ``jetrl`` starts it, which patches the driver for any framework.
        environ: variable assignments before the command, also those of ``env``.
        before: the other words before the program: wrappers, and the interpreter with its options.
    """

    framework: str | None
    target: str
    arguments: list[str]
    overrides: dict[str, Any] = field(default_factory=dict)
    by_us: bool = False
    environ: dict[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()


def recognise(command: Sequence[str]) -> Started:
    """Find ``-m MODULE``, ``SCRIPT.py`` or ``jetrl`` after any wrapper (env, torchrun, ray job submit …).

    A single word with blanks is split as a whole command line. Raises ConfigError for invalid options of ``jetrl``.
    """
    words = shlex.split(command[0]) if len(command) == 1 and " " in command[0] else list(command)
    environ: dict[str, str] = {}
    before: list[str] = []
    for i, word in enumerate(words):
        rest = words[i + 1 :]
        module = rest[0] if word == "-m" and rest else ""
        if PurePath(word).name == "jetrl" or module in _OURS:
            return replace(_ours(rest[1:] if module else rest, environ), before=tuple(before))
        if module and not module.startswith("-"):
            return Started(_framework(module), module, rest[1:], environ=environ, before=tuple(before))
        if word.endswith(".py"):
            target = _module_of(word)
            return Started(_framework(target), target, rest, environ=environ, before=tuple(before))
        assignment = _ASSIGNMENT.fullmatch(word)
        if assignment:
            environ[assignment[1]] = assignment[2]
        elif word != "env":
            before.append(word)
    return Started(None, " ".join(words), [], environ=environ)


def _ours(words: list[str], environ: dict[str, str]) -> Started:
    if not words or words[0] not in ("run", *PROGRAMS):
        return Started(None, " ".join(["jetrl", *words[:1]]), words[1:], environ=environ)
    launch = split(words[0], words[1:])
    target = launch.target if launch.is_module else _module_of(launch.target)
    return Started(_framework(target), target, list(launch.arguments), launch.overrides, True, environ)


def _module_of(script: str) -> str:
    """The module of a known program's script (``…/verl/trainer/main_ppo.py``); any other script stays a path."""
    dotted = ".".join(PurePath(script).with_suffix("").parts)
    return next((module for module in PROGRAMS.values() if dotted.endswith(module)), script)


def _framework(target: str) -> str | None:
    root = target.split(".")[0]
    return root if root in PROGRAMS and not target.endswith(".py") else None


# ---- What a launch needs on its machine: GPUs, models, data, the environment of its processes ----

_DATA = (".parquet", ".json", ".jsonl", ".csv", ".arrow")
_WEIGHTS = ("*.safetensors", "*.bin", "*.safetensors.index.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "tokenizer_config.json")
#: programs that start a command in another environment or on another machine
_ELSEWHERE = (
    "uv", "uvx", "conda", "mamba", "micromamba", "poetry", "pixi", "pipenv", "hatch", "docker", "podman", "apptainer",
    "singularity", "kubectl", "ssh", "srun", "sbatch", "ray", "sky", "modal",
)  # fmt: skip


def check_command(words: Sequence[str]) -> Iterator[Check]:
    """Check the words before the program: whether they start it with this Python.

    Args:
        words: wrappers, interpreter and its options; without the program and its arguments.
    """
    names = [word for word in words if not word.startswith("-")]
    outer = next((word for word in names if PurePath(word).name in _ELSEWHERE), "")
    if outer:
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


def check_needs(framework: str, needs: Needs, on_cpu: bool, environ: Mapping[str, str]) -> Iterator[Check]:
    """Check everything in ``needs``; one check for each thing that is there or missing."""
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


def check_policy(path: str, setting: str, framework: str) -> Check:
    """Check the model that is trained."""
    return _model(Place(setting, path), framework)


def _missing(name: str, place: Place, found: str, fix: str) -> Check:
    return Check(name, "problem", f"{place.setting}={place.path or None}: {found}", fix)


def _gpus(framework: str, needs: Needs, on_cpu: bool, environ: Mapping[str, str]) -> Check:
    """Compare Ray's placement with what there is. A CPU run places its processes by logical GPUs."""
    total = sum(pool.per_node * pool.nodes for pool in needs.pools)
    asked = ", ".join(f"{setting}={each} on {nodes} node{'s' * (nodes != 1)}" for setting, each, nodes in needs.pools)
    kind = "logical GPUs" if on_cpu else "GPUs"
    required = f"{total} {kind} required ({asked})"
    address = needs.cluster.path or environ.get("RAY_ADDRESS", "")
    if address not in ("", "local"):
        return Check("GPUs", "unknown", f"{required}; the Ray cluster at {address} was not asked", "ask it with `ray status`")
    setting, told = needs.num_gpus
    here = registry.platform().logical_gpus(framework) if on_cpu else machine.count_gpus()
    if told is not None:
        here = int(told) if on_cpu else min(int(told), here)
    nodes = max((pool.nodes for pool in needs.pools), default=1)
    if nodes > 1 and not on_cpu:
        most = max(pool.per_node for pool in needs.pools)
        if most <= here:
            fix = "start Ray on all nodes first, and ask it with `ray status`"
            return Check("GPUs", "unknown", f"{required}; this node has {here}, the others were not seen", fix)
    if total <= here:
        return Check("GPUs", "ok", f"{required}, {here} found")
    fix = f"set +{setting}={total}, or ask for fewer" if on_cpu and told is None else "ask for fewer, or use a larger machine"
    return Check("GPUs", "problem", f"{required}, {here} found", fix)


def _model(place: Place, framework: str) -> Check:
    setting, path = place
    if path.startswith("~"):
        fix = f"write the whole path in {setting}"
        return _missing("model", place, f"neither {framework} nor transformers replaces the ~", fix)
    folder = local_folder(path)
    if folder:
        if not (Path(folder) / "config.json").is_file():
            return _missing("model", place, f"no config.json in {folder}", "give the folder of a complete checkpoint")
        if not any(next(Path(folder).glob(pattern), None) for pattern in _WEIGHTS):
            return _missing("model", place, f"no weights ({', '.join(_WEIGHTS[:2])}) in {folder}", "give a complete checkpoint")
        return Check("model", "ok", path if folder == path else f"{path}, in the cache: {folder}")
    download = f"download it and set {setting} to its folder"
    if "://" in path:
        return Check("model", "unknown", f"{path} was not opened, so its family and its split were not checked", download)
    if not is_hub_id(path):
        return _missing("model", place, "no such folder", f"check {setting}")
    if os.environ.get("HF_HUB_OFFLINE", "").strip().lower() in ("1", "true", "yes", "on"):
        return _missing("model", place, "neither a folder nor in the cache, and HF_HUB_OFFLINE forbids to download it", download)
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
    """The checkpoint that the run resumes from. Its record is compared with the settings where the settings are checked."""
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
    """Whether a program is in the environment of this Python: links of one folder lead to other installations."""
    return Path(program).absolute().parent == Path(sys.executable).absolute().parent


# ---- Judge a launch by the framework's adapter (``jetrl_patch.registry.Trainer``): its settings, and its machine

def judge(framework: str, arguments: Sequence[str], config: Config, *, here: bool = True) -> list[Check]:
    """Judge a launch of a framework. All problems are found, not the first alone.

    Args:
        framework: "verl" or "openrlhf".
        arguments: the arguments of the framework's trainer (``config.arguments.PROGRAMS``).
        config: the plugin's settings.
        here: whether it would start on this machine, with its GPUs, files and models; else only the settings are judged.

    Returns:
        The checks. A run would not start if the state of one is "problem"; if there is none, a state "unknown" says that it
        cannot be told; otherwise it would start (``Report(checks=…).starts``).
    """
    try:
        settings = registry.trainer(framework).read(arguments)
    except JetrlError as error:
        return [from_error("command", error)]
    found = list(check_launch(framework, settings, config)) if here else []
    return [*found, *check_settings(framework, settings, config)]


def check_launch(
    framework: str, settings: Any, config: Config, environ: Mapping[str, str] | None = None
) -> Iterator[Check]:
    """Check what a launch needs on this machine: GPUs, models, data, the environment of its workers.

    Args:
        environ: the environment of the launch; by default this process's.
    """
    trainer = registry.trainer(framework)
    on_cpu = registry.platform().is_cpu_run(config)
    yield check_policy(*trainer.model_path(settings), framework)
    yield from check_needs(framework, trainer.needs(settings), on_cpu, os.environ if environ is None else environ)


def check_settings(framework: str, settings: Any, config: Config) -> Iterator[Check]:
    """Check each setting and the model's ``config.json``, and list what the plugin would change. Modifies ``settings``."""
    found = [from_error(f"{framework} setting", error) for error in _problems(framework, settings, config)]
    yield from found
    if not found:
        yield Check(f"{framework} settings", "ok", "no conflict with the plugin's settings")
    changes = registry.trainer(framework).complete(settings, config)
    yield Check(f"{framework} changes", "ok", "; ".join(changes) or "none of your settings")


def _problems(framework: str, settings: Any, config: Config) -> Iterator[BaseException]:
    try:
        yield from registry.trainer(framework).problems(settings, config)
    except JetrlError as error:
        yield error
    except Exception as error:  # a broken config.json or a missing key would stop the framework as well
        yield ConfigError(f"{type(error).__name__}: {' '.join(str(error).split())}")
