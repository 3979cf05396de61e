"""The notebook: its cells in order, in one process whose event loop runs, as a Jupyter kernel's does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trl import LIMIT, needs_trl, run_python

ROOT = Path(__file__).parents[2]
RUN = """
import asyncio, json, os, sys
sys.path.insert(0, os.getcwd())
async def main():
    names = {"__name__": "__main__"}
    for cell in json.load(sys.stdin):
        exec(compile(cell, "cell", "exec"), names)
asyncio.run(main())
"""


@needs_trl
@pytest.mark.e2e
@pytest.mark.timeout(2 * LIMIT)
def test_every_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = json.loads((ROOT / "examples" / "trl" / "grpo.ipynb").read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells)
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    texts = ["".join(cell["source"]) for cell in code]
    (chosen,) = (i for i, cell in enumerate(code) if "parameters" in cell["metadata"].get("tags", ()))
    texts[chosen] += "\nSTEPS = 2"
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path))
    done = run_python(ROOT, "-c", RUN, given=json.dumps(texts))
    assert done.returncode == 0, done.stderr[-4000:]
    said = done.stdout.strip().splitlines()[-1]
    assert said.endswith(" tokens, all equal") and int(said.split()[0].replace(",", "")) > 1000
