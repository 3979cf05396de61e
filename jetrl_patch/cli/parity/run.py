"""Measure each mode in a process of its own, so that patches, caches and memory do not carry over to the next."""

from __future__ import annotations

import contextlib
import json
import pickle
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from jetrl_patch import registry, session
from jetrl_patch.config.environment import without_settings
from jetrl_patch.errors import JetrlError
from jetrl_patch.measure.parity import STOCK, Job, standard_error
from jetrl_patch.progress import SILENT, Progress

# ---- Progress of the measuring process: it appends its calls to a file, and the parent repeats them
# Not through a pipe: the engine's own processes would inherit it, and one that stays behind would keep it open.

#: seconds between two looks at the file
_EVERY = 0.2


class Sender(Progress):
    """A ``Progress`` that writes each call to a file, in the measuring process. The file must be line-buffered."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def stage(self, name: str, total: int = 0, unit: str = "") -> None:
        self._send(name, total, unit)

    def done(self, count: int) -> None:
        self._send(count)

    def _send(self, *call: str | int) -> None:
        with contextlib.suppress(OSError):
            self._file.write(json.dumps(call) + "\n")


@contextlib.contextmanager
def relayed(file: Path, progress: Progress) -> Iterator[None]:
    """While the block runs, repeat on ``progress`` every call that a ``Sender`` writes to the file."""
    ended = threading.Event()
    thread = threading.Thread(target=_follow, args=(file, progress, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _follow(file: Path, progress: Progress, ended: threading.Event) -> None:
    at, last = 0, False
    while not last:
        last = ended.wait(_EVERY)  # one more look after the end
        content = file.read_bytes()[at:] if file.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        at += len(whole)
        for line in whole.splitlines():
            call = json.loads(line)
            progress.stage(*call) if len(call) == 3 else progress.done(*call)


# ---- Measure one mode in one process: sample with the rollout engine, score with the trainer's model, compare
# Frameworks are reached through their adapters, by name. ``python -m jetrl_patch.cli.parity.run`` reads a pickled ``Job``
# from standard input and writes its progress and a pickled result to the two files given as its arguments.

#: what a result takes from ``measure.mismatch``
_FIGURES = ("tokens", "logp_abs_diff_mean", "logp_abs_diff_max", "k3_kl", "bit_equal_fraction")


def measure(job: Job, progress: Progress = SILENT) -> dict[str, Any]:
    """Enable the mode (a stock one needs nothing enabled), sample, score and compare; the process stays enabled.

    Returns:
        ``precision, align, tokens, logp_abs_diff_mean, logp_abs_diff_max, k3_kl, bit_equal_fraction``, ``standard_error`` (of
        the mean), ``logp_mean`` (of the rollout's log-probs), ``route_mismatch`` (the share of routing decisions, one per token
        and layer, with other experts on the two sides; None for a dense model) and, for reference, ``scale_format``, ``tp``,
        ``backend``, ``attention`` and ``cut_layers`` (names of layers left in BF16, see ``on_cut``). With ``job.cost`` also
        ``rollout_tokens_per_second``, ``trainer_tokens_per_second`` and ``execution`` ("compiled", "graphs" or "eager": how the
        engine ran the model). With ``job.full`` also ``full`` and with ``job.explain`` ``steps``, see ``Full`` and ``Step`` in
        ``jetrl_patch.measure.parity``.
    """
    progress.stage("loading torch")
    import torch

    from jetrl_patch.cli.parity.explain import explain
    from jetrl_patch.cli.parity.score import score
    from jetrl_patch.measure.mismatch import mismatch

    if job.stock is None:
        progress.stage("enabling the mode")
        session.enable(job.config)
    sampled = registry.rollout().sample(job, progress)
    scored = score(job, sampled.samples, progress)
    steps = explain(job, sampled.samples, progress) if job.explain else []
    rollout = torch.tensor([value for sample in sampled.samples for value in sample.log_probs], dtype=torch.float32)
    found = mismatch(scored.log_probs, rollout, torch.ones_like(rollout))
    status = session.status()
    result = {
        **dict(zip(("precision", "align"), job.label, strict=True)),
        **{name: getattr(found, name) for name in _FIGURES},
        "standard_error": standard_error(scored.log_probs - rollout, sampled.samples),
        "logp_mean": float(rollout.mean(dtype=torch.float64)),
        "route_mismatch": None if scored.routes is None else scored.routes.mismatch,
        "scale_format": job.config.scale_format,
        "tp": job.tp,
        "backend": status.backend if job.config.quantized_rollout else "",
        "attention": status.attention if job.config.quantized_rollout else "",
        "cut_layers": list(status.cut),
    }
    if job.cost:
        result["execution"] = sampled.execution
        result["rollout_tokens_per_second"] = sampled.tokens_per_second
        result["trainer_tokens_per_second"] = scored.tokens_per_second
    if scored.full is not None:
        result["full"] = asdict(scored.full)
    if job.explain:
        result["steps"] = [asdict(step) for step in steps]
    return result


def main() -> None:
    """The child process of ``run_mode``."""
    stages, answer = map(Path, sys.argv[1:])
    job: Job = pickle.loads(sys.stdin.buffer.read())
    result: Any
    try:
        with stages.open("a", buffering=1, encoding="utf-8") as file:
            result = measure(job, Sender(file))
    except JetrlError as error:
        result = error
    except Exception as error:  # which the parent may be unable to unpickle
        result = f"{type(error).__name__}: {error}", traceback.format_exc()
    answer.write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main()


# ---- Run a mode in such a process ----------------------------------------------------------------

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
    """Measure one mode in a child process; see ``measure`` for the result. The child's progress is shown here.

    Raises the child's JetrlError if the mode cannot be measured. For any other error, the message names it (with ``verbose``
    it holds the traceback), or holds the end of the child's output if it died.
    """
    with tempfile.TemporaryDirectory(prefix="jetrl-parity-") as folder:
        answer, stages = Path(folder) / "result", Path(folder) / "stages"
        progress.stage("starting a process")
        with relayed(stages, progress):
            child = subprocess.run(
                [sys.executable, "-m", "jetrl_patch.cli.parity.run", str(stages), str(answer)],
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
        found: dict[str, Any] | JetrlError | tuple[str, str] = pickle.loads(answer.read_bytes())
    if isinstance(found, JetrlError):
        raise found
    if isinstance(found, dict):
        return found
    text, trace = found
    if verbose:
        raise JetrlError(f"measuring {job.name} failed:\n{trace}")
    words = " ".join(text.split())
    words = words if len(words) <= 240 else f"{words[:237]}..."
    raise JetrlError(f"measuring {job.name} failed: {words.rstrip('.')}. Run again with --verbose for the traceback.")


def environment(job: Job) -> dict[str, str]:
    """The environment of a measuring process: this one's without ``JETRL_*``, plus the job's variables, quiet and offline."""
    found = {**_ENVIRONMENT, **without_settings(), **dict(STOCK[job.stock].environment if job.stock else ())}
    if job.tp == 1:
        found.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    return found
