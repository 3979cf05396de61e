"""The runs' newest metrics as a file for Prometheus: for the textfile collector of node_exporter, which looks for ``*.prom``."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from jetrl_patch.cli.report.runs import ReportError, Run, number


def write_metrics(runs: Sequence[Run], path: Path) -> None:
    """Write ``jetrl_step`` and each ``jetrl/…`` metric, which becomes ``jetrl_…``, with the label ``run``, in one replacement.

    A metric that the last step lacks, such as one of the monitor, has its last value.

    Raises ReportError without prometheus_client, and OSError.
    """
    try:
        from prometheus_client import CollectorRegistry, Gauge, write_to_textfile
    except ImportError as error:
        text = f"--prometheus needs prometheus_client, which is not installed ({error}). Run pip install prometheus_client."
        raise ReportError(text) from error
    registry = CollectorRegistry()
    gauges: dict[str, Gauge] = {}
    for run in runs:
        newest: dict[str, object] = {"jetrl/step": max(run.steps, default=math.nan)}
        for step in sorted(run.steps):
            newest |= {name: value for name, value in run.steps[step].items() if name.startswith("jetrl/")}
        for name, value in newest.items():
            if (found := number(value)) is not None:
                metric = re.sub(r"\W", "_", name)
                if metric not in gauges:
                    gauges[metric] = Gauge(metric, name, ["run"], registry=registry)
                gauges[metric].labels(run=run.label).set(found)
    write_to_textfile(str(path), registry)
