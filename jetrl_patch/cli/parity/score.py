"""The trainer's side of ``jetrl parity``: the log-probs of given tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from jetrl_patch.exact.logprob import Edit, divisor, log_softmax
from jetrl_patch.exact.ops import token_log_probs
from jetrl_patch.exact.support import BANNED
from jetrl_patch.measure.parity import Full, Job, Sample, Scored
from jetrl_patch.measure.routes import Recorder, Routes, compare
from jetrl_patch.progress import SILENT, Progress
from jetrl_patch.trainer.preflight import auto_class
from jetrl_patch.trainer.prepare import prepare_model

_MICRO_BATCH = 8


def score(job: Job, samples: Sequence[Sample], progress: Progress = SILENT) -> Scored:
    """Load the checkpoint, convert it for the mode, and score all response tokens.

    Sequences run in padded micro-batches of 8, so the batches differ from the rollout's. To measure the cost, a forward and a
    backward pass run over the same micro-batches.
    """
    progress.stage("loading the trainer's model")
    model = load(job)
    batches = micro_batches(samples)
    recorder, routes, found = Recorder(model), Routes(), []
    apart: list[Tensor] = []  # over the vocabulary
    progress.stage("scoring", len(batches), "batches")
    with torch.no_grad():
        for batch in batches:
            with recorder.recording() as chosen:
                rows = list(_logits(model, batch))
            found.append(_picked(rows, token_log_probs))
            routes += _compared(batch, chosen)
            apart += _apart(rows) if job.full else []
            progress.done(len(found))
    speed = _speed(model, batches, progress) if job.cost else None
    together = torch.cat(found).cpu()
    full = _full(torch.cat(apart), model, samples, together, progress) if job.full else None
    return Scored(together, speed, routes if routes.compared else None, full)


def _apart(rows: Iterable[Row]) -> list[Tensor]:
    """|Δ log-prob| of every token that could be drawn [values], of each response; infinite where only one side could draw it."""
    found = []
    for x, s, edit in rows:
        x = x.float() if edit is None else edit(x.float(), slice(0, len(x)))
        own, theirs = log_softmax(x, divisor(s.draw.divisor, x)).cpu(), s.every
        assert theirs is not None
        drawn = theirs[:, : own.shape[1]].isfinite() | (own > BANNED / 10)
        found.append((own - theirs[:, : own.shape[1]])[drawn].abs())
    return found


@torch.no_grad()
def _full(apart: Tensor, model: Any, samples: Sequence[Sample], together: Tensor, progress: Progress) -> Full:
    """The comparison over the vocabulary, and of log-probs [tokens] from batches of several sequences with those of one each."""
    progress.stage("scoring one sequence at a time", len(samples), "sequences")
    alone = []
    for count, sample in enumerate(samples, 1):
        alone.append(log_probs(model, [sample]).cpu())
        progress.done(count)
    moved = (torch.cat(alone) - together).abs()
    equal, alone_equal = (float((x == 0).double().mean()) for x in (apart, moved))
    return Full(apart.numel(), equal, float(apart.max()), alone_equal, float(moved.max()))


def load(job: Job) -> Any:
    """Load the trainer's model and convert it for the mode."""
    from transformers import AutoConfig

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, job.config.compute_dtype)
    found = auto_class(AutoConfig.from_pretrained(job.model))
    model: Any = found.from_pretrained(job.model, dtype=dtype).to(device).eval()
    if job.stock is None:
        prepare_model(model, job.config, job.tp, device, job.ep)
    return model


def micro_batches(samples: Sequence[Sample]) -> list[Sequence[Sample]]:
    """Split samples into batches that are scored at once."""
    return [samples[start : start + _MICRO_BATCH] for start in range(0, len(samples), _MICRO_BATCH)]


def places(samples: Sequence[Sample]) -> list[Tensor]:
    """Flat positions of each sequence's tokens in a right-padded batch, without its last token."""
    lengths = [len(s.prompt) + len(s.response) - 1 for s in samples]
    return [row * max(lengths) + torch.arange(length) for row, length in enumerate(lengths)]


def _compared(samples: Sequence[Sample], chosen: Mapping[int, Tensor]) -> Routes:
    """Compare the routes of one right-padded batch, prompts included."""
    given = [(s.routes, own) for s, own in zip(samples, places(samples), strict=True) if s.routes is not None]
    if not given:
        return Routes()
    return compare(torch.cat([routes for routes, _ in given]), chosen, torch.cat([own for _, own in given]))


def _speed(model: Any, batches: Sequence[Sequence[Sample]], progress: Progress) -> float:
    """Tokens per second, prompts included, of forward and backward passes, after one that warms up."""
    progress.stage("timing the trainer", len(batches), "batches")
    _train(model, batches[0])
    begin = time.perf_counter()
    for count, batch in enumerate(batches, 1):
        _train(model, batch)
        progress.done(count)
    seconds = time.perf_counter() - begin
    return sum(len(s.prompt) + len(s.response) for batch in batches for s in batch) / seconds


def _train(model: Any, batch: Sequence[Sample]) -> None:
    log_probs(model, batch).sum().backward()
    model.zero_grad(set_to_none=True)
    if model.device.type == "cuda":
        torch.cuda.synchronize()  # or the clock would stop too early


def log_probs(model: Any, samples: Sequence[Sample], formula: Callable[..., Tensor] = token_log_probs) -> Tensor:
    """Return FP32 log-probs [tokens] of one right-padded batch's responses, from logits by ``formula``, as they were drawn."""
    return _picked(_logits(model, samples), formula)


def _picked(rows: Iterable[Row], formula: Callable[..., Tensor]) -> Tensor:
    """The log-probs [tokens] of the responses."""
    found = (formula(x, torch.tensor(s.response, device=x.device), s.draw.divisor, edit=edit) for x, s, edit in rows)
    return torch.cat(list(found))


#: the logits [response, V] of a sample, the sample, and what leaves tokens out of them
Row = tuple[Tensor, Sample, Edit | None]


def _logits(model: Any, samples: Sequence[Sample]) -> Iterator[Row]:
    """Yield the logits [response, V] of each sample of one right-padded batch, and what leaves tokens out of them."""
    rows = [[*s.prompt, *s.response[:-1]] for s in samples]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=model.device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=model.device)
    images: dict[str, Tensor] = {}
    if pictures := [picture for s in samples for picture in s.pictures]:
        images["pixel_values"] = torch.cat([picture.pixels for picture in pictures]).to(model.device)
        images["image_grid_thw"] = torch.cat([picture.grid for picture in pictures]).to(model.device)
        images["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False, **images).logits
    for row, s in enumerate(samples):
        first = len(s.prompt) - 1
        edit = None if s.support is None else s.support.to(model.device).edit
        yield logits[row, first : first + len(s.response)], s, edit
