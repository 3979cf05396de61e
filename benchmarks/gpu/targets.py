"""The targets of a run and whether it met them, computed from the tables of the parts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu.parts import TWO_LAYOUTS
from benchmarks.gpu.shapes import MODELS, TRAIN

Row = Mapping[str, Any]
Tables = Mapping[str, tuple[str, Sequence[Row], str]]
#: what backend="auto" picks, in order of preference
OURS = ("deep_gemm", "triton")
M = TRAIN[-1]
MET, MISSED, UNKNOWN = "met", "MISSED", "not measured"


def targets(tables: Tables) -> list[dict[str, Any]]:
    """One row per target: the requirement, the result, and the verdict."""
    rows = {name: table[1] for name, table in tables.items()}
    ours = serving(rows)
    found = [*_rows(rows.get("rows", ())), *_quantizers(rows.get("quantizers", ()), ours)]
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
        ]
    return found


def serving(rows: Mapping[str, Sequence[Row]]) -> str:
    """The backend that a run would use: the first of ``OURS`` that was measured and did not fail the rows part."""
    measured = {row["backend"] for name in ("rows", "products", "layers", "decode", "quantizers") for row in rows.get(name, ())}
    refused = {row["backend"] for row in rows.get("rows", ()) if row["verdict"] != "may serve"}
    return next((name for name in OURS if name in measured - refused), OURS[-1])


def _rows(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    for backend in dict.fromkeys(row["backend"] for row in rows):
        wrong = [row for row in rows if row["backend"] == backend and row["verdict"] != "may serve"]
        found = wrong[0]["found"] if wrong else next(row["found"] for row in rows if row["backend"] == backend)
        yield _row(f"rows do not depend on the batch, {backend}", f"equal to M = {M}", found, not wrong)
    if not rows:
        yield _row("rows do not depend on the batch", f"equal to M = {M}", "", None)


def _quantizers(rows: Sequence[Row], ours: str) -> Iterator[dict[str, Any]]:
    large = [row for row in rows if row["backend"] == ours and row["M, K"].startswith(f"{M}, ")]
    shares = {False: math.nan, True: math.nan}
    for both in (False, True):
        alone = [row for row in large if not any(word in row["quantizer"] for word in ("kept", "backward"))]
        of = [row["of the copy"] for row in alone if (row["quantizer"] == TWO_LAYOUTS) == both]
        shares[both] = min(of, default=math.nan) if not any(map(math.isnan, of)) else math.nan
    yield _least(f"quantizers at M = {M}, {ours}, the slowest: bandwidth / a copy's", 0.85, shares[False])
    yield _most(f"both layouts from one read at M = {M}, {ours}: time / its memory-bandwidth floor", 1.1, 1 / shares[True])


def _sums(rows: Sequence[Row], model: str, key: str, size: int) -> dict[str, float]:
    """Sums over the four linears of a block; a backend without a number for one of them is left out."""
    sums: dict[str, list[float]] = {}
    for row in rows:
        if row["model"] == model and row["M"] == size and isinstance(row[key], float):
            sums.setdefault(row["backend"], []).append(row[key])
    return {name: sum(values) for name, values in sums.items() if len(values) == 4}


def _ratio(values: Mapping[str, float], above: str, below: str) -> float:
    return values[above] / values[below] if above in values and below in values else math.nan


def _best(values: Mapping[str, float], ours: str) -> float:
    others = [value for name, value in values.items() if name != "bf16" and not math.isnan(value)]
    return min(others) / values[ours] if ours in values else math.nan


def _least(target: str, least: float, found: float) -> dict[str, Any]:
    return _row(target, f"at least {least:g}", found, None if math.isnan(found) else found >= least)


def _most(target: str, most: float, found: float) -> dict[str, Any]:
    return _row(target, f"at most {most:g}", found, None if math.isnan(found) else found <= most)


def _row(target: str, required: str, found: object, met: bool | None) -> dict[str, Any]:
    verdict = UNKNOWN if met is None else MET if met else MISSED
    return {"target": target, "required": required, "found": "" if met is None else found, "verdict": verdict}


def missed(rows: Sequence[Row]) -> str:
    """Markdown with room for the reason of each missed target; empty if every target was met."""
    wrong = [row["target"] for row in rows if row["verdict"] == MISSED]
    if not wrong:
        return ""
    lines = ["## Missed", "", 'Add the reason for each, using "Kernels of a block\'s step".', ""]
    return "\n".join([*lines, *(f"- **{target.replace('|', '/')}**: not explained yet." for target in wrong)]) + "\n"
