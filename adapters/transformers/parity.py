"""This adapter's ``jetrl_patch.registry.Models``, and the trainer's side of ``jetrl parity``."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from jetrl_patch.adapters.transformers.attention import NAME, ExactLatentAttention, share_sequences
from jetrl_patch.adapters.transformers.delta_net import ExactDeltaNet, ExactGatedNorm, ExactOnePlusNorm
from jetrl_patch.adapters.transformers.prepare import prepare_model, to_bf16
from jetrl_patch.exact import modules
from jetrl_patch.exact.latent import ExactAbsorbed
from jetrl_patch.exact.logprob import Edit, divisor, log_softmax
from jetrl_patch.exact.modules import swap, unswap
from jetrl_patch.exact.ops import token_log_probs
from jetrl_patch.exact.support import BANNED
from jetrl_patch.fp8.convert import expert_modules
from jetrl_patch.fp8.linear import Fp8Linear
from jetrl_patch.measure.parity import OPS, PARTS, Full, Job, Sample, Scored, Step
from jetrl_patch.measure.routes import Recorder, Routes, compare
from jetrl_patch.progress import SILENT, Progress
from jetrl_patch.trainer.preflight import auto_class

__all__ = ["explain", "load", "log_probs", "micro_batches", "prepare_model", "score", "share_sequences", "to_bf16"]


# ---- Log-probs of given tokens -------------------------------------------------------------------

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


def _places(samples: Sequence[Sample]) -> list[Tensor]:
    """Flat positions of each sequence's tokens in a right-padded batch, without its last token."""
    lengths = [len(s.prompt) + len(s.response) - 1 for s in samples]
    return [row * max(lengths) + torch.arange(length) for row, length in enumerate(lengths)]


def _compared(samples: Sequence[Sample], chosen: Mapping[int, Tensor]) -> Routes:
    """Compare the routes of one right-padded batch, prompts included."""
    given = [(s.routes, own) for s, own in zip(samples, _places(samples), strict=True) if s.routes is not None]
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


# ---- Where a mismatch comes from (``--explain``): make the trainer's ops exact one at a time -----

#: op -> its exact modules; the other ops have none
_MODULES: dict[str, tuple[type, ...]] = {
    "norms": (modules.ExactNorm, ExactOnePlusNorm, ExactGatedNorm),
    "RoPE": (modules.ExactRotary,),
    "activation": (modules.ExactMLP,),
    "attention": (ExactLatentAttention, ExactAbsorbed),  # other kinds have an entry in transformers' registry
    "router": (modules.ExactRouter, modules.ExactSigmoidRouter, modules.ExactScores, modules.ExactChoice),
    "delta net": (ExactDeltaNet,),
    "lm_head": (modules.ExactLinear,),
}


def explain(job: Job, samples: Sequence[Sample], progress: Progress = SILENT) -> list[Step]:
    """Score samples of an exact rollout with a series of trainers, from Hugging Face's unchanged model to the exact one.

    The first step is the unchanged BF16 model. Each further step makes one more op exact, in the order of ``OPS``, so the changes
    add up to the first step's mismatch. ``alone`` is the mismatch of a trainer in which only that op is stock. The ``job`` is in
    exact mode, enabled in this process.
    """
    batches = micro_batches(samples)
    rollout = torch.tensor([value for s in samples for value in s.log_probs], dtype=torch.float32)
    parts = torch.cat([torch.arange(len(s.response)) * PARTS // len(s.response) for s in samples])
    model = load(job)
    ops = [op for op in OPS if op not in _MODULES or op == "attention" or _swapped(model, op)]
    progress.stage("scoring", 2 * len(ops), "trainers")
    scored, exact_states = _score(model, batches, token_log_probs)
    exact, done = _step(scored - rollout, parts, exact_states, exact_states), 1
    progress.done(done)

    def measure(stock: Collection[str]) -> Step:
        nonlocal done
        formula = _torch_log_probs if "log-softmax" in stock else token_log_probs
        scored, states = _score(model, batches, formula)
        done += 1
        progress.done(done)
        return _step(scored - rollout, parts, states, exact_states)

    alone, taken = {}, {}  # op -> step with only this op stock; op -> step with it and all later ops stock
    for op in ops[1:-1]:
        restore = _make_stock(model, op)
        alone[op] = measure({op})
        restore()
    stock: set[str] = set()
    for op in reversed(ops[1:]):  # undo the swaps in reverse order
        _make_stock(model, op)
        stock.add(op)
        taken[op] = measure(stock)
    alone[ops[-1]] = taken[ops[-1]]
    linears = {name: m for name, m in model.named_modules() if isinstance(m, Fp8Linear)} | expert_modules(model)
    to_bf16(linears, exact=False)
    taken[ops[0]] = measure({*ops})
    model = load(job)
    to_bf16({name: model.get_submodule(name) for name in linears}, exact=True)
    alone[ops[0]] = measure({ops[0]})
    made = [*(taken[op] for op in ops[1:]), exact]
    return [taken[ops[0]], *(replace(found, op=op, alone=alone[op].mean) for op, found in zip(ops, made, strict=True))]


def _step(difference: Tensor, parts: Tensor, states: list[Tensor], exact: list[Tensor]) -> Step:
    """Figures of one trainer, from the ``difference`` [tokens] between its log-probs and the rollout's.

    ``parts`` [tokens] says which part of its response a token is in. ``states`` are the trainer's hidden states [T, H] after each
    block, ``exact`` the exact trainer's.
    """
    apart = difference.abs()
    return Step(
        op="",
        mean=float(apart.mean(dtype=torch.float64)),
        max=float(apart.max()),
        equal=float((apart == 0).double().mean()),
        alone=None,
        parts=[float(apart[parts == part].mean(dtype=torch.float64)) for part in range(PARTS)],
        depth=[float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(states, exact, strict=True)],
    )


@torch.no_grad()
def _score(
    model: Any, batches: Sequence[Sequence[Sample]], formula: Callable[..., Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Log-probs [tokens] of all responses, and the first batch's hidden states [T, H] after each block."""
    first, *others = batches
    states: list[Tensor] = []
    places = torch.cat(_places(first))

    def keep(block: nn.Module, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        states.append(hidden.flatten(0, 1)[places].cpu())

    handles = [block.register_forward_hook(keep) for block in model.get_submodule(f"{model.base_model_prefix}.layers")]
    found = [log_probs(model, first, formula)]
    for handle in handles:
        handle.remove()
    found += [log_probs(model, batch, formula) for batch in others]
    return torch.cat(found).cpu(), states


def _torch_log_probs(logits: Tensor, labels: Tensor, temperature: float, edit: Edit | None = None) -> Tensor:
    wide = (logits.float() if edit is None else edit(logits.float(), slice(0, len(logits)))) / temperature
    return torch.log_softmax(wide, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def _swapped(model: Any, op: str) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, _MODULES[op])]


def _make_stock(model: Any, op: str) -> Callable[[], None]:
    """Turn an op of an exact model back into Hugging Face's. Returns a function that makes it exact again."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    changed = []
    if op == "attention":
        for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            registry[NAME] = registry["sdpa"]
    for module in _swapped(model, op) if op in _MODULES else ():
        while isinstance(module, _MODULES[op]):
            changed.append((module, type(module).__bases__[0]))
            unswap(module)

    def restore() -> None:
        if op == "attention":
            for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
                del registry[NAME]  # which hid the registered one
        for module, behavior in reversed(changed):
            swap(module, behavior)

    return restore
