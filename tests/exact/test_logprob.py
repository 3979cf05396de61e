"""Log-probs in blocks of tokens: the same bits and gradients as in one pass, and the memory of one block."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from jetrl_patch.exact import logprob
from jetrl_patch.exact.logprob import token_log_probs

V = 1000


def whole(logits, labels, temperature=1.0):
    """The definition, over all tokens at once."""
    x = logits.float()
    if isinstance(temperature, torch.Tensor) or temperature != 1.0:
        x = x / temperature
    return torch.log_softmax(x, dim=-1).gather(-1, labels.long().unsqueeze(-1)).squeeze(-1)


@pytest.fixture(params=[1, 17, 1 << 20], ids=["16 rows", "64 rows", "all"])
def block(request, monkeypatch):
    monkeypatch.setattr(logprob, "BLOCK_BYTES", request.param * 4 * V * 4)


def inputs(*shape, dtype=torch.bfloat16, width=V):
    generator = torch.Generator().manual_seed(len(shape))
    logits = (torch.randn(*shape, width, generator=generator) * 4).to(dtype)
    return logits, torch.randint(0, width, shape, generator=generator), torch.randn(*shape, generator=generator)


TEMPERATURES = {
    "1": lambda shape: 1.0,
    "0.7": lambda shape: 0.7,
    "a tensor": lambda shape: torch.tensor(1.3),
    "one in three dimensions": lambda shape: torch.full((1,) * (len(shape) + 1), 0.9),
    "one per token": lambda shape: torch.linspace(0.5, 1.5, torch.Size(shape).numel()).view(*shape, 1),
    "one per sequence": lambda shape: torch.linspace(0.5, 1.5, shape[0]).view(-1, *[1] * len(shape)),
}


@pytest.mark.parametrize("shape", [(203,), (3, 45), (2, 3, 20)], ids=str)
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_has_the_bits_of_one_pass(block, shape, temperature, dtype):
    logits, labels, grad = inputs(*shape, dtype=dtype)
    t = TEMPERATURES[temperature](shape)
    theirs, ours, reused = (logits.clone().requires_grad_() for _ in range(3))
    expected = whole(theirs, labels, t)
    expected.backward(grad)
    found = token_log_probs(ours, labels, t)
    assert found.dtype is torch.float32 and torch.equal(found, expected)
    found.backward(grad)
    assert ours.grad.dtype is dtype and torch.equal(ours.grad, theirs.grad)
    token_log_probs(reused * 1, labels, t, reuse=True).backward(grad)
    assert torch.equal(reused.grad, theirs.grad)


def test_an_edit_sees_every_row_once_and_gradients_flow_through_it(block):
    logits, labels, grad = inputs(203)
    marked = torch.arange(203) % 5 == 0

    def edit(x, rows):
        return x.masked_fill(marked[rows, None] & (torch.arange(V) > 900), -1e30)

    theirs, ours = (logits.clone().requires_grad_() for _ in range(2))
    expected = whole(edit(theirs.float(), slice(0, 203)), labels)
    expected.backward(grad)
    found = token_log_probs(ours, labels, edit=edit)
    found.backward(grad)
    assert torch.equal(found, expected) and torch.equal(ours.grad, theirs.grad)


def test_views_of_logits(block):
    logits, labels, grad = inputs(3, 45)
    theirs, ours = (logits.clone().requires_grad_() for _ in range(2))
    expected, found = whole(theirs[:, :-1], labels[:, 1:]), token_log_probs(ours[:, :-1], labels[:, 1:])
    assert torch.equal(found, expected)
    expected.backward(grad[:, 1:])
    found.backward(grad[:, 1:])
    assert torch.equal(ours.grad, theirs.grad)
    assert torch.equal(token_log_probs(logits[0, 0], labels[0, 0]), whole(logits[0, 0], labels[0, 0]))
    assert token_log_probs(logits[:, :0], labels[:, :0]).shape == (3, 0)


def test_blocks_keep_the_alignment_of_rows():
    """On CUDA a row's bits may depend on its alignment to 16 bytes if V is not a multiple of 4."""
    for rows, width in [(500, 1000), (10_000, 151_936), (7, 1), (1, 1 << 26)]:
        parts = list(logprob.blocks(torch.empty(rows, width, device="meta")))
        assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])] and parts[-1].stop == rows
        assert all(part.start % 16 == 0 for part in parts)
        assert all((p.stop - p.start) * width * 4 <= max(logprob.BLOCK_BYTES, 64 * width) for p in parts)


def test_a_second_backward_pass_over_reused_logits_is_refused():
    logits, labels, grad = inputs(20)
    found = token_log_probs(logits.requires_grad_() * 1, labels, reuse=True)
    found.backward(grad, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.backward(grad)


class Peak(TorchDispatchMode):
    """The peak bytes of live tensors that operators allocate."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and not func.is_view:
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage):
        import weakref

        key = storage.data_ptr()
        if key in self.seen or not storage.nbytes():
            return
        self.seen.add(key)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, key, storage.nbytes())

    def _freed(self, key, size):
        self.seen.discard(key)
        self.now -= size


def peak(function):
    gc.collect()
    with Peak() as counted:
        function()
    return counted.peak


def test_memory_of_one_block(monkeypatch):
    """At most 1.2 times the logits, themselves included, plus one block."""
    rows, width = 2048, 4096
    monkeypatch.setattr(logprob, "BLOCK_BYTES", 32 * 4 * width)
    labels, size = torch.zeros(rows, dtype=torch.long), rows * width * 2

    def step(score, **options):
        def run():
            hidden = torch.ones(rows, 1, dtype=torch.bfloat16, requires_grad=True)
            logits = hidden @ torch.ones(1, width, dtype=torch.bfloat16)
            found = score(logits, labels, 0.7, **options).sum()
            del logits
            found.backward()

        return run

    block = logprob.BLOCK_BYTES
    assert peak(step(token_log_probs, reuse=True)) <= 1.2 * size + block
    assert 2 * size < peak(step(token_log_probs)) <= 2.2 * size + block  # the gradient in memory of its own
    assert peak(step(whole)) > 5 * size
