"""The gradient of log-probs by one kernel, in the interpreter: against FP64, and the bytes that it moves."""

from __future__ import annotations

import pytest
import torch
import triton

from jetrl_patch.exact import dispatch, logprob, ops
from jetrl_patch.exact.logprob import chunked_log_probs, token_log_probs
from jetrl_patch.kernels.head import LOGPROB_COLUMNS

from ..fp8.thresholds import KERNEL_EQUALS_ORACLE, SQNR_GEMM, SQNR_KERNEL_FP32, sqnr
from .traffic import Traffic

assert triton.knobs.runtime.interpret
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

BF16, FP32 = torch.bfloat16, torch.float32
TEMPERATURES = {
    "1": lambda rows: 1.0,
    "0.7": lambda rows: 0.7,
    "a tensor": lambda rows: torch.tensor(1.3),
    "one per token": lambda rows: torch.linspace(0.5, 1.5, rows)[:, None],
}


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setattr(dispatch, "_chosen", {"cpu": "triton"})


def inputs(rows, V, dtype=BF16, spread=4.0):
    generator = torch.Generator().manual_seed(rows + V)
    logits = (torch.randn(rows, V, generator=generator) * spread).to(dtype)
    return logits, torch.randint(0, V, (rows,), generator=generator), torch.randn(rows, generator=generator)


def in_fp64(logits, labels, temperature, grad, edit=None):
    x = logits.double().requires_grad_()
    z = x if edit is None else edit(x, slice(0, len(x)))
    t = temperature.double() if isinstance(temperature, torch.Tensor) else temperature
    y = torch.log_softmax(z / t, -1).gather(1, labels[:, None]).squeeze(1)
    return y.detach(), torch.autograd.grad(y, x, grad.double())[0]


def near(found, exact):
    if found.dtype == BF16:
        return bool((found == exact.to(BF16)).float().mean() > KERNEL_EQUALS_ORACLE)
    return bool(sqnr(found, exact) > SQNR_KERNEL_FP32)


@pytest.mark.pairs
@pytest.mark.parametrize("shape", [(1, 1), (3, 40), (7, 2500), (33, LOGPROB_COLUMNS), (2, 5000)], ids=str)
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("spread", [0.5, 4.0, 40.0])  # of 40, most probabilities are smaller than any FP32 number
def test_gradients_against_fp64(shape, temperature, dtype, spread, monkeypatch):
    logits, labels, grad = inputs(*shape, dtype, spread)
    t = TEMPERATURES[temperature](shape[0])
    monkeypatch.setattr(logprob, "BLOCK_BYTES", 16 * 4 * shape[1])
    ours, reused = (logits.clone().requires_grad_() for _ in range(2))
    found = token_log_probs(ours, labels, t)
    found.backward(grad)
    expected = in_fp64(logits, labels, t, grad)[1]
    assert ours.grad.dtype is dtype
    if shape[1] > 1:  # of one token the log-prob is 0 whatever its logit
        assert near(ours.grad, expected) if spread < 40 else sqnr(ours.grad, expected) > SQNR_GEMM
    else:
        assert not ours.grad.any()
    token_log_probs(reused * 1, labels, t, reuse=True).backward(grad)
    assert torch.equal(reused.grad, ours.grad) and torch.equal(reused, logits)
    monkeypatch.setattr(dispatch, "_chosen", {"cpu": "torch"})
    assert torch.equal(token_log_probs(logits, labels, t), found)  # the forward pass is the same


def test_views_of_logits():
    logits, labels, grad = inputs(24, 300)
    for view in (lambda x: x.view(2, 12, 300)[:, :-1], lambda x: x[:, 17:]):
        ours = logits.clone().requires_grad_()
        part = view(ours)
        wanted = labels[: part.shape[:-1].numel()].view(part.shape[:-1]) % part.shape[-1]
        token_log_probs(part, wanted, 0.7).backward(grad[: wanted.numel()].view(wanted.shape))
        flat = part.detach().reshape(-1, part.shape[-1])
        expected = in_fp64(flat, wanted.flatten(), 0.7, grad[: wanted.numel()])[1]
        assert near(view(ours.grad).reshape(flat.shape), expected)
    assert token_log_probs(logits[:0].requires_grad_(), labels[:0]).shape == (0,)


def test_gradients_flow_through_an_edit():
    logits, labels, grad = inputs(50, 1000)
    marked, labels[5] = torch.arange(50) % 5 == 0, 950  # a banned token with a gradient

    def edit(x, rows):
        return x.masked_fill(marked[rows, None] & (torch.arange(1000) > 900), -1e30)

    ours = logits.clone().requires_grad_()
    found = token_log_probs(ours, labels, 0.7, edit=edit)
    found.backward(grad)
    expected, gradient = in_fp64(logits, labels, 0.7, grad, edit)
    assert near(ours.grad, gradient) and not ours.grad[marked, 901:].any()
    assert bool((found.double() - expected).abs()[~marked].max() < 1e-4)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_logits_that_are_not_finite(dtype):
    """A token of no probability has no gradient, even as a label; a row with a NaN stays visible, and only it."""
    logits, labels, grad = inputs(6, 3000, dtype)
    logits[1, 7], logits[2, 9], labels[2] = -float("inf"), -float("inf"), 9
    logits[4, 5], logits[5, 6] = float("nan"), float("inf")
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    token_log_probs(ours, labels).backward(grad)
    whole = torch.log_softmax(theirs.float(), -1).gather(1, labels[:, None]).squeeze(1)
    whole.backward(grad)
    assert torch.equal(ours.grad.isnan(), theirs.grad.isnan()) and ours.grad[4:].isnan().all()
    assert near(ours.grad[:4], in_fp64(logits[:4], labels[:4], 1.0, grad[:4])[1])
    assert not ours.grad[1, 7] and ours.grad[2, 9] == grad[2].to(dtype)


@pytest.mark.parametrize("head", [ops.linear, ops.head_linear_fp32])
def test_chunks_of_hidden_states_without_entropies(head, monkeypatch):
    """The kernel overwrites a block of logits, whose gradient then goes on to the hidden states and the head."""
    monkeypatch.setattr(logprob, "LOGIT_BYTES", 2 * 300 * 16)
    _, labels, grad = inputs(20, 300)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 32, generator=generator).to(BF16) for rows in (20, 300))
    found = []
    for rows in (5, 0):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        alone = token_log_probs(head(h, w), labels, 0.7) if rows == 0 else chunked_log_probs(h, w, labels, head, 0.7, rows)[0]
        alone.backward(grad)
        found.append((alone, h.grad, w.grad))
    (ours, *gradients), (theirs, *expected) = found
    logits = (hidden.double() @ weight.double().t()).to(BF16 if head is ops.linear else FP32)
    assert bool((theirs.double() - in_fp64(logits, labels, 0.7, grad)[0]).abs().max() < 1e-4)
    assert torch.equal(ours, theirs) and torch.equal(gradients[0], expected[0])
    assert sqnr(gradients[1], expected[1].float()) > SQNR_GEMM


def test_float16_and_columns_that_are_strided_take_torchs_operations():
    logits, labels, grad = inputs(20, 100, torch.float16)
    for given in (logits, logits.to(BF16).t().contiguous().t()):
        ours, theirs = given.detach().requires_grad_(), given.detach().requires_grad_()
        token_log_probs(ours, labels, 0.7).backward(grad)
        torch.log_softmax(theirs.float() / 0.7, -1).gather(1, labels[:, None]).squeeze(1).backward(grad)
        assert torch.equal(ours.grad, theirs.grad)


def test_a_second_backward_pass_over_reused_logits_is_refused():
    logits, labels, grad = inputs(20, 100)
    found = token_log_probs(logits.requires_grad_() * 1, labels, reuse=True)
    found.backward(grad, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.backward(grad)


@pytest.mark.parametrize(("serves", "dtype"), [("triton", BF16), ("triton", FP32), ("torch", BF16)], ids=str)
def test_bytes_of_a_logit_and_launches(serves, dtype, monkeypatch):
    """One read and one write of the logits, and the numbers of a row with each tile."""
    monkeypatch.setattr(dispatch, "_chosen", {"cpu": serves})
    rows, V = 20, 2 * LOGPROB_COLUMNS
    monkeypatch.setattr(logprob, "BLOCK_BYTES", 16 * 4 * V)  # two blocks
    logits, labels, grad = inputs(rows, V, dtype)
    moved = []
    for reuse in (False, True):
        given = logits.requires_grad_() * 1
        found = token_log_probs(given, labels, torch.full((rows, 1), 0.7), reuse=reuse)
        with Traffic() as counted:
            torch.autograd.grad(found, given, grad)
        moved.append((counted.bytes / logits.numel(), counted.launches))
    for each, launches in moved:
        if serves == "triton":
            assert 2 * dtype.itemsize <= each < 2 * dtype.itemsize + 0.02 and launches == 1
        else:
            assert each > 50 and launches >= 20
