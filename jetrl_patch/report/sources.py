"""Turn the arguments of ``jetrl report``, files or folders with optional names, into runs with unique names."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jetrl_patch.errors import explain
from jetrl_patch.places import reading
from jetrl_patch.progress import SILENT, Progress
from jetrl_patch.report.jsonl import Keep, read_jsonl
from jetrl_patch.report.logs import read_log
from jetrl_patch.report.runs import ReportError, Run

__all__ = ["Source", "collect", "find_file", "name_runs", "parse", "read_runs"]

_WAYS = "give metrics.jsonl, the .jsonl of verl's file logger, a console log or TensorBoard's event file"


@dataclass
class Source:
    """One RUN of the command line.

    Attributes:
        path: a file or a folder.
        name: the given name, or "".
        runs: the runs read from it.
    """

    path: Path
    name: str = ""
    runs: list[Run] = field(default_factory=list)


def parse(text: str) -> Source:
    """Parse ``path`` or ``name=path``. Raises ReportError for an empty name or path."""
    name, equals, path = text.partition("=")
    if not equals or Path(text).exists():
        name, path = "", text
    if not path.strip() or (equals and not Path(text).exists() and not name.strip()):
        raise ReportError(explain("RUN", required="path or name=path", found=repr(text), fix="give a name and a path"))
    return Source(Path(path), name.strip())


def find_file(path: Path) -> Path:
    """Return a file itself, or a folder's ``metrics.jsonl``, else its only JSON-lines file, event file or log."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise ReportError(explain(str(path), required="an existing file or folder", found="neither", fix="check the path"))
    if (path / "metrics.jsonl").is_file():
        return path / "metrics.jsonl"
    for pattern in ("*.jsonl", "events.out.tfevents.*", "*.log"):
        found = sorted(file for file in path.glob(pattern) if file.is_file())
        if len(found) > 1:
            names = ", ".join(file.name for file in found[:5])
            raise ReportError(explain(str(path), required="one metrics file", found=names, fix="give the path of the file"))
        if found:
            return found[0]
    here = ", ".join(sorted(file.name for file in path.iterdir())[:6]) or "nothing"
    raise ReportError(explain(str(path), required="a metrics file", found=here, fix=_WAYS))


def read_runs(path: Path, keep: Keep | None = None, notes: list[str] | None = None) -> list[Run]:
    """The runs of one file, in order of appearance.

    Args:
        keep: selects the metrics to keep in memory; None keeps all.
        notes: receives a line about anything skipped, such as a truncated last line.

    Raises:
        ReportError: the file is missing, damaged, of an unknown format, or holds no step.
    """
    keep, notes = keep or (lambda name: True), [] if notes is None else notes
    before = len(notes)
    if not path.is_file():
        raise ReportError(explain(str(path), required="a metrics file", found="no such file", fix=_WAYS))
    runs = _reader(path)(path, keep, notes)
    if not any(run.steps for run in runs):
        cut = "; ".join(notes[before:])
        raise ReportError(
            explain(
                str(path), required="at least one step", found=cut or "none", fix=f"check that the run got that far, or {_WAYS}"
            )
        )
    return runs


def _reader(path: Path) -> Callable[[Path, Keep, list[str]], list[Run]]:
    if path.suffix == ".wandb":
        raise ReportError(
            explain(
                str(path), required="JSON lines", found="wandb's binary format", fix="export its history as JSON lines"
            )
        )
    if "tfevents" in path.name:
        from jetrl_patch.report.events import read_events

        return read_events
    with path.open("rb") as file:
        first = next((line for line in itertools.islice(file, 1000) if line.strip()), b"")
    return read_jsonl if path.suffix == ".jsonl" or first.lstrip()[:1] in (b"{", b"[") else read_log


def collect(texts: Sequence[str], keep: Keep, notes: list[str], progress: Progress = SILENT) -> list[Run]:
    """All runs of all RUN arguments, each with a unique name.

    Raises:
        ReportError: a name or a file is given twice, or a file is not of a known format.
        ConfigError: the system refuses to read a file.
    """
    sources = []
    for text in texts:
        with reading(text):
            sources.append(parse(text))
    seen: dict[Path, str] = {}
    progress.stage("reading", len(texts), "runs")
    for count, (source, text) in enumerate(zip(sources, texts, strict=True)):
        progress.done(count)
        with reading(source.path):
            file = find_file(source.path)
            if file.resolve() in seen:
                found = f"{seen[file.resolve()]} and {text}, which are the same file"
                raise ReportError(explain("RUN", required="each run once", found=found, fix="remove one"))
            seen[file.resolve()] = text
            source.runs = [run for run in read_runs(file, keep, notes) if run.steps]
    name_runs(sources)
    return [run for source in sources for run in source.runs]


def name_runs(sources: Sequence[Source]) -> None:
    """Name every run after its RUN argument, its arm, or both, with enough of the path to be unique."""
    given = [source.name for source in sources if source.name]
    for name in given:
        if given.count(name) > 1:
            raise ReportError(
                explain("RUN", required="a unique name for each run", found=f"{name} twice", fix="rename one")
            )
    for source, name in zip(sources, _short_names(sources), strict=True):
        arms = [run.arm for run in source.runs]
        for run in source.runs:
            run.source = name
            arm = run.arm if arms.count(run.arm) == 1 else f"{run.arm}, seed {run.seed}"
            if len(source.runs) == 1:
                run.name = name if source.name or len(sources) > 1 or not run.arm else run.arm
            else:
                run.name = arm if len(sources) == 1 else f"{name}: {arm}"


def _short_names(sources: Sequence[Source]) -> list[str]:
    """The given names; for the others, the ends of their paths, as long as needed to be unique."""
    parts = [[source.name] if source.name else list(_parts(source.path)) for source in sources]
    lengths = [1] * len(parts)
    while True:
        names = ["/".join(p[-n:]) for p, n in zip(parts, lengths, strict=True)]
        twins = [i for i, name in enumerate(names) if names.count(name) > 1 and lengths[i] < len(parts[i])]
        if not twins:
            break
        for i in twins:
            lengths[i] += 1
    # still equal: a given name that is also a folder's, or two files of one folder
    return [name if names.index(name) == i else f"{name} ({i + 1})" for i, name in enumerate(names)]


def _parts(path: Path) -> tuple[str, ...]:
    whole = path.resolve()
    parts = whole.parts[1:] or (str(whole),)
    if whole.is_file():
        return (*parts[:-1], whole.stem) if whole.stem not in ("metrics", "steps") else parts[:-1]
    return parts
