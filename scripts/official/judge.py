"""Judge a launch in every mode, by the checks that ``jetrl doctor`` and the frameworks' drivers run before a start.

The judge assumes the machine that the launch is written for, with its GPUs and the packages of the frameworks' images.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from jetrl_patch import registry
from jetrl_patch.cli.doctor.launch import recognise
from jetrl_patch.config import Config
from jetrl_patch.config.modes import MODES
from jetrl_patch.errors import ConfigError, JetrlError, ModelError
from scripts.official import models
from scripts.official.expand import Launch, without_place
from scripts.official.renamed import translated

__all__ = ["ASYNC", "READ", "Judged", "Problem", "judge", "modes", "on_target"]

#: the class of launches whose rollout does not wait for the trainer, with any model
ASYNC = "async"
#: verl's settings that the checks have read within ``on_target``
READ: set[str] = set()
#: modules that train or serve without a rollout
_NO_ROLLOUT = re.compile(r"(^|[._])(sft|dpo|rm|generation)([._]|$)")
#: the subject of refusals that ``on_cut`` may lift
_SPLIT = "the tensor-parallel split"
#: the folder of verl's scripts for Ascend, where verl itself sets the device
_ASCEND = "ascend_extras"
_ASCEND_NOTE = f"a script in `{_ASCEND}` is judged with `trainer.device=npu`, which verl sets on such a machine"


@dataclass(frozen=True)
class Problem:
    """One reason for a refusal: the message and its subject."""

    text: str
    about: str


@dataclass(frozen=True)
class Judged:
    """One launch with its verdicts.

    Attributes:
        kind: class of the launch (``models.CLASSES`` or ``ASYNC``); "" if its model is unknown; None without a rollout.
        model: as the script names it.
        verdicts: mode -> problems; no problem means accepted.
        set_keys: the settings on the command line: name -> value.
        notes: remarks for the reader.
        cut: the modes that refuse it, but accept it with ``on_cut="bf16"``.
    """

    launch: Launch
    framework: str
    target: str
    kind: str | None
    model: str = ""
    verdicts: Mapping[str, tuple[Problem, ...]] = field(default_factory=dict)
    set_keys: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    cut: frozenset[str] = frozenset()

    def accepted(self, mode: str) -> bool:
        return not self.verdicts[mode]


def modes() -> dict[str, Config]:
    """The modes in the page's order: unified, other quantized, 16-bit."""
    found: dict[str, Config] = {}
    for mode in sorted(MODES.values(), key=lambda m: (not m.is_unified, not m.quantizes, not m.scales_loss)):
        if mode.is_unified:
            for align in ("exact", "linear"):
                found[align] = Config(precision=mode.name, align=align, platform="cuda")  # type: ignore[arg-type]
        else:
            found[mode.name] = Config(precision=mode.name, platform="cuda")
    return found


def judge(launch: Launch, place: Path, workplace: Path) -> Judged:
    """Judge one launch.

    Args:
        place: where ``models.write_all`` wrote the models' ``config.json``.
        workplace: the temporary folder of the expansion; messages leave it out.
    """
    started = recognise(launch.command)
    framework = started.framework or _by_settings(started.arguments)
    if not framework or _NO_ROLLOUT.search(started.target):
        return Judged(launch, framework, started.target, None)
    arguments, notes = translated(framework, started.arguments)
    keys = given(framework, arguments)
    if started.target not in registry.launches(framework).programs:
        path = without_place(keys.get(_MODEL_KEYS[framework], ""), workplace)
        problems = (Problem(_other_program(framework, started.target), "the entry point"),)
        return Judged(launch, framework, started.target, ASYNC, path, dict.fromkeys(modes(), problems), keys, notes)
    launches = registry.launches(framework)
    own: tuple[Problem, ...] = ()
    try:
        settings = launches.read(arguments, started.target)
    except JetrlError as error:
        own = (Problem(_own_refusal(str(error), framework, workplace), f"{framework}'s own refusal"),)
        try:
            settings = launches.read([_forced(word) for word in arguments], started.target)
        except JetrlError:
            path = without_place(keys.get(_MODEL_KEYS[framework], ""), workplace)
            verdicts = dict.fromkeys(modes(), own)
            return Judged(launch, framework, started.target, _kind(path, False), path, verdicts, keys, notes)
    if _ASCEND in PurePosixPath(launch.script).parts:
        _set(settings, "trainer.device", "npu")
        notes = (*notes, _ASCEND_NOTE)
    if "video" in PurePosixPath(launch.script).name:
        _set(settings, "data.train_files", _videos(place))
    path, _ = launches.model_path(settings)
    name = models.known(path)
    if name:
        _set_model(framework, settings, str(models.folder(name, place)))
    verdicts = {
        mode: (*own, *_problems(framework, settings, config, place, workplace)) for mode, config in modes().items()
    }
    cut = frozenset(
        mode
        for mode, config in modes().items()
        if any(problem.about == _SPLIT for problem in verdicts[mode])
        and not (*own, *_problems(framework, settings, config.replace(on_cut="bf16"), place, workplace))
    )
    kind = _kind(path, _asynchronous(framework, started.target, settings))
    return Judged(launch, framework, started.target, kind, without_place(path, workplace), verdicts, keys, notes, cut)


def _by_settings(arguments: Sequence[str]) -> str:
    """The framework that a recipe's own program takes its settings from, as those of DAPO, PRIME, entropy and rllm; else ""."""
    return "verl" if any(word.lstrip("+~").startswith("actor_rollout_ref.") for word in arguments) else ""


#: a setting of a command line, with hydra's mark for adding it; a choice of a config group has no dot
_SETTING = re.compile(r"\+*([a-z]\w*(?:\.\w+)+=.*)", re.DOTALL)


def _forced(word: str) -> str:
    """A hydra setting that is accepted even if this version of the framework lacks it. The others can then be judged."""
    found = _SETTING.fullmatch(word)
    return f"++{found[1]}" if found else word


def _own_refusal(message: str, framework: str, workplace: Path) -> str:
    short = message.split(" Config search path")[0].split(" To append to")[0].split(" Either remove")[0].rstrip(".")
    return f"{framework} itself refuses it: {without_place(short, workplace)}."


def _other_program(framework: str, target: str) -> str:
    """Why a program other than the framework's main one is refused."""
    refused = registry.launches(framework).program_problem(target)
    required = f"required {registry.programs()[framework]}, found another program"
    return str(refused) if refused is not None else f"{target}: {required}. Use {registry.programs()[framework]}."


def _problems(framework: str, settings: Any, config: Config, place: Path, workplace: Path) -> Iterator[Problem]:
    launches = registry.launches(framework)
    try:
        # the training engine fills in what the user left open, as in the driver before its checks
        config = launches.chosen(settings, config)
        for error in launches.problems(settings, config):
            yield _problem(error, place, workplace)
    except JetrlError as error:
        yield _problem(error, place, workplace)
    except Exception as error:  # as in the doctor: it would stop the framework too
        words = f"{type(error).__name__}: {' '.join(str(error).split())}"
        yield _problem(ConfigError(words), place, workplace, "the model's config.json")


def _problem(error: BaseException, place: Path, workplace: Path, about: str = "") -> Problem:
    text = without_place(str(error), workplace).replace(f"{place}/", "")
    if not about:
        about = re.split(r":? required |:? requires ", text)[0]
        about = re.split(r" with (?:precision|align|optimizer|kv|head|[a-z_]+=)", about)[0]
        about = re.sub(r"^verl settings? |^OpenRLHF's ", "", about).rstrip(":")
        if isinstance(error, ModelError):
            about = _SPLIT if "cuts a block" in text else "the model"
    return Problem(text, about)


def given(framework: str, arguments: Sequence[str]) -> dict[str, str]:
    """The settings on a command line: hydra's ``[+]name=value``, or argparse's ``--name value``."""
    found: dict[str, str] = {}
    if framework == "verl":
        for word in arguments:
            name, mark, value = word.partition("=")
            if mark and not name.startswith("--"):
                found[name.lstrip("+~")] = value
        return found
    name = ""
    for word in arguments:
        if word.startswith("--"):
            name = word[2:]
            found[name] = ""
        elif name:
            found[name] = f"{found[name]} {word}".strip()
    return found


#: framework -> the setting of the model's path
_MODEL_KEYS = {"verl": "actor_rollout_ref.model.path", "openrlhf": "actor.model_name_or_path"}


def _set_model(framework: str, settings: Any, path: str) -> None:
    if framework == "verl":
        _set(settings, _MODEL_KEYS[framework], path)
        return
    settings.actor.model_name_or_path = path


def _set(settings: Any, key: str, value: str) -> None:
    from omegaconf import OmegaConf

    OmegaConf.update(settings, key, value)


def _videos(place: Path) -> str:
    """A file of samples, one with a video. The checks read no other part of a script's data."""
    import pandas

    file = place / "videos.parquet"
    pandas.DataFrame([{"videos": [{"video": "film.mp4"}]}]).to_parquet(file)
    return str(file)


def _asynchronous(framework: str, target: str, settings: Any) -> bool:
    if target != registry.programs()[framework]:
        return True
    if framework == "verl":
        from omegaconf import OmegaConf

        return OmegaConf.select(settings, "trainer.v1.trainer_mode", default="sync") not in (None, "sync")
    return bool(settings.train.async_enable)


def _kind(path: str, asynchronous: bool) -> str:
    name = models.known(path)
    return ASYNC if asynchronous else models.MODELS[name].kind if name else ""


@contextlib.contextmanager
def on_target() -> Iterator[None]:
    """Judge as on the scripts' target machine, which has Megatron's packages and VeOmni.

    Each model is built once, without memory. ``READ`` collects the settings that the checks read.
    """
    from omegaconf import OmegaConf
    from transformers import AutoModelForCausalLM

    from jetrl_patch.adapters.verl import megatron, veomni

    there = {"transformer_engine": "2.16.1", "megatron.core": "0.18.0", "megatron.bridge": "0.5.0", "mbridge": "0.15.1"}
    there["veomni"] = "0.1.12"
    version, installed, build = megatron.installed_version, megatron.is_installed, AutoModelForCausalLM.from_config
    built: dict[str, Any] = {}

    @functools.wraps(build)
    def from_config(config: Any, *args: Any, **kwargs: Any) -> Any:
        key = json.dumps([config.to_dict(), repr(args), repr(kwargs)], sort_keys=True, default=str)
        if key not in built:
            built[key] = build(config, *args, **kwargs)
        return built[key]

    select = OmegaConf.select

    @functools.wraps(select)
    def read(cfg: Any, key: str, *args: Any, **kwargs: Any) -> Any:
        READ.add(key)
        return select(cfg, key, *args, **kwargs)

    OmegaConf.select = staticmethod(read)  # type: ignore[assignment]
    for engine in (megatron, veomni):
        engine.installed_version = lambda name: there.get(name) or version(name)  # type: ignore[attr-defined]
    megatron.is_installed = lambda name: name in there or installed(name)  # type: ignore[assignment]
    AutoModelForCausalLM.from_config = from_config
    try:
        yield
    finally:
        megatron.installed_version, megatron.is_installed = version, installed  # type: ignore[assignment]
        veomni.installed_version = version  # type: ignore[assignment]
        AutoModelForCausalLM.from_config = build
        OmegaConf.select = staticmethod(select)  # type: ignore[assignment]
