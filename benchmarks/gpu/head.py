"""``lm_head`` and the log-probs of tokens: exact, and as the frameworks compute them in BF16. V is the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu import logprobs
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.memory import peak_mib
from benchmarks.gpu.piece import Piece, named
from benchmarks.gpu.shapes import DECODE, MODELS, VOCABULARY, Model
from benchmarks.gpu.timing import Call, copies
from jetrl_patch.exact import ops

#: tokens of a training batch whose logits are taken at once
SCORED = 8192
BF16, PLAIN, COMPILED, EXACT = "bf16", "bf16, all rows at once", "bf16, compiled", "exact"


def head(
    machine: Machine,
    models: Sequence[Model] = MODELS[1:2],
    decoded: Sequence[int] = DECODE,
    scored: int = SCORED,
    vocabulary: int = VOCABULARY,
) -> Iterator[Piece]:
    """Logits of a decoding step; logits and log-probs of a training batch, forward and backward."""
    for model in models:
        yield Piece(named(model.name, "log-probs"), partial(_log_probs, machine, model, scored, vocabulary))
        yield Piece(named(model.name, "logits"), partial(_logits, machine, model, scored, vocabulary))
        for M in decoded:
            yield Piece(named(model.name, "logits, decode", M), partial(_decoded, machine, model, M, vocabulary))


def _decoded(machine: Machine, model: Model, M: int, vocabulary: int) -> Iterator[dict[str, object]]:
    size = 2 * vocabulary * model.hidden
    weights = [machine.random(vocabulary, model.hidden) for _ in range(copies(size, machine.cache))]
    return _rows(machine, model, "logits, decode", M, _products(machine.random(M, model.hidden), weights))


def _logits(machine: Machine, model: Model, M: int, vocabulary: int) -> Iterator[dict[str, object]]:
    x, w, g = machine.random(M, model.hidden), machine.random(vocabulary, model.hidden), machine.random(M, vocabulary)
    yield from _rows(machine, model, "logits", M, _products(x, [w]))
    both: dict[str, Callable[..., Tensor]] = {BF16: lambda x, w: x @ w.t(), EXACT: ops.head_linear}
    calls: dict[str, Call] = {name: partial(_backward, f, g, (x, w)) for name, f in both.items()}
    yield from _rows(machine, model, "logits, forward and backward", M, calls)


def _log_probs(machine: Machine, model: Model, M: int, vocabulary: int) -> Iterator[dict[str, object]]:
    """BF16's are verl's formula, which ``what`` names; compiled is the plain one."""
    logits, ones = 4 * machine.random(M, vocabulary), torch.ones(M, device=machine.device)
    labels, verl = torch.arange(M, device=machine.device) % vocabulary, logprobs.of_verl()
    formulas: dict[str, logprobs.Formula] = {BF16: verl.run, PLAIN: logprobs.plain, EXACT: ops.token_log_probs}
    if machine.compiler:
        formulas[COMPILED] = torch.compile(logprobs.plain, backend=machine.compiler)
    calls: dict[str, Call] = {name: partial(_scored, f, labels, ones, logits) for name, f in formulas.items()}
    yield from _rows(machine, model, f"log-probs, forward and backward (bf16: {verl.name})", M, calls)


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
