"""Read runs: metrics in JSON lines, printed logs and TensorBoard's event files, given as files or folders with optional names.

JSON lines have three formats; the first line of a file decides which one it is. The examples' format, with several runs a file::

    {"precision": "fp8-unified", "align": "exact", "seed": 0, "step": 3, "data": {"jetrl/logp_abs_diff_max": 0.0, ...}}
    {"precision": "fp8-unified", "align": "exact", "seed": 0, "final": {"peak_memory_bytes": ..., "versions": {...}}}

where ``final`` may also hold ``answers``, a list of ``{"question", "before", "before_right", "after", "after_right"}``, and
``answers_changed``, the counts of ``tables.CHANGES``. The format of verl's ``file`` logger::

    {"step": 3, "data": {"critic/score/mean": 0.5, ...}}

One flat object per step, such as a history exported from Weights & Biases; OpenRLHF's prefixes ``train/`` and ``eval/`` are cut::

    {"_step": 3, "train/global_step": 3, "train/rollout/reward_mean": 0.5, ...}

A checkpoint of TRL's trainers has its log in ``trainer_state.json``, and the settings of the plugin in ``jetrl.json``
beside it.

In logs, verl's ``console`` logger prints ``step:3 - critic/score/mean:0.5 - actor/lr:np.float64(1e-06)``; OpenRLHF prints
``Global step 3: {'rollout/reward_mean': 0.5, ...}`` and ``Evaluation completed in ..., global_step 3, eval_metrics: {...}``;
``jetrl``'s launcher prints ``jetrl: precision NAME, align NAME, correction NAME, ...``. Ray's prefixes and color codes may
precede any of these.
"""

from __future__ import annotations

import importlib
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jetrl_patch.cli.report.runs import ReportError, Run
from jetrl_patch.errors import explain, reading
from jetrl_patch.progress import SILENT, Progress
from jetrl_patch.trainer.record import read as read_settings

_STATE = "trainer_state.json"
_WAYS = f"give metrics.jsonl, the .jsonl of verl's file logger, TRL's {_STATE}, a console log or TensorBoard's event file"

Data = dict[str, Any]
Step = tuple[Run, int, Data]


# ---- The RUN arguments ---------------------------------------------------------------------------

@dataclass
class RunArgument:
    """One RUN of the command line.

    Attributes:
        path: a file or a folder.
        name: the given name, or "".
        runs: the runs read from it.
    """

    path: Path
    name: str = ""
    runs: list[Run] = field(default_factory=list)


def parse(text: str) -> RunArgument:
    """Parse ``path`` or ``name=path``. Raises ReportError for an empty name or path."""
    name, equals, path = ("", "", text) if Path(text).exists() else text.partition("=")
    if not equals:
        name, path = "", text
    if not path.strip() or (equals and not name.strip()):
        raise ReportError(explain("RUN", required="path or name=path", found=repr(text), fix="give a name and a path"))
    return RunArgument(Path(path), name.strip())


def collect(texts: Sequence[str], notes: list[str], progress: Progress = SILENT) -> list[Run]:
    """All runs of all RUN arguments, each with a unique name.

    Raises:
        ReportError: a name or a file is given twice, or a file is not of a known format.
        ConfigError: the system refuses to read a file.
    """
    sources: list[RunArgument] = []
    seen: dict[Path, str] = {}
    for text in texts:
        with reading(text):
            sources.append(parse(text))
    progress.stage("reading", len(texts), "runs")
    for count, (source, text) in enumerate(zip(sources, texts, strict=True)):
        progress.done(count)
        with reading(source.path):
            file = find_file(source.path)
            if file.resolve() in seen:
                found = f"{seen[file.resolve()]} and {text}, which are the same file"
                raise ReportError(explain("RUN", required="each run once", found=found, fix="remove one"))
            seen[file.resolve()] = text
            source.runs = read_runs(file, notes)
    name_runs(sources)
    return [run for source in sources for run in source.runs]


def find_file(path: Path) -> Path:
    """Return a file itself, or a folder's ``metrics.jsonl``, else its only JSON-lines file, event file or log.

    Of TRL's output folder, return the log of the newest checkpoint.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        raise ReportError(explain(str(path), required="an existing file or folder", found="neither", fix="check the path"))
    for pattern in ("metrics.jsonl", "*.jsonl", "events.out.tfevents.*", "*.log", _STATE, f"checkpoint-*/{_STATE}"):
        found = sorted(file for file in path.glob(pattern) if file.is_file())
        if pattern.endswith(_STATE):  # checkpoint-100 is newer than checkpoint-20
            found = sorted(found, key=lambda file: (len(file.parent.name), file.parent.name))[-1:]
        if len(found) > 1:
            names = ", ".join(file.name for file in found[:5])
            raise ReportError(explain(str(path), required="one metrics file", found=names, fix="give the path of the file"))
        if found:
            return found[0]
    here = ", ".join(sorted(file.name for file in path.iterdir())[:6]) or "nothing"
    raise ReportError(explain(str(path), required="a metrics file", found=here, fix=_WAYS))


def name_runs(sources: Sequence[RunArgument]) -> None:
    """Name every run after its RUN argument, its arm, or both, with enough of the path to be unique."""
    given = [source.name for source in sources if source.name]
    twice = next((name for name in given if given.count(name) > 1), None)
    if twice:
        raise ReportError(explain("RUN", required="a unique name for each run", found=f"{twice} twice", fix="rename one"))
    for source, name in zip(sources, _short_names(sources), strict=True):
        arms = [run.arm for run in source.runs]
        for run in source.runs:
            run.source = name
            arm = run.arm if arms.count(run.arm) == 1 else f"{run.arm}, seed {run.seed}"
            if len(source.runs) == 1:
                run.name = name if source.name or len(sources) > 1 or not run.arm else run.arm
            else:
                run.name = arm if len(sources) == 1 else f"{name}: {arm}"


def _short_names(sources: Sequence[RunArgument]) -> list[str]:
    """The given names; for the others, the ends of their paths, as long as needed to be unique."""
    parts = [(source.name,) if source.name else _parts(source.path) for source in sources]
    lengths = [1] * len(parts)
    while True:
        names = ["/".join(p[-n:]) for p, n in zip(parts, lengths, strict=True)]
        twins = [i for i, name in enumerate(names) if names.count(name) > 1 and lengths[i] < len(parts[i])]
        if not twins:
            # still equal: a given name that is also a folder's, or two files of one folder
            return [name if names.index(name) == i else f"{name} ({i + 1})" for i, name in enumerate(names)]
        for i in twins:
            lengths[i] += 1


def _parts(path: Path) -> tuple[str, ...]:
    whole = path.resolve()
    parts = whole.parts[1:] or (str(whole),)
    if whole.is_file():
        return (*parts[:-1], whole.stem) if whole.stem not in ("metrics", "steps") else parts[:-1]
    return parts


# ---- One file ------------------------------------------------------------------------------------


def read_runs(path: Path, notes: list[str] | None = None) -> list[Run]:
    """The runs of one file that have a step, in order of appearance. If a step was written twice, the later figures count.

    Args:
        notes: receives a line about anything skipped, such as a truncated last line.

    Raises ReportError if the file is missing, damaged, of an unknown format, or holds no step.
    """
    notes = [] if notes is None else notes
    before = len(notes)
    if not path.is_file():
        raise ReportError(explain(str(path), required="a metrics file", found="no such file", fix=_WAYS))
    runs: dict[int, Run] = {}
    for run, step, data in _reader(path)(path, notes):
        named = {sys.intern(name): value for name, value in data.items()}  # a name is stored once, not at every step
        runs.setdefault(id(run), run).steps.setdefault(step, {}).update(named)
    if not runs:
        cut = "; ".join(notes[before:]) or "none"
        fix = f"check that the run got that far, or {_WAYS}"
        raise ReportError(explain(str(path), required="at least one step", found=cut, fix=fix))
    return list(runs.values())


def _reader(path: Path) -> Callable[[Path, list[str]], Iterator[Step]]:
    """The reader for a file's format. It yields each step with its run and its metrics, and notes what it skips."""
    if path.suffix == ".wandb":
        fix = "export its history as JSON lines"
        raise ReportError(explain(str(path), required="JSON lines", found="wandb's binary format", fix=fix))
    if "tfevents" in path.name:
        return _read_events
    if path.name == _STATE:
        return _read_state
    with path.open("rb") as file:
        first = next((line for line in itertools.islice(file, 1000) if line.strip()), b"")
    return _read_lines if path.suffix == ".jsonl" or first.lstrip()[:1] in (b"{", b"[") else _read_log


def _read_events(path: Path, notes: list[str]) -> Iterator[Step]:
    """The scalars of TensorBoard's event file. A record truncated by a crash is ignored."""
    try:
        loader = importlib.import_module("tensorboard.backend.event_processing.event_file_loader")
        tensors = importlib.import_module("tensorboard.util.tensor_util")
    except ImportError as error:
        fix = "run pip install tensorboard"
        raise ReportError(explain(str(path), required="the tensorboard package", found=error, fix=fix)) from error
    run = Run()
    for event in loader.EventFileLoader(str(path)).Load():
        for value in event.summary.value:
            if value.metadata.plugin_data.plugin_name == "scalars":
                yield run, event.step, {_bare(value.tag): float(tensors.make_ndarray(value.tensor).item())}


def _read_state(path: Path, notes: list[str]) -> Iterator[Step]:
    """The log of a checkpoint of TRL's."""
    run, settings = Run(), read_settings(path.parent)
    if settings is not None:
        run.precision, run.align, run.correction = settings.precision, settings.resolved_align, settings.correction
    try:
        history = json.loads(path.read_bytes())["log_history"]
    except (ValueError, KeyError, TypeError) as error:
        found, fix = f"{type(error).__name__}: {error}", "give the file of another checkpoint"
        raise ReportError(explain(str(path), required="the state of a Trainer", found=found, fix=fix)) from error
    for line in history:
        yield run, _step(line.get("step"), str(path)), {name: value for name, value in line.items() if name != "step"}


# ---- Logs ----------------------------------------------------------------------------------------

_NUMBER = r"(-?(?:inf|nan|[\d.]+(?:e[+-]?\d+)?))"
_VERL = re.compile(r"(?:^|\s|m)step:(\d+) - (.*)")  # the m ends a color code
_VERL_FIGURE = re.compile(rf"(?:np\.\w+\()?{_NUMBER}\)?")
_OPENRLHF = re.compile(r"(?:Global step|Evaluation completed .*global_step) (\d+)(?:, eval_metrics)?: \{(.*)\}")
_OPENRLHF_FIGURE = re.compile(rf"'([^']+)': {_NUMBER}")
_SETTINGS = re.compile(r"jetrl: precision ([\w-]+), align ([\w-]+),(?: correction ([\w-]+),)?")


def verl_step(line: str) -> tuple[int, Data] | None:
    """Step and metrics from a line of verl's console logger; None for any other line."""
    match = _VERL.search(line)
    parts = [part.rpartition(":") for part in match[2].split(" - ")] if match else []
    figures = [(name, _VERL_FIGURE.fullmatch(text.strip())) for name, _, text in parts]
    data = {name: float(figure[1]) for name, figure in figures if name and figure}
    return (int(match[1]), data) if match and data else None


def openrlhf_step(line: str) -> tuple[int, Data] | None:
    """Step and metrics from an OpenRLHF status or evaluation line; None for any other line."""
    match = _OPENRLHF.search(line)
    return (int(match[1]), {name: float(value) for name, value in _OPENRLHF_FIGURE.findall(match[2])}) if match else None


def _read_log(path: Path, notes: list[str]) -> Iterator[Step]:
    run = Run()
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            line = raw.decode("utf-8", errors="replace")
            if settings := _SETTINGS.search(line):
                run.precision, run.align, run.correction = settings[1], settings[2], settings[3] or ""
            found = verl_step(line) or openrlhf_step(line)
            if found and not raw.endswith(b"\n"):  # the last value may lack digits
                notes.append(f"{path}, line {number}: truncated; the lines before it are used")
            elif found:
                yield run, *found


# ---- JSON lines ----------------------------------------------------------------------------------

#: keys that hold the step of a flat record, in order of preference
_STEP_NAMES = ("train/global_step", "eval/global_step", "global_step", "step", "training/global_step", "_step")


def _read_lines(path: Path, notes: list[str]) -> Iterator[Step]:
    runs: dict[tuple[str, int], Run] = {}
    kind = ""
    for where, record in _records(path, notes):
        kind = kind or _kind(record, where)
        run, step, data = _parsed(kind, record, where)
        run = runs.setdefault((run.arm, run.seed), run)
        if step is None:
            run.final.update(data)
        else:
            yield run, step, data


def _records(path: Path, notes: list[str]) -> Iterator[tuple[str, Data]]:
    """Each object of the file and the place where it stands."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number}"
            try:
                record = json.loads(line) if line.strip() else None
            except ValueError as error:  # JSONDecodeError, or UnicodeDecodeError
                if not line.endswith(b"\n"):
                    notes.append(f"{where}: truncated; the {number - 1} lines before it are used")
                    return
                why, fix = getattr(error, "msg", "not UTF-8"), "remove the line"
                raise ReportError(explain(f"{where}: not JSON", required="one object per line", found=why, fix=fix)) from None
            if isinstance(record, dict):
                yield where, record
            elif line.strip():
                found, fix = type(record).__name__, "check that this is a metrics file"
                raise ReportError(explain(where, required="a JSON object", found=found, fix=fix))


def _kind(record: Data, where: str) -> str:
    """The format that a file's first record has."""
    if "precision" in record:
        return "examples"
    if isinstance(record.get("data"), dict):
        return "verl"
    if any(name in record for name in _STEP_NAMES):
        return "flat"
    wanted = 'an object with "step" and "data", or with one of ' + ", ".join(_STEP_NAMES)
    found = "an object with " + (", ".join(list(record)[:8]) or "nothing in it")
    raise ReportError(explain(where, required=wanted, found=found, fix="give a file written by a metrics logger"))


def _parsed(kind: str, record: Data, where: str) -> tuple[Run, int | None, Data]:
    """A run with the record's mode and no steps, the record's step, and its data. The step is None for a run's final record."""
    run = Run()
    if kind == "flat":
        step = next((record[name] for name in _STEP_NAMES if record.get(name) is not None), None)
        # a flat history omits what was not logged at this step, or writes null
        data = {_bare(name): value for name, value in record.items() if name not in _STEP_NAMES and value is not None}
        return run, _step(step, where), data
    needs = '"data", as the lines before it have'
    if kind == "examples":
        precision, align, seed = record.get("precision"), record.get("align"), record.get("seed")
        if not isinstance(precision, str) or not isinstance(align, str) or not isinstance(seed, int):
            raise ReportError(f"{where}: a record needs precision and align (strings) and seed (an integer)")
        correction, replay = (str(record.get(name) or "") for name in ("correction", "router_replay"))
        run = Run(precision, align, seed, correction=correction, router_replay=replay)
        if isinstance(record.get("final"), dict):
            return run, None, record["final"]
        needs = "data, or final"
    if not isinstance(record.get("data"), dict):
        raise ReportError(f"{where}: a record needs {needs}")
    return run, _step(record.get("step"), where), record["data"]


def _step(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or int(value) != value:
        raise ReportError(explain(where, required="an integer step", found=repr(value), fix="correct or remove the line"))
    return int(value)


def _bare(name: str) -> str:
    """A metric's name without the prefixes of OpenRLHF's loggers."""
    return name.removeprefix("train/").removeprefix("eval/")
