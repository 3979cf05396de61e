"""``jetrl parity --explain``: where a mismatch comes from. The trainer's ops are made exact one at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from jetrl_patch.cli.parity.score import load, log_probs, micro_batches, places
from jetrl_patch.exact import modules
from jetrl_patch.exact.delta_net_modules import ExactDeltaNet, ExactGatedNorm, ExactOnePlusNorm
from jetrl_patch.exact.hf_attention import NAME, ExactLatentAttention
from jetrl_patch.exact.latent import ExactAbsorbed
from jetrl_patch.exact.logprob import Edit
from jetrl_patch.exact.modules import swap, unswap
from jetrl_patch.exact.ops import token_log_probs
from jetrl_patch.fp8.convert import expert_modules
from jetrl_patch.fp8.linear import Fp8Linear
from jetrl_patch.fp8.to_bf16 import to_bf16
from jetrl_patch.measure.parity import OPS, RESPONSE_PARTS, Job, Sample, Step
from jetrl_patch.progress import SILENT, Progress

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
    parts = torch.cat([torch.arange(len(s.response)) * RESPONSE_PARTS // len(s.response) for s in samples])
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
        parts=[float(apart[parts == part].mean(dtype=torch.float64)) for part in range(RESPONSE_PARTS)],
        depth=[float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(states, exact, strict=True)],
    )


@torch.no_grad()
def _score(
    model: Any, batches: Sequence[Sequence[Sample]], formula: Callable[..., Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Log-probs [tokens] of all responses, and the first batch's hidden states [T, H] after each block."""
    first, *others = batches
    states: list[Tensor] = []
    rows = torch.cat(places(first))

    def keep(block: nn.Module, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        states.append(hidden.flatten(0, 1)[rows].cpu())

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
