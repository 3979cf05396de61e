"""Read TensorBoard event files, as written by verl's and OpenRLHF's ``tensorboard`` loggers. Needs tensorboard."""

from __future__ import annotations

import importlib
from pathlib import Path

from jetrl_patch.errors import explain
from jetrl_patch.report.jsonl import Keep, bare
from jetrl_patch.report.runs import ReportError, Run

__all__ = ["read_events"]


def read_events(path: Path, keep: Keep, notes: list[str]) -> list[Run]:
    """The one run of an event file, or [] if it holds no scalar. A record truncated by a crash is ignored.

    Raises:
        ReportError: tensorboard is not installed.
    """
    try:
        loader = importlib.import_module("tensorboard.backend.event_processing.event_file_loader")
        tensors = importlib.import_module("tensorboard.util.tensor_util")
    except ImportError as error:
        raise ReportError(
            explain(str(path), required="the tensorboard package", found=error, fix="run pip install tensorboard")
        ) from error
    run = Run("", "", 0)
    for event in loader.EventFileLoader(str(path)).Load():
        for value in event.summary.value:
            name = bare(value.tag)
            if keep(name) and value.metadata.plugin_data.plugin_name == "scalars":
                run.steps.setdefault(event.step, {})[name] = float(tensors.make_ndarray(value.tensor).item())
    return [run] if run.steps else []
