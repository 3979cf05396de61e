"""Peak memory and time of log-probs with their gradient, in blocks of tokens or in one pass: a table of ``docs/sync.md``.

``python -m benchmarks.logprob --way blocks`` runs one way in this process, because peak memory belongs to a process.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from benchmarks.harness import Row, extra_memory, main
from jetrl_patch.exact import logprob

TEMPERATURE = 0.7


def log_probs(way: str = "blocks", tokens: int = 8192, vocabulary: int = 151_936) -> Iterator[Row]:
    """One way, "blocks" or "one pass"."""
    labels = torch.arange(tokens) % vocabulary
    logits = torch.empty(tokens, vocabulary, dtype=torch.bfloat16).normal_().requires_grad_()

    def run() -> None:
        if way == "blocks":
            found = logprob.token_log_probs(logits, labels, TEMPERATURE, reuse=True)
        else:  # the definition
            found = torch.log_softmax(logits.float() / TEMPERATURE, dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        torch.autograd.grad(found.sum(), logits)

    start, size = time.perf_counter(), logits.nbytes
    extra = extra_memory(run)
    yield {
        "way": way, "tokens": tokens, "vocabulary": vocabulary, "logits, MiB": size / 2**20,
        "peak, of the logits": (size + extra) / size, "seconds": time.perf_counter() - start,
    }  # fmt: skip


if __name__ == "__main__":
    main(log_probs)
