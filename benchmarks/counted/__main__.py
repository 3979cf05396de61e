"""Print the tables; with ``--write``, write ``docs/benchmarks/counted.md``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.counted.counter import Launch
from benchmarks.counted.passes import (
    LENGTH,
    MODES,
    ROWS,
    TOKENS,
    Passes,
    count_block,
    count_decode,
    count_linears,
    count_step,
)
from benchmarks.harness import asked_to_write
from benchmarks.shapes import MODELS, PUBLISHED
from scripts.tables import Row, filled, markdown

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "counted.md"
#: lower bounds of BF16's time over a mode's, and the upper bound of ``exact`` over ``linear``
LINEARS, BLOCK, DECODE, EXACT = 1.35, 1.4, 1.6, 1.05
#: rows of the table of launches
TOP = 12
#: the mode of a row without a target
WITHOUT = "linear, without cuBLASLt"


def _total(launches: Sequence[Launch]) -> tuple[int, float, float]:
    """Launches, GB and milliseconds."""
    return len(launches), sum(x.bytes for x in launches) / 1e9, sum(x.seconds(PUBLISHED) for x in launches) * 1e3


def _rows(counted: dict[tuple[str, str], Passes], weights: bool) -> Iterator[Row]:
    for (model, mode), passes in counted.items():
        (n, gb, ms), (n_back, gb_back, ms_back) = _total(passes.forward), _total(passes.backward)
        row = {
            "model": model, "mode": mode, "launches, forward": n, "backward": n_back, "GB, forward": gb, "GB, backward": gb_back,
            "ms": ms + ms_back, "BF16 / this": _ms(counted[model, "bf16"]) / (ms + ms_back),
        }  # fmt: skip
        yield {**row, "ms, weights": _total(passes.weights)[2]} if weights else row


def _ms(passes: Passes) -> float:
    return _total(passes.forward + passes.backward)[2]


def _longest(passes: Passes) -> Iterator[Row]:
    """The kinds of launches that take the most time."""
    for name, launches in (("forward", passes.forward), ("backward", passes.backward)):
        kinds = {x.name: _total([y for y in launches if y.name == x.name]) for x in launches}
        for kind, (n, gb, ms) in sorted(kinds.items(), key=lambda item: -item[1][2])[:TOP]:
            yield {"pass": name, "launch": f"`{kind}`", "launches": n, "GB": gb, "ms": ms}


def _steps() -> Iterator[Row]:
    """A decoding step in vLLM, in which linears or the operators before them quantize."""
    for model in MODELS:
        for mode in MODES[1:]:
            for fused in (False, True):
                launches, weights = count_step(model, mode, fused)
                n, gb, ms = _total(launches)
                yield {
                    "model": model.name, "mode": mode, "quantized by": "the norm or activation" if fused else "the linear",
                    "launches": n, "MB without weights": gb * 1e3 - weights / 1e6, "µs": ms * 1e3,
                }  # fmt: skip


def tables() -> dict[str, list[Row]]:
    """Title -> rows."""
    blocks = {(model.name, mode): count_block(model, mode) for model in MODELS for mode in MODES}
    ways = {MODES[0]: True, MODES[1]: True, WITHOUT: False}
    linears = {
        (model.name, mode): count_linears(model, mode.partition(",")[0], rounds=rounds)
        for model in MODELS for mode, rounds in ways.items()
    }  # fmt: skip
    decode = {model.name: [_total(count_decode(model, fp8)) for fp8 in (False, True)] for model in MODELS}
    steps = [
        {"model": name, "mode": mode, "launches": n, "GB": gb, "µs": ms * 1e3, "BF16 / this": both[0][2] / ms}
        for name, both in decode.items() for mode, (n, gb, ms) in zip(("bf16", "linear and exact"), both)
    ]  # fmt: skip
    required = []
    for model in MODELS:
        name = model.name
        linear, exact = (_total(blocks[name, mode].forward + blocks[name, mode].backward) for mode in MODES[1:])
        base = _ms(blocks[name, "bf16"])
        checks = [
            ("linears, BF16 / FP8", LINEARS, _ms(linears[name, "bf16"]) / _ms(linears[name, "linear"]), True),
            ("block, BF16 / linear", BLOCK, base / linear[2], True),
            ("block, BF16 / exact", BLOCK, base / exact[2], True),
            (f"decode linears at M = {ROWS}, BF16 / FP8", DECODE, decode[name][0][2] / decode[name][1][2], True),
            ("block, launches of exact / linear", EXACT, exact[0] / linear[0], False),
            ("block, bytes of exact / linear", EXACT, exact[1] / linear[1], False),
        ]
        for what, bound, found, least in checks:
            met = found >= bound if least else found <= bound
            words = f"at {'least' if least else 'most'} {bound:g}"
            row = {"model": name, "ratio": what, "required": words, "found": f"{found:.3f}"}
            required.append(row | {"verdict": "met" if met else "MISSED"})
    return {
        "Required": required,
        "A block, forward and backward": list(_rows(blocks, weights=True)),
        "Its linear layers alone": list(_rows(linears, weights=False)),
        f"Its linear layers in a decoding step, M = {ROWS}": steps,
        f"Norms, linear layers and activation of a block in a decoding step, M = {ROWS}": list(_steps()),
        f"The longest launches of a block, {MODELS[0].name}, linear": list(_longest(blocks[MODELS[0].name, "linear"])),
        f"The longest launches of a block, {MODELS[0].name}, exact": list(_longest(blocks[MODELS[0].name, "exact"])),
    }


def page(found: dict[str, list[Row]]) -> str:
    """The text of ``docs/benchmarks/counted.md``."""
    bf16, fp8, wgrad, bandwidth = (f"{figure:.0f}" for figure in PUBLISHED)
    texts = {
        "peaks": f"{bandwidth} GB/s and {bf16} (BF16), {fp8} (FP8) and {wgrad} TFLOP/s (FP8, WGrad)",
        "batch": f"{TOKENS} tokens in sequences of {LENGTH}",
        "tables": "\n".join(markdown(rows, title) for title, rows in found.items()),
    }
    return filled(PAGE.read_text(), texts)


def main() -> None:
    found = tables()
    if asked_to_write(__doc__, PAGE):
        PAGE.write_text(page(found))
    for title, rows in found.items():
        print(markdown(rows, f"{title} (counted)"))


if __name__ == "__main__":
    main()
