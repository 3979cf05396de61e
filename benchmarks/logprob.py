"""Peak memory and time of log-probs and their gradient: in blocks of tokens, and in one pass over all of them.

``python -m benchmarks.logprob --way blocks`` runs one way in this process, because peak memory belongs to a process.
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path

import torch
from torch import Tensor

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


def run(way: str, tokens: int, vocabulary: int) -> None:
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
    allowed = 1.2 * size + logprob.BLOCK_BYTES
    print(
        f"{way}: {tokens} tokens, vocabulary {vocabulary}: logits {size / 2**20:.0f} MiB, with them at most "
        f"{(size + peak - before) / 2**20:.0f} MiB ({(size + peak - before) / size:.2f} times the logits), "
        f"allowed {allowed / 2**20:.0f} MiB; {seconds:.1f} s; gradient {float(gradient[:16].detach().float().norm()):.6g}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=["blocks", "one pass"], default="blocks")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    args = parser.parse_args()
    run(args.way, args.tokens, args.vocabulary)


if __name__ == "__main__":
    main()
