"""Train the example's model from scratch in BF16 and in every format of blocks, on the same data, and compare the losses.

``python -m benchmarks.scratch --write`` writes the table of ``docs/precisions.md``. One thread; the words task.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from statistics import mean

import torch

from examples.words import task
from examples.words.tokenizer import build_tokenizer
from examples.words.warm_start import IGNORE, batch, build_model, fit, prompt_ids
from jetrl_patch.config.formats import ScaleFormat
from jetrl_patch.fp8.convert import swap_linears
from scripts.tables import Row, filled, markdown, processor

PAGE = Path(__file__).resolve().parents[1] / "docs" / "precisions.md"
#: what a row of the table is called -> scale format of its FP8 linear layers
FORMATS: dict[str, ScaleFormat | None] = {"BF16": None, "FP8, 128-blocks": "pow2", "MXFP8": "mxfp8", "NVFP4": "nvfp4"}
STEPS, BATCH, RATE, SEEDS = 120, 16, 1e-3, (0,)
#: steps whose training loss is averaged, and batches of questions that were not trained on
LAST, HELD_OUT = 30, 8


def losses(scale_format: ScaleFormat | None, seed: int, steps: int = STEPS, backend: str = "native") -> tuple[float, float]:
    """Cross-entropy of the last training steps, and of the held-out answers, in nats a token."""
    tokenizer, (questions, held_out) = build_tokenizer(), task.split()
    model, rng, seen = build_model(tokenizer, seed), random.Random(seed), []
    if scale_format is not None:
        swap_linears(model, scale_format=scale_format, backend=backend)
    prompts, others = ({q: prompt_ids(tokenizer, q) for q in some} for some in (questions, held_out))
    fit(model, lambda step: batch(tokenizer, prompts, BATCH, 0.6, rng), steps, RATE, lambda step, loss: seen.append(loss))
    rng, found = random.Random(seed), []
    for _ in range(HELD_OUT):
        ids, labels = batch(tokenizer, others, BATCH, 0.6, rng)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids).logits[:, :-1].float().flatten(0, 1)
        found.append(torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=IGNORE).item())
    return mean(seen[-LAST:]), mean(found)


def rows() -> list[Row]:
    """The table: mean over the seeds, and the difference from BF16."""
    table: list[Row] = []
    base: tuple[float, ...] = ()
    for name, scale_format in FORMATS.items():
        found = tuple(mean(values) for values in zip(*(losses(scale_format, seed) for seed in SEEDS), strict=True))
        base = base or found
        table.append({"linear layers": name})
        for what, mine, theirs in zip(("training loss", "held-out loss"), found, base, strict=True):
            table[-1] |= {what: f"{mine:.4f}", f"{what}, relative": f"{mine / theirs - 1:+.2%}"}
        print(table[-1], file=sys.stderr, flush=True)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="fill the table of docs/precisions.md")
    write = parser.parse_args().write
    torch.set_num_threads(1)
    note = (
        f"Seed {' and '.join(map(str, SEEDS))}, {STEPS:,} steps of {BATCH} answers each; the training loss is that "
        f"of the last {LAST} steps. {processor()}, torch {torch.__version__}. Command: `python -m benchmarks.scratch --write`."
    )
    text = f"{markdown(rows())}\n{note}"
    if write:
        PAGE.write_text(filled(PAGE.read_text(), {"scratch-table": text}))
    else:
        print(text)


if __name__ == "__main__":
    main()
