"""Measure one mode in one process: sample with the rollout engine, score with the trainer's model, compare.

Frameworks are reached through their adapters, by name. ``python -m jetrl_patch.parity.measure`` reads a pickled ``Job``
from standard input and writes a pickled result to the file given as its argument.
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

__all__ = ["measure"]


def measure(job: Job) -> dict[str, Any]:
    """Enable the mode, sample, score and compare; the process stays enabled.

    Returns:
        ``precision, align, tokens, logp_abs_diff_mean, logp_abs_diff_max, k3_kl, bit_equal_fraction`` and, for
        reference, ``scale_format``, ``tp``, ``backend`` and ``cut_layers`` (names of layers left in BF16, see ``on_cut``).
    """
    import torch

    from jetrl_patch.correction.mismatch import mismatch

    runtime.enable(job.config)
    samples = registry.rollout().sample(job)
    scores = registry.models().score(job, samples)
    rollout = torch.tensor([value for sample in samples for value in sample.log_probs], dtype=torch.float32)
    found = mismatch(scores, rollout, torch.ones_like(rollout))
    status = runtime.status()
    backend = status.backend if job.config.quantized_rollout else ""
    return {
        "precision": job.config.precision,
        "align": job.config.resolved_align,
        "tokens": found.tokens,
        "logp_abs_diff_mean": found.logp_abs_diff_mean,
        "logp_abs_diff_max": found.logp_abs_diff_max,
        "k3_kl": found.k3_kl,
        "bit_equal_fraction": found.bit_equal_fraction,
        "scale_format": job.config.scale_format,
        "tp": job.tp,
        "backend": backend,
        "cut_layers": list(status.cut),
    }


def main() -> None:
    """The child process of ``run.run_mode``."""
    job: Job = pickle.loads(sys.stdin.buffer.read())
    result: dict[str, Any]
    try:
        result = {"result": measure(job)}
    except JetrlError as error:
        result = {"error": (type(error).__name__, str(error), "")}
    except Exception as error:
        result = {"error": (type(error).__name__, str(error), traceback.format_exc())}
    Path(sys.argv[1]).write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main()
