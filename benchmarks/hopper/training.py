"""Part e: a training step of a stack of blocks with ``lm_head`` and log-probs, by phase.

Parameters, gradients and AdamW's states are BF16 on one GPU without FSDP, in every mode. BF16 runs as in transformers, with
flash-attn if installed, else SDPA; its log-probs are verl's, which also depend on flash-attn. Compiled BF16 takes all rows at
once, because verl's formula cannot be compiled.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import jetrl_patch
from benchmarks.hopper import shape
from benchmarks.hopper.record import Piece, Record, Setup, Table
from jetrl_patch import Config
from scripts.tables import Row

BASELINE, COMPILED, TITLE = "BF16", "BF16, compiled", "Steps"
#: name -> settings (None: the plugin is off)
MODES: dict[str, Config | None] = {
    BASELINE: None,
    COMPILED: None,
    "linear": Config(precision="fp8-unified", align="linear"),
    "exact": Config(precision="fp8-unified", align="exact"),
}
PHASES = ("old log-probs", "forward", "backward", "optimizer")


class Size(NamedTuple):
    """Blocks, sequences, tokens of each, and steps measured after as many warm-up steps."""

    layers: int = 4
    sequences: int = 4
    tokens: int = 4096
    steps: int = 8


def pieces(setup: Setup) -> Iterator[Piece]:
    size = Size(1, 2, 16, 1) if setup.dry else Size()
    for checkpointing in (False,) if setup.dry else (False, True):
        for mode in MODES:
            name = f"{mode}, checkpointing" if checkpointing else mode
            yield Piece(TITLE, name, partial(_run, setup, size, mode, checkpointing))


def _run(setup: Setup, size: Size, mode: str, checkpointing: bool) -> list[Row]:
    settings = MODES[mode]
    if settings is not None:
        settings = settings.replace(backend=setup.backend)
        jetrl_patch.enable(settings)
    try:
        found = _measure(setup, size, settings, mode == COMPILED, checkpointing)
        return [{"mode": mode, "checkpointing": checkpointing, **found}]
    finally:
        jetrl_patch.disable()
        torch._dynamo.reset()  # graphs of this mode would count against the next one's limit of recompilations


def _measure(setup: Setup, size: Size, settings: Config | None, compiled: bool, checkpointing: bool) -> Row:
    from jetrl_patch.adapters.transformers.prepare import prepare_model
    from jetrl_patch.exact.ops import token_log_probs

    cuda = not setup.dry
    config = shape.config(size.layers, setup.dry)
    flash = cuda and importlib.util.find_spec("flash_attn") is not None
    model = shape.build(config, setup.device, "flash_attention_2" if flash else "sdpa")
    name, formula = ("all rows at once", shape.plain_log_probs) if compiled else shape.verl_log_probs()
    if settings is not None:
        prepare_model(model, settings.resolved(), device_type=setup.device)
        if settings.resolved().same_log_probs:
            name, formula = "exact", token_log_probs
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=cuda)
    ids = torch.randint(config.vocab_size, (size.sequences, size.tokens), device=setup.device)

    def score(ids: Tensor) -> Tensor:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
        return formula(logits, ids[:, 1:].flatten())

    scored = torch.compile(score, backend="inductor" if cuda else "eager") if compiled else score

    def step() -> dict[str, float]:
        marks = [time.perf_counter()]

        def mark() -> None:
            if cuda:
                torch.cuda.synchronize()
            marks.append(time.perf_counter())

        with torch.no_grad():
            scored(ids)
        mark()
        loss = -scored(ids).float().mean()
        mark()
        loss.backward()
        mark()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mark()
        return {phase: 1e3 * (b - a) for phase, a, b in zip(PHASES, marks, marks[1:])}

    for _ in range(size.steps):
        step()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    steps = [step() for _ in range(size.steps)]
    # exact mode skips the pass for old log-probs
    counted = PHASES[1:] if settings is not None and settings.resolved().exact else PHASES
    whole = statistics.median(sum(found[phase] for phase in counted) for found in steps)
    return {
        "tokens": ids.numel(), "blocks": config.num_hidden_layers, "attention": model.config._attn_implementation,
        "log-probs": name, **{f"{phase} ms": statistics.median(found[phase] for found in steps) for phase in PHASES},
        "step ms": whole, "tokens/s": 1e3 * ids.numel() / whole,
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30 if cuda else "",
    }  # fmt: skip


def derive(record: Record) -> list[Table]:
    """Time of both baselines over that of each mode with the same checkpointing."""
    table, found = [], {(row["mode"], row["checkpointing"]): row for row in record.tables().get(TITLE, [])}
    for (mode, again), row in found.items():
        line: Row = {"mode": mode, "checkpointing": again}
        for base in (BASELINE, COMPILED):
            line[f"{base} / this"] = found[base, again]["step ms"] / row["step ms"] if (base, again) in found else ""
        table.append(line)
    note = "A step is all four phases. Exact mode skips the pass for old log-probs, because the rollout's are the trainer's."
    return [("A step relative to both baselines", table, note if table else "")]
