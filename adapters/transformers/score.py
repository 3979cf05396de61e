"""The trainer's log-probs of given tokens, for ``jetrl parity``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jetrl_patch.adapters.transformers.prepare import prepare_model
from jetrl_patch.exact.ops import token_log_probs
from jetrl_patch.measure.parity import Scored
from jetrl_patch.measure.routes import Recorder, Routes, compare
from jetrl_patch.progress import SILENT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jetrl_patch.measure.parity import Job, Sample
    from jetrl_patch.progress import Progress

__all__ = ["load", "log_probs", "micro_batches", "score"]

_MICRO_BATCH = 8


def score(job: Job, samples: Sequence[Sample], progress: Progress = SILENT) -> Scored:
    """Load the checkpoint, convert it for the mode, and score all response tokens.

    Sequences run in padded micro-batches of 8, so that they are batched differently than in the rollout. The cost is that of a
    forward and a backward pass over the same micro-batches.
    """
    progress.stage("loading the trainer's model")
    model = load(job)
    batches = micro_batches(samples)
    recorder, routes, found = Recorder(model), Routes(), []
    progress.stage("scoring", len(batches), "batches")
    with torch.no_grad():
        for batch in batches:
            with recorder.recording() as chosen:
                found.append(log_probs(model, batch, job.temperature))
            routes += _compared(batch, chosen)
            progress.done(len(found))
    speed = _speed(model, batches, job.temperature, progress) if job.cost else None
    return Scored(torch.cat(found).cpu(), speed, routes if routes.compared else None)


def load(job: Job) -> Any:
    """The trainer's model of a mode, converted for it."""
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, job.config.compute_dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype).to(device).eval()
    if job.stock is None:
        prepare_model(model, job.config, job.tp, device, job.ep)
    return model


def micro_batches(samples: Sequence[Sample]) -> list[Sequence[Sample]]:
    """The batches that are scored at once."""
    return [samples[start : start + _MICRO_BATCH] for start in range(0, len(samples), _MICRO_BATCH)]


def _compared(samples: Sequence[Sample], chosen: Mapping[int, Tensor]) -> Routes:
    """Compare the routes of one right-padded batch, prompts included."""
    lengths = [len(s.prompt) + len(s.response) - 1 for s in samples]
    rows = [row * max(lengths) + torch.arange(length) for row, length in enumerate(lengths)]
    given = [(s.routes, own) for s, own in zip(samples, rows, strict=True) if s.routes is not None]
    if not given:
        return Routes()
    return compare(torch.cat([routes for routes, _ in given]), chosen, torch.cat([own for _, own in given]))


def _speed(model: Any, batches: Sequence[Sequence[Sample]], temperature: float, progress: Progress) -> float:
    """Tokens per second, prompts included, of forward and backward passes; a first one warms up."""
    progress.stage("timing the trainer", len(batches), "batches")
    _train(model, batches[0], temperature)
    begin = time.perf_counter()
    for count, batch in enumerate(batches, 1):
        _train(model, batch, temperature)
        progress.done(count)
    seconds = time.perf_counter() - begin
    return sum(len(s.prompt) + len(s.response) for batch in batches for s in batch) / seconds


def _train(model: Any, batch: Sequence[Sample], temperature: float) -> None:
    log_probs(model, batch, temperature).sum().backward()
    model.zero_grad(set_to_none=True)
    if model.device.type == "cuda":
        torch.cuda.synchronize()  # the clock would not wait


def log_probs(
    model: Any, samples: Sequence[Sample], temperature: float, formula: Callable[..., Tensor] = token_log_probs
) -> Tensor:
    """Return FP32 log-probs [tokens] of the responses of one right-padded batch, from logits by ``formula``."""
    rows = [[*s.prompt, *s.response[:-1]] for s in samples]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=model.device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=model.device)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    found = []
    for row, s in enumerate(samples):
        first = len(s.prompt) - 1
        labels = torch.tensor(s.response, device=model.device)
        found.append(formula(logits[row, first : first + len(s.response)], labels, temperature))
    return torch.cat(found)
