"""Part e: a training step of a stack of blocks with ``lm_head`` and log-probs, by phase.

Parameters, gradients and AdamW's states are BF16 on one GPU without FSDP, in every mode. BF16 runs as transformers has it, with
SDPA or, where it is installed, flash-attn; its log-probs are those of verl, which also depend on flash-attn. Compiled, they are
those of all rows at once, because verl's cannot be compiled.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import jetrl_patch
from benchmarks.gpu import logprobs
from benchmarks.hopper import shape
from benchmarks.hopper.cells import Cell, Cells, Derived, Setup, ratio, whole
from jetrl_patch import Config

BASELINE, COMPILED = "BF16", "BF16, compiled"
#: name -> settings (None: the plugin is off) and whether it is compiled
ARMS: dict[str, tuple[Config | None, bool]] = {
    BASELINE: (None, False),
    COMPILED: (None, True),
    "linear": (Config(precision="fp8-unified", align="linear"), False),
    "exact": (Config(precision="fp8-unified", align="exact"), False),
}
PHASES = ("old log-probs", "forward", "backward", "optimizer")


class Size(NamedTuple):
    """Blocks, sequences, tokens of each, and steps that are measured after as many that warm up."""

    layers: int = 4
    sequences: int = 4
    tokens: int = 4096
    steps: int = 8


def cells(setup: Setup) -> dict[str, Cell]:
    size = Size(1, 2, 16, 1) if setup.dry else Size()
    return {
        f"{arm}{', checkpointing' if again else ''}": Cell("Steps", whole(partial(_run, setup, size, arm, again)), 60)
        for again in ((False,) if setup.dry else (False, True))
        for arm in ARMS
    }


def _run(setup: Setup, size: Size, arm: str, checkpointing: bool) -> Iterator[dict[str, Any]]:
    settings, compiled = ARMS[arm]
    if settings is not None:
        settings = settings.replace(backend=setup.backend)
        jetrl_patch.enable(settings)
    try:
        yield {"mode": arm, "checkpointing": checkpointing, **_measure(setup, size, settings, compiled, checkpointing)}
    finally:
        jetrl_patch.disable()
        torch._dynamo.reset()  # graphs of this arm would count against the next one's limit of recompilations


def _measure(setup: Setup, size: Size, settings: Config | None, compiled: bool, checkpointing: bool) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    from jetrl_patch.adapters.transformers.prepare import prepare_model
    from jetrl_patch.exact.ops import token_log_probs

    torch.manual_seed(0)
    device = torch.device(setup.device)
    config = shape.config(size.layers, setup.dry)
    flash = not setup.dry and importlib.util.find_spec("flash_attn") is not None
    with device:
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="flash_attention_2" if flash else "sdpa"
        )
    name, formula = ("all rows at once", logprobs.plain) if compiled else logprobs.of_verl()
    if settings is not None:
        prepare_model(model, settings.resolved(), device_type=setup.device)
        if settings.resolved().same_log_probs:
            name, formula = "exact", token_log_probs
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=not setup.dry)
    ids = torch.randint(config.vocab_size, (size.sequences, size.tokens), device=device)

    def log_probs(ids: Tensor) -> Tensor:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
        return formula(logits, ids[:, 1:].flatten())

    score = torch.compile(log_probs, backend="eager" if setup.dry else "inductor") if compiled else log_probs

    def step() -> dict[str, float]:
        marks = [_now(device)]
        with torch.no_grad():
            score(ids)
        marks.append(_now(device))
        loss = -score(ids).float().mean()
        marks.append(_now(device))
        loss.backward()
        marks.append(_now(device))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        marks.append(_now(device))
        return {name: 1e3 * (b - a) for name, a, b in zip(PHASES, marks, marks[1:])}

    for _ in range(size.steps):
        step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    steps = [step() for _ in range(size.steps)]
    medians = {f"{name} ms": statistics.median(found[name] for found in steps) for name in PHASES}
    # exact mode leaves the pass for old log-probs out
    counted = PHASES[1:] if settings is not None and settings.resolved().exact else PHASES
    whole = statistics.median(sum(found[name] for name in counted) for found in steps)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else ""
    return {
        "tokens": ids.numel(), "blocks": config.num_hidden_layers, "attention": model.config._attn_implementation,
        "log-probs": name, **medians,
        "step ms": whole, "tokens/s": 1e3 * ids.numel() / whole, "peak GiB": peak,
    }  # fmt: skip


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def derive(cells: Cells, planned: Sequence[str]) -> list[Derived]:
    """Time of both baselines over that of each mode, with the same checkpointing."""
    rows, found = [], {(row["mode"], row["checkpointing"]): row for mine in cells.values() for row in mine}
    for (mode, again), row in found.items():
        line: dict[str, Any] = {"mode": mode, "checkpointing": again}
        for base in (BASELINE, COMPILED):
            line[f"{base} / this"] = ratio(found.get((base, again), {}).get("step ms"), row["step ms"])
        line["memory / BF16"] = ratio(row["peak GiB"], found.get((BASELINE, again), {}).get("peak GiB"))
        rows.append(line)
    note = "A step is all four phases; exact mode's has no pass for old log-probs, because the rollout's are the trainer's."
    return [Derived("A step against both baselines", rows, note)] if rows else []
