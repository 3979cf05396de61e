"""The targets of part b, and whether its tables meet them.

A target about several figures is met if all were measured and meet it. One figure that does not meet it is a miss. If a figure is
missing and none misses, there is no verdict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from benchmarks.shapes import TRAIN
from scripts.tables import Row

Tables = Mapping[str, Sequence[Row]]
BF16, COMPILED, FUSED = "bf16", "bf16, compiled", ", fused"
#: name of a table -> its title
TITLES = {
    "layers": "A linear layer, forward and backward",
    "products": "FProp, quantized operands",
    "decode": "Decoding: the linears of a block, including quantization",
    "quantizers": "Quantizers vs. a copy",
    "blocks": "A block without attention, forward and backward",
    "attention": "Attention: training, and decoding over long contexts",
}
#: what backend="auto" picks, in order of preference
OURS = ("deep_gemm", "triton")
#: quantizers of every backend, and the one that writes both layouts from one read
QUANTIZERS, TWO_LAYOUTS = ("activation 1x128", "tokens 128x1", "weight 128x128"), "both layouts"
#: [M, K] that they are measured on. The targets hold at the largest M
QUANTIZED = ((16384, 4096), (2048, 4096), (64, 4096), (16384, 12288))
M = TRAIN[-1]


def targets(tables: Tables) -> list[Row]:
    """One row per target: the requirement, the result and the verdict. ``tables`` are named as in ``TITLES``."""
    measured = {row["way"] for name in ("products", "layers", "decode", "quantizers") for row in tables.get(name, ())}
    ours = next((name for name in OURS if name in measured), OURS[-1])  # what a run would use; part a says whether it may
    shares = {(row["quantizer"], row["M, K"]): row["of the copy"] for row in tables.get("quantizers", ()) if row["way"] == ours}
    shapes = [f"{rows}, {columns}" for rows, columns in QUANTIZED if rows == M]
    alone = [shares.get((name, shape), math.nan) for name in QUANTIZERS for shape in shapes]
    both = [1 / shares.get((TWO_LAYOUTS, shape), math.nan) for shape in shapes]
    at = f"M = {M}, {ours}"
    found = [
        judged(f"quantizers at {at}, the slowest: bandwidth / a copy's", alone, least=0.85),
        judged(f"both layouts from one read at {at}: time / its memory-bandwidth floor", both, most=1.1),
    ]
    columns = ("products", "us"), ("layers", "us"), ("layers", "saved MiB")
    products, layers, saved = (sums(tables, name, column, M, 4) for name, column in columns)
    decode, blocks = (sums(tables, name, "us", rows, 1) for name, rows in (("decode", 64), ("blocks", M)))
    fp8 = [us for way, us in products.items() if way != BF16 and not math.isnan(us)]
    best = min(fp8, default=math.nan) / products.get(ours, math.nan)
    return [
        *found,
        judged(f"FProp, {at}: BF16 / FP8", [ratio(products, BF16, ours)], least=1.6),
        judged(f"FProp, {at}: the best backend / this", [best], least=0.95),
        judged(f"decoding, M = 64, {ours}, with quantization: BF16 / FP8", [ratio(decode, BF16, ours)], least=1.5),
        judged(f"linears forward and backward, {at}: BF16 / FP8", [ratio(layers, BF16, ours)], least=1.41),
        judged(f"saved activations, {at}: FP8 / BF16", [ratio(saved, ours, BF16)], most=0.55),
        judged(f"a block, {at}, fused: compiled BF16 / FP8", [ratio(blocks, COMPILED, ours + FUSED)], least=1.0),
    ]


def sums(tables: Tables, name: str, column: str, size: int, count: int) -> dict[str, float]:
    """Way -> sum of a column over its ``count`` rows for ``size`` tokens, for the ways that have all of them."""
    found: dict[str, list[float]] = {}
    for row in tables.get(name, ()):
        if row["M"] == size and isinstance(row[column], float):
            found.setdefault(row["way"], []).append(row[column])
    return {way: sum(values) for way, values in found.items() if len(values) == count}


def ratio(values: Mapping[str, float], above: str, below: str) -> float:
    return values.get(above, math.nan) / values.get(below, math.nan)


def judged(target: str, figures: Sequence[float], least: float = 0.0, most: float = math.inf) -> Row:
    """The verdict on figures that must all lie between ``least`` and ``most``."""
    known = [figure for figure in figures if not math.isnan(figure)]
    missed = any(not least <= figure <= most for figure in known)
    whole = len(known) == len(figures) > 0
    return {
        "target": target, "required": f"at least {least:g}" if least else f"at most {most:g}",
        "found": (min if least else max)(known) if missed or whole else "",
        "verdict": "MISSED" if missed else "met" if whole else "not measured",
    }  # fmt: skip
