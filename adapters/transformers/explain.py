"""Where a mismatch comes from, for ``jetrl parity --explain``: the trainer's ops, taken from stock to exact one at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from jetrl_patch.adapters.transformers.attention import NAME
from jetrl_patch.adapters.transformers.prepare import to_bf16
from jetrl_patch.adapters.transformers.score import load, log_probs, micro_batches
from jetrl_patch.exact import modules
from jetrl_patch.exact.modules import swap, unswap
from jetrl_patch.exact.ops import token_log_probs
from jetrl_patch.fp8.convert import expert_modules
from jetrl_patch.fp8.linear import Fp8Linear
from jetrl_patch.measure.explain import OPS, PARTS, Step
from jetrl_patch.measure.parity import Job, Sample
from jetrl_patch.progress import SILENT, Progress

__all__ = ["explain"]

#: op -> the exact counterparts that it is swapped for; the other ops are no modules
_MODULES: dict[str, tuple[type, ...]] = {
    "norms": (modules.ExactNorm,),
    "RoPE": (modules.ExactRotary,),
    "activation": (modules.ExactMLP,),
    "router": (modules.ExactRouter, modules.ExactScores, modules.ExactChoice),
    "lm_head": (modules.ExactLinear,),
}


def explain(job: Job, samples: Sequence[Sample], progress: Progress = SILENT) -> list[Step]:
    """Score samples of an exact rollout with trainers between Hugging Face's model as it is and the exact one.

    The first step is the untouched BF16 model. Each further step makes one more op exact, in the order of ``OPS``, so that the
    changes add up to the first step's mismatch. ``alone`` is the mismatch of a trainer in which that op alone is stock.

    Args:
        job: in exact mode, enabled in this process.
    """
    batches = micro_batches(samples)
    rollout = torch.tensor([value for s in samples for value in s.log_probs], dtype=torch.float32)
    parts = torch.cat([torch.arange(len(s.response)) * PARTS // len(s.response) for s in samples])
    model = load(job)
    ops = [op for op in OPS if op not in _MODULES or _swapped(model, op)]
    progress.stage("scoring", 2 * len(ops) + 1, "trainers")
    done = 0

    def measure(stock: Collection[str]) -> _Measured:
        nonlocal done
        found = _score(model, batches, job.temperature, "log-softmax" in stock)
        done += 1
        progress.done(done)
        return found

    exact = measure(())
    states = exact.states
    alone, taken = {}, {}
    for op in ops[1:]:
        again = _take_back(model, op)
        alone[op] = measure({op})
        again()
    kept: set[str] = set()
    for op in reversed(ops[1:]):  # the last op that became exact is the first to go back
        _take_back(model, op)
        kept.add(op)
        taken[op] = measure(kept)
    linears = {name: m for name, m in model.named_modules() if isinstance(m, Fp8Linear)} | expert_modules(model)
    to_bf16(linears, exact=False)
    kept.add(ops[0])
    taken[ops[0]] = measure(kept)
    model = load(job)
    to_bf16({name: model.get_submodule(name) for name in linears}, exact=True)
    alone[ops[0]] = measure({ops[0]})
    before = [taken[op] for op in ops]  # before[i]: ops[i] and those after it are stock
    chain = [("", before[0]), *zip(ops, [*before[1:], exact])]
    return [_step(op, found, alone.get(op), rollout, parts, states) for op, found in chain]


class _Measured:
    """Log-probs [tokens] of one trainer, and the first batch's hidden states [T, H] behind each block."""

    def __init__(self, log_probs: Tensor, states: list[Tensor]) -> None:
        self.log_probs, self.states = log_probs, states


def _step(
    op: str, found: _Measured, alone: _Measured | None, rollout: Tensor, parts: Tensor, states: list[Tensor]
) -> Step:
    apart = (found.log_probs - rollout).abs()
    return Step(
        op=op,
        mean=float(apart.mean(dtype=torch.float64)),
        max=float(apart.max()),
        equal=float((apart == 0).double().mean()),
        alone=None if alone is None else float((alone.log_probs - rollout).abs().mean(dtype=torch.float64)),
        parts=[float(apart[parts == part].mean(dtype=torch.float64)) for part in range(PARTS)],
        depth=[float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found.states, states)],
    )


@torch.no_grad()
def _score(model: Any, batches: Sequence[Sequence[Sample]], temperature: float, stock: bool) -> _Measured:
    states: list[Tensor] = []
    found = []
    formula: Callable[..., Tensor] = _torch_log_probs if stock else token_log_probs
    for number, batch in enumerate(batches):
        handles = []
        if number == 0:
            keep = [index for row, s in enumerate(batch) for index in _tokens(row, s, batch)]
            blocks = model.get_submodule(f"{model.base_model_prefix}.layers")
            handles = [block.register_forward_hook(_Hold(states, keep)) for block in blocks]
        try:
            found.append(log_probs(model, batch, temperature, formula))
        finally:
            for handle in handles:
                handle.remove()
    return _Measured(torch.cat(found).cpu(), states)


class _Hold:
    """A forward hook that keeps a block's output at some tokens."""

    def __init__(self, states: list[Tensor], keep: list[int]) -> None:
        self.states, self.keep = states, keep

    def __call__(self, block: nn.Module, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        self.states.append(hidden.flatten(0, 1)[self.keep].cpu())


def _tokens(row: int, sample: Sample, batch: Sequence[Sample]) -> Iterator[int]:
    """The flat places of one sequence of a right-padded batch, the last token left out."""
    width = max(len(s.prompt) + len(s.response) for s in batch) - 1
    return iter(range(row * width, row * width + len(sample.prompt) + len(sample.response) - 1))


def _torch_log_probs(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    wide = logits.float() / temperature
    return torch.log_softmax(wide, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def _swapped(model: Any, op: str) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, _MODULES[op])]


def _take_back(model: Any, op: str) -> Callable[[], None]:
    """Make an op of an exact model Hugging Face's own again. Returns what makes it exact."""
    if op == "attention":
        model.config._attn_implementation = "sdpa"
        return lambda: setattr(model.config, "_attn_implementation", NAME)
    changed = []
    for module in _swapped(model, op) if op in _MODULES else ():
        while isinstance(module, _MODULES[op]):
            changed.append((module, type(module).__bases__[0]))
            unswap(module)

    def again() -> None:
        for module, behaviour in reversed(changed):
            swap(module, behaviour)

    return again
