"""What the guards cost: ``python -m benchmarks.guards`` runs the demo and times them in each of its processes.

A guard only detects faults: digests of sent and serving weights, messages around a sync, the comparison of log-probs, the checks
that an engine may serve and that the other side is alive.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.harness import Row, main

#: guard -> module and functions that do nothing else
GUARDS: dict[str, tuple[tuple[str, str], ...]] = {
    "digests": tuple(("jetrl_patch.sync.digest", name) for name in ("start", "read", "Pieces.add", "Pieces.read")),
    "messages": tuple(("jetrl_patch.sync.protocol", name) for name in ("Manifest.encode", "encode_json", "decode_json", "audit")),
    "what arrives": tuple(("jetrl_patch.sync.receive", f"Receiver.{name}") for name in ("_check_arrival", "_compare")),
    "may serve": (("jetrl_patch.sync.receive", "Receiver.check_serving"),),
    "the other side lives": (("jetrl_patch.adapters.verl.transport", "Peer.check"),),
    "log-probs": (("jetrl_patch.trainer.audit", "Audit.compare"), ("jetrl_patch.trainer.audit", "Compared.add")),
}
_HOOK = '''
import functools, mmap, os, struct, threading, time
import wrapt

_inside = threading.local()
_page = []

def _add(index, seconds):
    if not _page:
        with open(os.path.join(os.environ["TIMED_GUARDS"], str(os.getpid())), "w+b") as file:
            file.truncate(4096)
            _page.append(mmap.mmap(file.fileno(), 4096))
    sum_, calls = struct.unpack_from("dd", _page[0], 16 * index)
    struct.pack_into("dd", _page[0], 16 * index, sum_ + seconds, calls + 1)

def _timed(index, function):
    @functools.wraps(function)
    def timed(*args, **kwargs):
        if getattr(_inside, "guard", False):
            return function(*args, **kwargs)
        _inside.guard, start = True, time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            _inside.guard = False
            _add(index, time.perf_counter() - start)
    return timed

def _arm(index, module_name, path):
    @wrapt.when_imported(module_name)
    def _(module):
        owner, name = module, path
        if "." in path:
            owner, name = getattr(module, path.split(".")[0]), path.split(".")[1]
        setattr(owner, name, _timed(index, getattr(owner, name)))

if os.environ.get("TIMED_GUARDS"):
    for _guard in GUARDS:
        _arm(*_guard)
'''


def guards(steps: int = 30, out: str = "outputs/guards") -> list[Row]:
    """Run the demo. Returns calls and seconds of each guard and of all, over all processes, with their share of the time."""
    with tempfile.TemporaryDirectory() as temporary:
        hook, folder = Path(temporary) / "hook", Path(temporary) / "timed"
        hook.mkdir()
        folder.mkdir()
        guards = [(index, *function) for index, functions in enumerate(GUARDS.values()) for function in functions]
        (hook / "sitecustomize.py").write_text(f"GUARDS = {guards!r}\n{_HOOK}")
        environ = {**os.environ, "PYTHONPATH": f"{hook}:{os.getcwd()}", "TIMED_GUARDS": str(folder)}
        command = [sys.executable, "-m", "examples.verl.demo", "--steps", str(steps), "--out", out]
        subprocess.run(command, env=environ, check=True)
        pages = [torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.float64).view(-1, 2) for file in folder.iterdir()]
    total = torch.stack(pages).sum(0).tolist()
    rows: list[Row] = [{"guard": name, "calls": int(n), "seconds": used} for name, (used, n) in zip(GUARDS, total, strict=False)]
    lines = map(json.loads, Path(out, "metrics.jsonl").read_text().splitlines())
    seconds = sum(line["data"].get("timing_s/step", 0.0) for line in lines if "data" in line)
    rows.append({"guard": "all", **{column: sum(row[column] for row in rows) for column in ("calls", "seconds")}})
    for row in rows:
        row["share of the steps"] = f"{100 * row['seconds'] / seconds:.2f}%"
    return rows


if __name__ == "__main__":
    main(guards)
