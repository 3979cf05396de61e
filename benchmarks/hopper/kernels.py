"""Part b: the tables of ``benchmarks.gpu``, a cell each; the ceilings are measured first and kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.gpu import machine as machines
from benchmarks.gpu.floors import Peaks, floors
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.tables import TABLES, tiny_machine
from benchmarks.gpu.targets import targets
from benchmarks.gpu.timing import CudaTimer
from benchmarks.hopper.cells import Cell, Cells, Derived, Setup, whole

CEILINGS = "ceilings"


def cells(setup: Setup) -> dict[str, Cell]:
    machine = tiny_machine() if setup.dry else machines.this_machine()
    if not setup.deep_gemm and machine.backends.pop("deep_gemm", None) is not None:
        machine.missing["deep_gemm"] = "left out by --without-deep-gemm"
    setup.record.missing = machine.missing
    if CEILINGS in setup.record.cells:
        machine.ceilings = {row["ceiling"]: row["measured"] for row in setup.record.cells[CEILINGS].rows}
    found = {CEILINGS: Cell("Ceilings of this device", whole(lambda: _ceilings(machine, setup.dry)), 30)}
    for name, table in TABLES.items():
        run = table.tiny if setup.dry else table.run
        found[name] = Cell(table.title, lambda done, run=run: run(machine), table.seconds)  # type: ignore[misc]
    return found


def _ceilings(machine: Machine, dry: bool) -> Iterator[dict[str, Any]]:
    short = machine.timer
    if not dry:
        machine.timer = CudaTimer(seconds=2.0, warm=2.0)
    try:
        yield from machines.measure_ceilings(machine)
    finally:
        machine.timer = short


def derive(cells: Cells, planned: Sequence[str]) -> list[Derived]:
    found = [Derived("Targets", targets(cells))]
    top = {row["ceiling"]: row["measured"] for row in cells.get(CEILINGS, ())}
    if len(top) == 3:
        peaks = Peaks(top["BF16 TFLOP/s"], top["FP8 TFLOP/s"], top["FP8 TFLOP/s"], top["copy GB/s"])
        found.append(Derived("Floors computed from the ceilings", list(floors(peaks)), "Computed, not measured."))
    return found
