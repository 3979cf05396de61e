"""Measure one mode in one process: sample with the rollout engine, score with the trainer's model, compare.

Frameworks are reached through their adapters, by name. ``python -m jetrl_patch.parity.measure`` reads a pickled ``Job``
from standard input and writes its progress and a pickled result to the two files given as its arguments.
"""

from __future__ import annotations

import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

from jetrl_patch import registry, runtime
from jetrl_patch.errors import JetrlError
from jetrl_patch.parity.modes import Job
from jetrl_patch.parity.relay import Sender
from jetrl_patch.progress import SILENT, Progress

__all__ = ["measure"]


def measure(job: Job, progress: Progress = SILENT) -> dict[str, Any]:
    """Enable the mode (a stock one needs nothing enabled), sample, score and compare; the process stays enabled.

    Returns:
        ``precision, align, tokens, logp_abs_diff_mean, logp_abs_diff_max, k3_kl, bit_equal_fraction``, ``route_mismatch`` (the
        share of token and block with other experts on the two sides; None without a mixture) and, for reference,
        ``scale_format``, ``tp``, ``backend``, ``attention`` and ``cut_layers`` (names of layers left in BF16, see
        ``on_cut``). With ``job.cost`` also ``rollout_tokens_per_second``, ``trainer_tokens_per_second`` and ``execution``
        ("compiled", "graphs" or "eager": how the engine ran the model).
    """
    progress.stage("loading torch")
    import torch

    from jetrl_patch.correction.mismatch import mismatch

    if job.stock is None:
        progress.stage("enabling the mode")
        runtime.enable(job.config)
    sampled = registry.rollout().sample(job, progress)
    scored = registry.models().score(job, sampled.samples, progress)
    rollout = torch.tensor([value for sample in sampled.samples for value in sample.log_probs], dtype=torch.float32)
    found = mismatch(scored.log_probs, rollout, torch.ones_like(rollout))
    status = runtime.status()
    backend, attention = (status.backend, status.attention) if job.config.quantized_rollout else ("", "")
    precision, align = job.label
    cost = {
        "execution": sampled.execution,
        "rollout_tokens_per_second": sampled.tokens_per_second,
        "trainer_tokens_per_second": scored.tokens_per_second,
    }
    return {
        "precision": precision,
        "align": align,
        "tokens": found.tokens,
        "logp_abs_diff_mean": found.logp_abs_diff_mean,
        "logp_abs_diff_max": found.logp_abs_diff_max,
        "k3_kl": found.k3_kl,
        "bit_equal_fraction": found.bit_equal_fraction,
        "route_mismatch": None if scored.routes is None else scored.routes.mismatch,
        "scale_format": job.config.scale_format,
        "tp": job.tp,
        "backend": backend,
        "attention": attention,
        "cut_layers": list(status.cut),
        **(cost if job.cost else {}),
    }


def main() -> None:
    """The child process of ``run.run_mode``."""
    stages, answer = map(Path, sys.argv[1:])
    job: Job = pickle.loads(sys.stdin.buffer.read())
    result: dict[str, Any]
    try:
        with stages.open("a", buffering=1, encoding="utf-8") as file:
            result = {"result": measure(job, Sender(file))}
    except JetrlError as error:
        result = {"error": (type(error).__name__, str(error), "")}
    except Exception as error:
        result = {"error": (type(error).__name__, str(error), traceback.format_exc())}
    answer.write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main()
