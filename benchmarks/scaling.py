"""``python -m benchmarks.scaling --write`` writes ``docs/scaling.md``: what ``benchmarks.cost`` computes, and how sure that is.

Parts that ``make hopper`` has measured replace the assumed ones. ``--records DIR`` reads them from another folder.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cost import EIGHT, FP8_CACHE, H100, LARGE, MEDIUM, NETS, WAYS, Gpu, Load, Net, Way, step
from benchmarks.counted.__main__ import moved
from benchmarks.measured import measured
from scripts.tables import Row, filled, markdown

PAGE = Path(__file__).resolve().parents[1] / "docs" / "scaling.md"
RECORDS = PAGE.parent / "benchmarks" / "hopper"
LOADS = tuple(Load(samples=2048, prompt=512, longest=longest) for longest in (8192, 16384, 32768))
BF16, _, LINEAR, _, _, EXACT = WAYS
#: BF16 whose norms, rotary embedding and activation move as few bytes as those of exact mode
FUSED = BF16._replace(block="exact")
#: part -> its name on the page, and the factor that shows it in the page's unit
NAMED = {
    "bf16": ("BF16 products, TFLOP/s", 1), "fp8": ("FP8 FProp and DGrad, TFLOP/s", 1), "fp8_wgrad": ("FP8 WGrad, TFLOP/s", 1),
    "bandwidth": ("memory, GB/s", 1), "memory": ("memory of a GPU, GB", 1e-9),
    "room": ("share of it for the rollout's weights and KV cache", 1),
    "attention": ("attention in training, share of the BF16 peak", 1),
    "exact_attention": ("exact attention in training, relative to it", 1),
    "exact_decoding": ("exact decoding from a BF16 KV cache, share of what its bytes allow", 1),
    "cache_decoding": ("exact decoding from an FP8 KV cache, share of what its bytes allow", 1),
    "fp8_decoding": ("FP8 linears in decoding, share of what bytes allow", 1),
    "latency": ("a collective between ranks, fixed cost in µs", 1e6), "link": ("GB/s between ranks", 1e-9),
}  # fmt: skip
SOURCES = {
    "bf16": "cuBLAS on an H200, measured by others", **dict.fromkeys(("fp8", "fp8_wgrad"), "published kernels on Hopper"),
    "bandwidth": "copies on an H200, measured by others, times 3.35 / 4.8", "memory": "data sheet", "room": "assumed",
    "attention": "estimated, for FlashAttention-3", "cache_decoding": "estimated from instructions", "link": "data sheet",
}  # fmt: skip
#: parts that exact mode needs more than BF16; what makes up for the first is the second
OURS = ("cache_decoding", "exact_attention", "fp8", "fp8_wgrad", "fp8_decoding", "link", "latency")


def gain(net: Net, way: Way, load: Load, gpu: Gpu, phase: str = "whole", base: Way = BF16) -> float:
    """How many times faster than BF16 a step, or a phase of it, is."""
    before, now = (getattr(step(net, each, load, gpu), phase) for each in (base, way))
    return float(before / now)


def table(gpu: Gpu) -> Iterator[Row]:
    """One row per model and length: seconds and shares of the BF16 step, and how many times faster each other mode is."""
    for net in NETS:
        for load in LOADS:
            steps = {way.name: step(net, way, load, gpu) for way in WAYS}
            base = steps.pop(BF16.name)
            yield {
                "model": net.block.name, "GPUs": 8 * net.nodes, "longest": load.longest,
                "BF16 step, s": f"{base.whole:.0f} ({base.tp})", "rollout": f"{base.rollout / base.whole:.0%}",
                "old log-probs": f"{base.old_log_probs / base.whole:.0%}",
                **{name: f"{base.whole / found.whole:.2f} ({found.tp})" for name, found in steps.items()},
                "the last, if BF16 is fused": f"{gain(net, EXACT, load, gpu, base=FUSED):.2f}",
            }  # fmt: skip


def worse(gpu: Gpu) -> Iterator[Row]:
    """How many times faster than BF16 exact mode with an FP8 cache is if one part is a fifth worse, the most important first."""
    slower = {name: gpu.part(name) * (1 / 0.8 if name == "latency" else 0.8) for name in OURS}

    def row(what: str, parts: dict[str, float]) -> Row:
        found = gpu.with_parts(parts)
        gains = {net.block.name: f"{gain(net, EXACT, LOADS[1], found):.2f}" for net in (EIGHT, MEDIUM, LARGE)}
        return {"at 16k tokens": what, **gains}

    def said(name: str, value: float) -> str:
        title, unit = NAMED[name]
        return f"{title}: {value * unit:.4g} instead of {gpu.part(name) * unit:.4g}"

    yield row("as assumed", {})
    rows = [row(said(name, value), {name: value}) for name, value in slower.items()]
    yield from sorted(rows, key=lambda each: sum(float(value) for value in list(each.values())[1:]))
    first, second = OURS[:2]
    yield row(f"the first, and {said(second, 0.8)}", {first: slower[first], second: 0.8})


def known(gpu: Gpu) -> Iterator[Row]:
    """Published ratios beside those of the model."""
    cached = LINEAR._replace(cached=FP8_CACHE)
    jet, nemo = "[Jet-RL](https://arxiv.org/abs/2601.14243)", "[NeMo-RL]({})".format(
        "https://developer.nvidia.com/blog/run-high-throughput-reinforcement-learning-training-with-end-to-end-fp8-precision/"
    )
    rows = (
        ("whole step, 8B, `linear`", jet, gain(EIGHT, LINEAR, LOADS[0], gpu), "1.16"),
        ("training, 8B, `linear`", jet, gain(EIGHT, LINEAR, LOADS[0], gpu, "update"), "up to 1.41"),
        ("rollout, 32B", jet, gain(MEDIUM, LINEAR, LOADS[0], gpu, "rollout"), "up to 1.33"),
        ("whole step, 8B, `linear`", nemo, gain(EIGHT, LINEAR, LOADS[0], gpu), "1.15 to 1.25"),
        ("rollout, 8B, `linear` with an FP8 KV cache", nemo, gain(EIGHT, cached, LOADS[0], gpu, "rollout"), "about 1.48"),
    )
    for what, who, ours, theirs in rows:
        error = ours / float(theirs.split()[-1]) - 1
        yield {"what, at 8k tokens": what, "by": who, "here": f"{ours:.2f}", "published": theirs, "error": f"{error:+.0%}"}


def page(records: Path = RECORDS) -> str:
    """The text of ``docs/scaling.md``."""
    found = measured(records, H100)
    gpu = H100.with_parts(found)
    parts: list[dict[str, Any]] = [
        {
            "part": title, "value": f"{gpu.part(name) * unit:.4g}",
            "source": "measured" if name in found else SOURCES.get(name, "estimated"),
        }
        for name, (title, unit) in NAMED.items()
    ]  # fmt: skip
    for mode in (BF16.block, LINEAR.block, EXACT.block):
        bytes_of = " and ".join(f"{size / EIGHT.block.hidden:.0f}" for size in moved(EIGHT.block, mode))
        what = f"other launches of a layer of Qwen3-8B, bytes per token and hidden element, forward and backward: {mode}"
        parts.append({"part": what, "value": bytes_of, "source": "[counted](benchmarks/counted.md)"})
    texts = {
        "load": f"{LOADS[0].samples} samples of {LOADS[0].prompt}", "steps": markdown(list(table(gpu))),
        "worse": markdown(list(worse(gpu))), "known": markdown(list(known(gpu))), "parts": markdown(parts),
    }  # fmt: skip
    return filled(PAGE.read_text(), texts)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/scaling.md")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of make hopper's records")
    args = parser.parse_args(argv)
    if args.write:
        PAGE.write_text(page(args.records))
    gpu = H100.with_parts(measured(args.records, H100))
    print(markdown(list(table(gpu)), "How many times faster than BF16 (estimated)"), markdown(list(worse(gpu))), sep="\n")


if __name__ == "__main__":
    main()
