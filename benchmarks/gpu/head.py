"""``lm_head`` and the log-probs of tokens: exact, and as the frameworks compute them in BF16. V is the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.memory import peak_mib
from benchmarks.gpu.shapes import DECODE, MODELS, VOCABULARY, Model
from benchmarks.gpu.timing import Call, copies
from jetrl_patch.exact import ops

#: tokens of a training batch whose logits are taken at once
SCORED = 8192
BF16, COMPILED, EXACT = "bf16", "bf16, compiled", "exact"


def plain_log_probs(logits_MV: Tensor, labels_M: Tensor) -> Tensor:
    """BF16 log-probs [M] of labels under logits [M, V]: the formula of verl's ``logprobs_from_logits_naive``."""
    return torch.log_softmax(logits_MV, -1).gather(-1, labels_M[:, None])[:, 0]


def head(
    machine: Machine,
    models: Sequence[Model] = MODELS[1:2],
    decoded: Sequence[int] = DECODE,
    scored: int = SCORED,
    vocabulary: int = VOCABULARY,
) -> Iterator[dict[str, object]]:
    """Logits of a decoding step; logits and log-probs of a training batch, forward and backward."""
    for model in models:
        w = machine.random(vocabulary, model.hidden)
        weights = [w, *(machine.random(*w.shape) for _ in range(copies(w.nbytes, machine.cache) - 1))]
        for M in decoded:
            x = machine.random(M, model.hidden)
            yield from _rows(machine, model, "logits, decode", M, _products(x, weights))
        x, labels = machine.random(scored, model.hidden), torch.arange(scored, device=machine.device) % vocabulary
        yield from _rows(machine, model, "logits", scored, _products(x, weights[:1]))
        g = machine.random(scored, vocabulary)
        both: dict[str, Callable[..., Tensor]] = {BF16: lambda x, w: x @ w.t(), EXACT: ops.head_linear}
        calls: dict[str, Call] = {name: partial(_backward, f, g, (x, w)) for name, f in both.items()}
        yield from _rows(machine, model, "logits, forward and backward", scored, calls)
        logits, ones = 4 * g, torch.ones(scored, device=machine.device)
        formulas: dict[str, Callable[..., Tensor]] = {BF16: plain_log_probs, EXACT: ops.token_log_probs}
        if machine.compiler:
            formulas[COMPILED] = torch.compile(plain_log_probs, backend=machine.compiler)
        calls = {name: partial(_scored, f, labels, ones, logits) for name, f in formulas.items()}
        yield from _rows(machine, model, "log-probs, forward and backward", scored, calls)


def _products(x: Tensor, weights: Sequence[Tensor]) -> dict[str, Call]:
    return {
        BF16: lambda i: x @ weights[i % len(weights)].t(),
        EXACT: lambda i: ops.head_linear(x, weights[i % len(weights)]),
    }


def _scored(formula: Callable[..., Tensor], labels: Tensor, g: Tensor, logits: Tensor, turn: int) -> None:
    _backward(lambda leaf: formula(leaf, labels).float(), g, (logits,), turn)


def _backward(run: Callable[..., Tensor], g: Tensor, inputs: Sequence[Tensor], turn: int) -> None:
    leaves = [t.detach().requires_grad_() for t in inputs]
    torch.autograd.grad(run(*leaves), leaves, g)


def _rows(machine: Machine, model: Model, what: str, M: int, calls: dict[str, Call]) -> Iterator[dict[str, object]]:
    times = machine.timer(calls)
    for name, timed in times.items():
        yield {
            "model": model.name, "what": what, "M": M, "way": name, "us": timed.seconds * 1e6,
            "BF16 / this": times[BF16].seconds / timed.seconds,
            "compiled BF16 / this": times[COMPILED].seconds / timed.seconds if COMPILED in times else math.nan,
            "peak MiB": "" if timed.error else peak_mib(machine.device, calls[name]), "note": timed.note,
        }  # fmt: skip
