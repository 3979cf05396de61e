"""Print the table; with ``--write``, write ``docs/scaling.md``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cost import parts
from benchmarks.cost.model import Load, gathered, rollout, step, table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"
LOADS = tuple(Load(samples=2048, prompt=512, longest=longest) for longest in (8192, 16384, 32768))


_PAGE = """\
# Speed: where FP8 pays

**Estimated, not measured:** no figure on this page comes from a GPU run. `python -m benchmarks.cost --write` computes them
from the [parts](#parts) below. The formulas are in `benchmarks/cost/`; a measured part replaces its row there.

What it says:

- **`linear` pays in dense models**, most in large ones and with short responses.
- **`exact` pays with short responses**, where it also skips a pass. At 32k tokens it loses: attention dominates, and its
  kernel is assumed to be slower than FlashAttention-3.
- **Mixtures gain little.** Blocks of 128 allow 2 ranks where BF16 has 4, which costs as much as FP8 gains.
- **In exact mode use few tensor-parallel ranks.** Ranks gather FP32 sums, {gathered:.0f} times the bytes of BF16's all-reduce
  with 8 of them.

A synchronous GRPO step on H100s, {samples} samples of {prompt} prompt tokens. Response lengths are exponential with a quarter
of the longest as mean. The last four columns say how many times faster than BF16 the whole step is. Each mode has the tensor
parallelism of the rollout that is fastest for it, in brackets.

{steps}

- *exact* skips the pass for old log-probs; *with the pass* is `old_log_probs=recompute`. `fp8-rollout` trains in BF16.
- With one rank on both sides the rollout of the 8B model is {alone:.2f} times as fast in FP8 (8k). Compare with the ranks
  that you run.
- The shares of rollout and old log-probs are those of BF16's step, whose update runs the forward twice (checkpointing).
- Left out: prefill, weight syncs, the optimizer, FSDP's communication, rewards, launches (CUDA graphs in all modes), and
  waits between phases. A part that is the same in all modes makes every ratio smaller.

Measured on CPUs: [every kernel](benchmarks/cpu.md), [whole steps](exactness.md#what-it-saves), [syncs](sync.md#measured).
Counted without a GPU: [launches and bytes](benchmarks/counted.md). To be measured: [on a Hopper
GPU](benchmarks/hopper/index.md).

## Against what Jet-RL published

{known}

## Parts

{parts}
"""


def page() -> str:
    """The text of ``docs/scaling.md``."""
    rows = list(table(parts.NETS, parts.WAYS, LOADS, parts.H100))
    load = LOADS[0]
    ways = {way.name: way for way in parts.WAYS}
    bf16, fp8 = (rollout(parts.NETS[0], ways[name], load, parts.H100, 1) for name in ("bf16", "linear"))
    return _PAGE.format(
        samples=load.samples, prompt=load.prompt, steps=_markdown(rows), known=_markdown(_known()), parts=_markdown(_parts()),
        alone=bf16 / fp8, gathered=gathered(8),
    )  # fmt: skip


def _known() -> list[dict[str, Any]]:
    figures = (
        ("whole step, 8B, 8k, `linear`", _ratio(0, "whole"), "1.16"),
        ("training, 8B, 8k, `linear`", _ratio(0, "update"), "up to 1.41"),
        ("rollout, 32B, 8k", _ratio(1, "rollout"), "up to 1.33"),
    )
    paper = "[paper](https://arxiv.org/abs/2601.14243)"
    return [{"what": what, "here": f"{here:.2f}", paper: theirs} for what, here, theirs in figures]


def _parts() -> list[dict[str, Any]]:
    gpu, peaks = parts.H100, parts.H100.peaks
    exact = next(way for way in parts.WAYS if way.name == "exact")
    hidden, inner = parts.ELEMENTWISE
    rows = (
        ("BF16 products, TFLOP/s", f"{peaks.bf16:.0f}", "cuBLAS on an H200, measured by others"),
        ("FP8 products: FProp and DGrad, WGrad", f"{peaks.fp8:.0f}, {peaks.fp8_wgrad:.0f}", "published kernels on Hopper"),
        ("memory, GB/s", f"{peaks.bandwidth:.0f}", "copies on an H200, measured by others, times 3.35 / 4.8"),
        ("memory for weights and KV cache", f"{parts.ROOM:.0%} of {gpu.memory / 1e9:.0f} GB", "assumed"),
        ("attention in training, share of the BF16 peak", parts.ATTENTION, "estimated, for FlashAttention-3"),
        ("exact attention against it: training, decoding", f"{exact.attention}, {exact.decoding}", "estimated"),
        ("FP8 decoding, share of what bytes allow", parts.DECODED, "estimated"),
        ("quantization, bytes per element: input, gradient", ", ".join(map(str, parts.QUANTIZED)), "counted"),
        ("norms and activations, bytes per token and layer", f"{hidden} × hidden + {inner} × inner", "estimated"),
        ("a sum over ranks, fixed cost in µs", f"{parts.LATENCY * 1e6:.0f}", "estimated"),
    )
    return [{"part": what, "value": value, "source": source} for what, value, source in rows]


def _ratio(net: int, phase: str) -> float:
    """BF16's time over that of ``linear`` at the shortest load."""
    ways = {way.name: way for way in parts.WAYS}
    times = [getattr(step(parts.NETS[net], ways[name], LOADS[0], parts.H100), phase) for name in ("bf16", "linear")]
    return float(times[0] / times[1])


def _markdown(rows: Sequence[dict[str, Any]]) -> str:
    names = list(rows[0])
    lines = [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
    return "\n".join(lines + [f"| {' | '.join(str(row[name]) for name in names)} |" for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/scaling.md")
    rows = list(table(parts.NETS, parts.WAYS, LOADS, parts.H100))
    if parser.parse_args().write:
        PAGE.write_text(page())
    shown = Table(title="How many times faster than BF16 (estimated)")
    for name in rows[0]:
        shown.add_column(name, justify="right")
    for row in rows:
        shown.add_row(*map(str, row.values()))
    Console().print(shown)


if __name__ == "__main__":
    main()
