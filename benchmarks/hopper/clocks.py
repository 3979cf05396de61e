"""The clocks and power of this process's GPU while something runs, as ``nvidia-smi`` reports them once a second."""

from __future__ import annotations

import contextlib
import statistics
import subprocess

from benchmarks.gpu.device import smi_name

QUERY = "--query-gpu=clocks.sm,power.draw,temperature.gpu"
NAMES = ("SM MHz", "W", "°C")


class Clocks:
    """Samples in a process of its own; at the end ``found`` has medians and the lowest clock, or nothing without a sampler."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}
        self._sampler: subprocess.Popen[str] | None = None

    def __enter__(self) -> Clocks:
        name = smi_name()
        if name is None:
            return self
        command = ["nvidia-smi", f"--id={name}", QUERY, "--format=csv,noheader,nounits", "-l", "1"]
        with contextlib.suppress(OSError):  # there is none
            self._sampler = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, text=True
            )
        return self

    def __exit__(self, *error: object) -> None:
        if self._sampler is not None:
            self._sampler.terminate()
            self.found = summary(self._sampler.communicate()[0])


def summary(text: str) -> dict[str, float]:
    """Medians of the sampled columns, and the lowest clock. Lines that are cut or hold no number are passed over."""
    samples = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            values = [float(part) for part in line.split(",")]
            if len(values) == len(NAMES):
                samples.append(values)
    if not samples:
        return {}
    columns = list(zip(*samples, strict=True))
    medians = {name: statistics.median(column) for name, column in zip(NAMES, columns, strict=True)}
    return {**medians, "lowest SM MHz": min(columns[0])}
