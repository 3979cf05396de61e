"""Peak memory and time of log-probs and their gradient: in blocks of tokens, and in one pass over all of them.

``python -m benchmarks.logprob --way blocks`` runs one way in this process, because peak memory belongs to a process.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness import Row, main
from jetrl_patch.exact import logprob


def one_pass(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """The definition over all tokens at once, as it was computed before."""
    x = logits.float() / temperature
    return torch.log_softmax(x, dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def resident(figure: str) -> int:
    """Bytes of this process in memory: now (``VmRSS``), or at most (``VmHWM``)."""
    found = re.search(rf"{figure}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def log_probs(way: str = "blocks", tokens: int = 8192, vocabulary: int = 151_936) -> Iterator[Row]:
    """One way, "blocks" or "one pass"."""
    labels = torch.arange(tokens) % vocabulary
    logits = torch.empty(tokens, vocabulary, dtype=torch.bfloat16).normal_().requires_grad_()
    size = logits.nbytes
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    start = time.perf_counter()
    if way == "blocks":
        found = logprob.token_log_probs(logits, labels, 0.7, reuse=True)
    else:
        found = one_pass(logits, labels, 0.7)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    seconds = time.perf_counter() - start
    peak = resident("VmHWM")
    yield {
        "way": way, "tokens": tokens, "vocabulary": vocabulary, "logits, MiB": size / 2**20,
        "with them at most, MiB": (size + peak - before) / 2**20, "of the logits": (size + peak - before) / size,
        "allowed, MiB": (1.2 * size + logprob.BLOCK_BYTES) / 2**20, "seconds": seconds,
        "gradient": float(gradient[:16].detach().float().norm()),
    }  # fmt: skip


if __name__ == "__main__":
    main(log_probs)
