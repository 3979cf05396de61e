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
from benchmarks.harness import Row, asked_to_write, markdown, show
from benchmarks.shapes import MODELS, PUBLISHED

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "counted.md"
#: the least that BF16's time over a mode's must be, and the most that ``exact`` may be of ``linear``
LINEARS, BLOCK, DECODE, EXACT = 1.35, 1.4, 1.6, 1.05
#: rows of the table of launches
TOP = 12
#: the mode of a row that is no verdict
WITHOUT = "linear, without cuBLASLt"

_HEAD = """\
# Launches and bytes, counted

**Counted and computed, not measured:** no figure on this page comes from a GPU. `python -m benchmarks.counted --write` runs the
plugin's own code as on an H200 with DeepGEMM and cuBLASLt, on tensors without memory, and records what it would launch. A launch
reads each input once and writes each output once. Its time is that of its bytes or of its products, whichever is longer, at
{bandwidth:.0f} GB/s and {bf16:.0f} (BF16), {fp8:.0f} (FP8) and {wgrad:.0f} TFLOP/s (FP8, WGrad), which others published for H200s
and Hopper kernels. Kernels that reach less of these peaks, time between launches and waits are left out: a GPU's ratios will be
lower. A test compares this page with the code, so an added copy or cast shows.

A micro-batch of {tokens} tokens in sequences of {length}. `bf16` is Hugging Face's block with FlashAttention-2, as verl runs it,
without recomputation. Weights are quantized once a step, which the ratios leave out and the last column of the first table lists;
ranks that share the weights quantize them in every pass.

"""


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
    """What takes the most time, of one kind of launch together."""
    for name, launches in (("forward", passes.forward), ("backward", passes.backward)):
        kinds = {x.name: _total([y for y in launches if y.name == x.name]) for x in launches}
        for kind, (n, gb, ms) in sorted(kinds.items(), key=lambda item: -item[1][2])[:TOP]:
            yield {"pass": name, "launch": f"`{kind}`", "launches": n, "GB": gb, "ms": ms}


def _steps() -> Iterator[Row]:
    """A decoding step in vLLM, before and after producers quantize."""
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


_WHY = """\
## What stands behind it, and what is left

The linear layers alone: a dW in BF16 is one product of cuBLASLt, which rounds in it. It is counted at the peak that others
published for DeepGEMM's product; NVIDIA calls the two comparable (TransformerEngine, issue 1509), and it is not measured here.
DeepGEMM's own product for WGrad (`1D1D`) only adds to an FP32 output: where torch has no block scales of cuBLASLt (CUDA before
12.9), each dW is filled with zeros, added to, and rounded, 18 bytes an element in place of 2, which is the row
`linear, without cuBLASLt`. DeepGEMM adds to an FP32 main gradient (Megatron) directly: nothing is filled or cast.

W is read twice, as it is and transposed. If no rank frees the weights between passes, one launch writes both for all
micro-batches of a step, and they are held to the last of them, at 2 bytes a weight. Otherwise each backward transposes W once
more (`transpose_kernel`).

The norm's backward adds the gradient of the residual in its own kernel, 8 bytes an element. Its sum is quantized for the layer
before it by a launch of its own (`both_kernel`), which reads 2 bytes and writes 2: for WGrad that takes 128 rows at a time, which
no program of a norm holds, and to read x and dy a second time there would be 4 bytes in place of those 2.

Left in it: the saved X gets other groups for WGrad (`requantize_kernel`), once for the layers that read it. Autograd adds up the
dX of those layers (`add`).

A block in exact mode: attention's backward is two kernels with seven products, where FlashAttention-2 has five. In `linear`,
Qwen3's norms of each head are those of Hugging Face, which exact mode replaces by one kernel.

Not counted: the launches of attention in a decoding step, with its rotary embedding and its cache.
"""


def page(found: dict[str, list[Row]]) -> str:
    """The text of ``docs/benchmarks/counted.md``."""
    head = _HEAD.format(
        bandwidth=PUBLISHED.bandwidth, bf16=PUBLISHED.bf16, fp8=PUBLISHED.fp8, wgrad=PUBLISHED.fp8_wgrad, tokens=TOKENS,
        length=LENGTH,
    )  # fmt: skip
    return head + "\n".join(markdown(rows, title) for title, rows in found.items()) + "\n" + _WHY


def main() -> None:
    found = tables()
    if asked_to_write(__doc__, PAGE):
        PAGE.write_text(page(found))
    for title, rows in found.items():
        show(f"{title} (counted)", rows)


if __name__ == "__main__":
    main()
