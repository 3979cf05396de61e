"""Run each mode in its own process, so that patches, caches and memory do not carry over to the next."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from jetrl_patch import errors
from jetrl_patch.env import without_settings
from jetrl_patch.errors import JetrlError
from jetrl_patch.parity.modes import Job
from jetrl_patch.parity.relay import relayed
from jetrl_patch.parity.stock import STOCK
from jetrl_patch.progress import SILENT, Progress

__all__ = ["environment", "run_mode"]

#: the child's defaults; the user's environment takes precedence
_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


def run_mode(job: Job, verbose: bool = False, progress: Progress = SILENT) -> dict[str, Any]:
    """Measure one mode in a child process; see ``measure.measure`` for the result. The child's progress is shown here.

    Raises the child's JetrlError if the mode cannot be measured. For any other error, the message names it (with ``verbose``
    it holds the traceback), or holds the end of the child's output if it died.
    """
    with tempfile.TemporaryDirectory(prefix="jetrl-parity-") as folder:
        answer, stages = Path(folder) / "result", Path(folder) / "stages"
        progress.stage("starting a process")
        with relayed(stages, progress):
            child = subprocess.run(
                [sys.executable, "-m", "jetrl_patch.parity.measure", str(stages), str(answer)],
                input=pickle.dumps(job),
                env=environment(job),
                stdout=None if verbose else subprocess.PIPE,
                stderr=None if verbose else subprocess.STDOUT,
                check=False,
            )
        if not answer.exists():
            tail = b"" if child.stdout is None else child.stdout[-2000:]
            raise JetrlError(
                f"the process measuring {job.name} exited with status {child.returncode} and without a "
                f"result. Run again with --verbose. {tail.decode(errors='replace')}"
            )
        found: dict[str, Any] = pickle.loads(answer.read_bytes())
    if "error" in found:
        kind, text, trace = found["error"]
        error: type[JetrlError] = JetrlError if trace else getattr(errors, kind)
        raise error(_unforeseen(job, f"{kind}: {text}", trace, verbose) if trace else text)
    result: dict[str, Any] = found["result"]
    return result


def environment(job: Job) -> dict[str, str]:
    """The environment of a process that measures: this one's without ``JETRL_*``, quiet and offline, with what the way sets."""
    found = without_settings()
    found.update(STOCK[job.stock].environment if job.stock else ())
    for name, value in _ENVIRONMENT.items():
        found.setdefault(name, value)
    if job.tp == 1:
        found.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    return found


def _unforeseen(job: Job, line: str, trace: str, verbose: bool) -> str:
    """The message for an error of a framework: with ``--verbose`` its whole traceback, else the error alone."""
    if verbose:
        return f"measuring {job.name} failed:\n{trace}"
    words = " ".join(line.split())
    words = words if len(words) <= 240 else f"{words[:237]}..."
    return f"measuring {job.name} failed: {words.rstrip('.')}. Run again with --verbose for the traceback."
