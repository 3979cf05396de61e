"""The targets of a run and whether it met them, computed from the tables of the parts.

A requirement about a set of rows is met if every row of the set was measured and meets it. One row that does not is a miss; a set
with a row missing and none that misses has no verdict.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu.block import COMPILED, FUSED
from benchmarks.gpu.parts import QUANTIZED, QUANTIZERS, TWO_LAYOUTS
from benchmarks.gpu.shapes import MODELS, RANKS, SMALL, TRAIN, Model

Row = Mapping[str, Any]
Tables = Mapping[str, Sequence[Row]]
#: what backend="auto" picks, in order of preference
OURS = ("deep_gemm", "triton")
#: tables that must find equal bits
EQUAL = ("rows", "fused")
M = TRAIN[-1]
MET, MISSED, UNKNOWN = "met", "MISSED", "not measured"


def targets(rows: Tables) -> list[dict[str, Any]]:
    """One row per target: the requirement, the result, and the verdict. ``rows`` are those of each table, by its name."""
    ours = serving(rows)
    found = [*_rows(rows.get("rows", ()), ours), *_fused(rows.get("fused", ()), ours)]
    found += _quantizers(rows.get("quantizers", ()), ours)
    for model in [model.name for model in MODELS]:
        products = _sums(rows.get("products", ()), model, "us", M)
        layers, saved = (_sums(rows.get("layers", ()), model, key, M) for key in ("ms", "saved MiB"))
        step = {row["backend"]: row["us per block"] for row in rows.get("decode", ()) if row["model"] == model and row["M"] == 64}
        found += [
            _least(f"FProp, {model}, M = {M}, {ours}: BF16 / FP8", 1.6, _ratio(products, "bf16", ours)),
            _least(f"FProp, {model}, M = {M}, {ours}: the best backend / this", 0.95, _best(products, ours)),
            _least(f"decoding, {model}, M = 64, {ours}, with quantization: BF16 / FP8", 1.5, _ratio(step, "bf16", ours)),
            _least(f"linears forward and backward, {model}, M = {M}, {ours}: BF16 / FP8", 1.41, _ratio(layers, "bf16", ours)),
            _most(f"saved activations, {model}, M = {M}, {ours}: FP8 / BF16", 0.55, _ratio(saved, ours, "bf16")),
            _least(f"a block, {model}, M = {M}, {ours}, fused: compiled BF16 / FP8", 1.0, _block(rows, model, ours)),
        ]
    return found


def serving(rows: Mapping[str, Sequence[Row]]) -> str:
    """The backend that a run would use: the first of ``OURS`` that was measured and whose rows never differed."""
    tables = (*EQUAL, "products", "layers", "decode", "quantizers")
    measured = {row["backend"] for name in tables for row in rows.get(name, ())}
    refused = {row["backend"] for name in EQUAL for row in rows.get(name, ()) if row["verdict"] != "may serve"}
    return next((name for name in OURS if name in measured - refused), OURS[-1])


def _rows(rows: Sequence[Row], ours: str, models: Sequence[Model] = MODELS[:1]) -> Iterator[dict[str, Any]]:
    whole = {(model.name, linear.name) for model in models for linear in model.linears}
    yield from _equal(rows, ours, whole, ("model", "linear"), "rows do not depend on the batch", f"equal to M = {M}")


def _fused(rows: Sequence[Row], ours: str, models: Sequence[Model] = (SMALL, *MODELS)) -> Iterator[dict[str, Any]]:
    whole = {(m.name, ranks, linear.name) for m in models for ranks in RANKS for linear, _ in m.layouts(ranks)}
    target = "rows do not depend on what a weight is fused with"
    yield from _equal(rows, ours, whole, ("model", "TP", "linear"), target, "equal to the whole weights'")


def _equal(
    rows: Sequence[Row], ours: str, whole: set[tuple[Any, ...]], keys: tuple[str, ...], target: str, required: str
) -> Iterator[dict[str, Any]]:
    for backend in dict.fromkeys([row["backend"] for row in rows] or [ours]):
        mine = [row for row in rows if row["backend"] == backend]
        wrong = [row for row in mine if row["verdict"] != "may serve"]
        complete = {tuple(row[key] for key in keys) for row in mine} >= whole
        found = "" if not mine else (wrong or mine)[0]["found"]
        met = False if wrong else True if complete else None
        yield _row(f"{target}, {backend}", required, found, met)


def _quantizers(rows: Sequence[Row], ours: str) -> Iterator[dict[str, Any]]:
    """The slowest of each kind. Those of a fused producer or of a backward pass have no target."""
    shapes = [f"{rows}, {columns}" for rows, columns in QUANTIZED if rows == M]
    shares = {
        (row["quantizer"], row["M, K"]): row["of the copy"] for row in rows if row["backend"] == ours and row["M, K"] in shapes
    }
    alone = [(name, shape) for name in QUANTIZERS for shape in shapes]
    both = [(TWO_LAYOUTS, shape) for shape in shapes]
    yield _all_least(f"quantizers at M = {M}, {ours}, the slowest: bandwidth / a copy's", 0.85, shares, alone)
    inverse = {key: 1 / share for key, share in shares.items() if not math.isnan(share)}
    yield _all_most(f"both layouts from one read at M = {M}, {ours}: time / its memory-bandwidth floor", 1.1, inverse, both)


def _sums(rows: Sequence[Row], model: str, key: str, size: int) -> dict[str, float]:
    """Sums over the four linears of a block; a backend without a number for one of them is left out."""
    sums: dict[str, list[float]] = {}
    for row in rows:
        if row["model"] == model and row["M"] == size and isinstance(row[key], float):
            sums.setdefault(row["backend"], []).append(row[key])
    return {name: sum(values) for name, values in sums.items() if len(values) == 4}


def _block(tables: Tables, model: str, ours: str) -> float:
    """Compiled BF16 over the block with fused producers."""
    ms = {row["backend"]: row["ms"] for row in tables.get("blocks", ()) if row["model"] == model and row["M"] == M}
    return _ratio(ms, COMPILED, ours + FUSED)


def _ratio(values: Mapping[str, float], above: str, below: str) -> float:
    return values[above] / values[below] if above in values and below in values else math.nan


def _best(values: Mapping[str, float], ours: str) -> float:
    others = [value for name, value in values.items() if name != "bf16" and not math.isnan(value)]
    return min(others) / values[ours] if ours in values else math.nan


def _least(target: str, least: float, found: float) -> dict[str, Any]:
    return _row(target, f"at least {least:g}", found, None if math.isnan(found) else found >= least)


def _most(target: str, most: float, found: float) -> dict[str, Any]:
    return _row(target, f"at most {most:g}", found, None if math.isnan(found) else found <= most)


def _all_least(target: str, least: float, values: Mapping[Any, float], wanted: Sequence[Any]) -> dict[str, Any]:
    return _of_all(_least(target, least, _worst(min, values, wanted)), values, wanted)


def _all_most(target: str, most: float, values: Mapping[Any, float], wanted: Sequence[Any]) -> dict[str, Any]:
    return _of_all(_most(target, most, _worst(max, values, wanted)), values, wanted)


def _worst(worse: Any, values: Mapping[Any, float], wanted: Sequence[Any]) -> float:
    return float(worse([values[key] for key in wanted if key in values and not math.isnan(values[key])], default=math.nan))


def _of_all(row: dict[str, Any], values: Mapping[Any, float], wanted: Sequence[Any]) -> dict[str, Any]:
    """Take the verdict back if it is good and a value is missing."""
    complete = all(key in values and not math.isnan(values[key]) for key in wanted)
    return row if complete or row["verdict"] != MET else row | {"found": "", "verdict": UNKNOWN}


def _row(target: str, required: str, found: object, met: bool | None) -> dict[str, Any]:
    verdict = UNKNOWN if met is None else MET if met else MISSED
    return {"target": target, "required": required, "found": "" if met is None else found, "verdict": verdict}
