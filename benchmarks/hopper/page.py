"""The pages: what the records hold, as Markdown. A part that was not measured has no page."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.gpu.report import markdown
from benchmarks.hopper.plan import ESTIMATED, PARTS, Part, table
from benchmarks.hopper.record import Record, Rows, load

_COMMAND = """
```bash
make hopper{}
```
"""


def page(part: Part, record: Record) -> str:
    """The page of one part."""
    what = f"# {part.title}\n\nPart {part.letter} of [`make hopper`](index.md): {part.what}.\n"
    dry = "**A dry run on a CPU: no figure here is a measurement.**\n\n" if record.dry else ""
    ran = " / ".join("; ".join(f"{name} {value}" for name, value in found.items()) for found in record.environments())
    commands = ", ".join(f"`{command}`" for command in dict.fromkeys(found.command for found in record.cells.values()))
    text = f"{what}\n{dry}{ran}. Command: {commands}.\n"
    if record.left:
        begun = [f"{name} (after {len(record.cells[name].done)} pieces)" for name in record.left if name in record.cells]
        said = {"not run yet": [name for name in record.left if name not in record.cells], "not ended": begun}
        words = [f"{what}: {', '.join(names)}" for what, names in said.items() if names]
        text += f"\n**Incomplete:** {'; '.join(words)}.\n"
    if record.missing:
        text += f"\nNot there: {'; '.join(f'{name}: {reason}' for name, reason in record.missing.items())}.\n"
    module = importlib.import_module(f"benchmarks.hopper.{part.name}")
    tables = [markdown(*derived) for derived in module.derive(record.rows(), record.planned)]
    titles = dict.fromkeys(found.title for found in record.cells.values())
    tables += [markdown(title, *_merged(record, title)) for title in titles]
    clocks = [{"cell": name, "seconds": found.seconds, **found.clocks} for name, found in record.cells.items()]
    return "\n".join([text, *tables, markdown("Cells", clocks)])


def _merged(record: Record, title: str) -> tuple[Rows, str]:
    """The rows of all cells with this title, and why rows are missing."""
    mine = {name: found for name, found in record.cells.items() if found.title == title}
    notes = [
        f"{name}{f', {piece}' if piece else ''} failed: {text}"
        for name, found in mine.items()
        for piece, text in found.errors.items()
    ]
    return [row for found in mine.values() for row in found.rows], " ".join(notes)


def index(records: Mapping[str, Record]) -> str:
    """The page about all parts, by letter. One that was measured has a page."""
    states = {letter: record.state for letter, record in records.items()}
    rows = [{**row, "part": _link(part, records[part.letter])} for part, row in zip(PARTS, table(PARTS, states), strict=True)]
    measured = any(record.cells for record in records.values())
    return (
        "# On a Hopper GPU\n\nOne command measures everything that needs a GPU, on a machine with one H100 or H200:\n"
        f"{_COMMAND.format('')}\n"
        + ("" if measured else "**Not measured yet:** no figure of this project comes from a GPU.\n\n")
        + "It needs an environment with CUDA builds of torch and vLLM ([install](../../install.md#on-gpus)), says what it needs, "
        "checks the machine before anything starts, and downloads nothing. Parts for which a package is missing are named and "
        "left out. Each part runs in a process of its own and ends before nine minutes. What it has measured is kept, row by "
        "row, in a JSON file beside its page: the same command goes on where it was stopped, or says in what the machine or its "
        "software differs. Until then there is [what is counted](../counted.md) and [what arithmetic says](../../scaling.md).\n\n"
        + markdown("Parts", rows, f"{ESTIMATED} A command of a part that needs several is given again.")
        + '\n| `ARGS=` | |\n| --- | --- |\n'
        "| `--plan` | prints this table with the state of each part, and exits |\n"
        "| `--part c` | one part, by letter or name; may be repeated |\n"
        "| `--dry` | tiny sizes on a CPU; its pages go to `outputs/hopper-dry` |\n"
        "| `--failed`, `--again` | runs what failed, or everything, of the chosen parts again |\n"
        "| `--out DIR`, `--scratch DIR` | where records and pages go; where checkpoints and logs go |\n"
        "| `--records`, `--pages` | writes records alone, one file a part; writes the pages of the records that are there |\n"
        "| `--without-deep-gemm` | measures without DeepGEMM, which needs `nvcc` |\n\n"
        "GPU timings are medians of several windows after a warm-up, in turns with BF16; each page has the clocks that "
        "`nvidia-smi` reported meanwhile. A target whose rows are incomplete gets no verdict.\n"
    )


def _link(part: Part, record: Record) -> str:
    name = f"{part.letter}, {part.name}"
    return f"[{name}]({part.name}.md)" if record.cells else name


def write(folder: Path, parts: Iterable[Part] = PARTS) -> None:
    """Write the pages of these parts from the records in ``folder``, and the page about all."""
    records = {part.letter: load(folder / f"{part.name}.json", part.name) for part in PARTS}
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        if records[part.letter].cells:
            (folder / f"{part.name}.md").write_text(page(part, records[part.letter]))
    (folder / "index.md").write_text(index(records))
