"""The targets of part b and whether its tables meet them.

A requirement about a set of rows is met if every row of the set was measured and meets it. One row that does not is a miss; a set
with a row missing and none that misses has no verdict.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from benchmarks.harness import Row
from benchmarks.shapes import MODELS, TRAIN

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
    "head": "lm_head and log-probs",
    "gradients": "DGrad and WGrad, including quantization",
    "profile": "Kernels of a block's step",
}
#: what backend="auto" picks, in order of preference
OURS = ("deep_gemm", "triton")
#: quantizers that every backend has, and the one that writes both layouts from one read
QUANTIZERS, TWO_LAYOUTS = ("activation 1x128", "tokens 128x1", "weight 128x128"), "both layouts"
#: [M, K] that they are measured on; the targets are at the most rows
QUANTIZED = ((64, 3584), (2048, 3584), (16384, 3584), (16384, 18944))
M = TRAIN[-1]
MET, MISSED, UNKNOWN = "met", "MISSED", "not measured"


def targets(tables: Tables) -> list[Row]:
    """One row per target: the requirement, the result, and the verdict. ``tables`` are named as in ``TITLES``."""
    ours = serving(tables)
    found = list(_quantizers(tables.get("quantizers", ()), ours))
    for model in [model.name for model in MODELS]:
        columns = ("products", "us"), ("layers", "us"), ("layers", "saved MiB")
        products, layers, saved = (sums(tables, name, column, model, M, 4) for name, column in columns)
        decode, blocks = (sums(tables, name, "us", model, rows, 1) for name, rows in (("decode", 64), ("blocks", M)))
        fp8 = [us for way, us in products.items() if way != BF16 and not math.isnan(us)]
        best = min(fp8, default=math.nan) / products.get(ours, math.nan)
        found += [
            least(f"FProp, {model}, M = {M}, {ours}: BF16 / FP8", 1.6, ratio(products, BF16, ours)),
            least(f"FProp, {model}, M = {M}, {ours}: the best backend / this", 0.95, best),
            least(f"decoding, {model}, M = 64, {ours}, with quantization: BF16 / FP8", 1.5, ratio(decode, BF16, ours)),
            least(f"linears forward and backward, {model}, M = {M}, {ours}: BF16 / FP8", 1.41, ratio(layers, BF16, ours)),
            most(f"saved activations, {model}, M = {M}, {ours}: FP8 / BF16", 0.55, ratio(saved, ours, BF16)),
            least(f"a block, {model}, M = {M}, {ours}, fused: compiled BF16 / FP8", 1.0, ratio(blocks, COMPILED, ours + FUSED)),
        ]
    return found


def serving(tables: Tables) -> str:
    """The backend that a run would use: the first of ``OURS`` that was measured. Part a says whether it may."""
    measured = {row["way"] for name in ("products", "layers", "decode", "quantizers") for row in tables.get(name, ())}
    return next((name for name in OURS if name in measured), OURS[-1])


def _quantizers(rows: Sequence[Row], ours: str) -> Iterator[Row]:
    """The slowest of each kind. Those of a fused producer or of a backward pass have no target."""
    shares = {(row["quantizer"], row["M, K"]): row["of the copy"] for row in rows if row["way"] == ours}
    shapes = [f"{rows}, {columns}" for rows, columns in QUANTIZED if rows == M]
    alone = [shares.get((name, shape), math.nan) for name in QUANTIZERS for shape in shapes]
    both = [1 / shares.get((TWO_LAYOUTS, shape), math.nan) for shape in shapes]
    yield least(f"quantizers at M = {M}, {ours}, the slowest: bandwidth / a copy's", 0.85, *alone)
    yield most(f"both layouts from one read at M = {M}, {ours}: time / its memory-bandwidth floor", 1.1, *both)


def sums(tables: Tables, name: str, column: str, model: str, size: int, count: int) -> dict[str, float]:
    """Way -> sum of a column over the ``count`` rows of a model at ``size`` rows; a way that lacks one is left out."""
    found: dict[str, list[float]] = {}
    for row in tables.get(name, ()):
        if row["model"] == model and row["M"] == size and isinstance(row[column], float):
            found.setdefault(row["way"], []).append(row[column])
    return {way: sum(values) for way, values in found.items() if len(values) == count}


def ratio(values: Mapping[str, float], above: str, below: str) -> float:
    return values.get(above, math.nan) / values.get(below, math.nan)


def least(target: str, bound: float, *found: float) -> Row:
    """The smallest of the figures must be at least ``bound``."""
    worst = min(_known(found), default=math.nan)
    return _judged(target, f"at least {bound:g}", worst, worst >= bound, found)


def most(target: str, bound: float, *found: float) -> Row:
    """The largest of the figures must be at most ``bound``."""
    worst = max(_known(found), default=math.nan)
    return _judged(target, f"at most {bound:g}", worst, worst <= bound, found)


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _judged(target: str, required: str, worst: float, good: bool, found: Sequence[float]) -> Row:
    """There is no verdict if a figure is missing and the others are good."""
    unknown = math.isnan(worst) or (good and len(_known(found)) < len(found))
    verdict = UNKNOWN if unknown else MET if good else MISSED
    return {"target": target, "required": required, "found": "" if unknown else worst, "verdict": verdict}
