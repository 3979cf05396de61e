"""Gated delta nets in exact mode: a token's bits do not depend on the batch or on cuts, and values and gradients are correct."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from jetrl_patch.errors import ConfigError
from jetrl_patch.exact.delta_net import delta_net, delta_net_paged, require_kernels
from jetrl_patch.exact.elementwise import rms_norm
from jetrl_patch.native import build, ops
from tests.dispatched import dispatched
from tests.fp8.thresholds import SQNR_DELTA_NET, SQNR_DELTA_NET_GRADIENT, sqnr

BF16 = torch.bfloat16
#: in Triton's interpreter, which is slow, ``tests/kernels/interpreted_delta.py`` runs some of these tests
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
#: (KH, H, K, V): heads that share keys, and widths that end inside a vector
SIZES = {"shared": (2, 4, 16, 16), "odd": (1, 1, 10, 24)} if INTERPRETED else {"shared": (2, 4, 64, 64), "odd": (3, 3, 40, 24)}
LENGTHS = (1, 3, 34, 2) if INTERPRETED else (1, 3, 130, 64, 7, 65)
TAPS = 4
Given = tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


@pytest.fixture(autouse=True)
def native() -> Iterator[None]:
    with dispatched("native"):
        yield


def given(sizes: tuple[int, int, int, int], T: int, seed: int = 0) -> Given:
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(BF16)

    KH, H, K, V = sizes
    C = 2 * KH * K + H * V
    decays = (torch.rand(H, generator=generator) * 4 + 0.1).log().to(BF16)  # a state that lasts for a token, or for many
    return rand(T, C), (rand(T, H) - 2, rand(T, H)), (rand(C, TAPS) * 0.6, decays, rand(H))


def starts_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def rows(x: Given, part: slice) -> Given:
    return x[0][part], (x[1][0][part], x[1][1][part]), x[2]


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_sequence_has_the_same_bits_alone(sizes: tuple[int, int, int, int]) -> None:
    starts = starts_of(LENGTHS)
    x = given(sizes, int(starts[-1]))
    whole = delta_net(*x, starts, sizes)
    for a, b in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        alone = delta_net(*rows(x, slice(a, b)), starts_of((b - a,)), sizes)
        assert torch.equal(alone, whole[a:b])
    half = delta_net(*rows(x, slice(0, 2)), starts_of((1, 1)), sizes)
    assert torch.equal(half[:1], whole[:1]) and not torch.equal(half[1:], whole[2:3])


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("chunk", [1, 2, 3, 50])
def test_chunks_of_a_rollout_have_the_trainers_bits(sizes: tuple[int, int, int, int], chunk: int) -> None:
    """Sequences of 130, 64 and 7 tokens, in steps that mix them, from slots that hold another sequence's state."""
    KH, H, K, V = sizes
    lengths, C = (20, 9, 3) if INTERPRETED else (130, 64, 7), 2 * KH * K + H * V
    starts = starts_of(lengths)
    x = given(sizes, int(starts[-1]))
    trained = delta_net(*x, starts, sizes)
    page = torch.full((6, (TAPS - 1) * C * 2 + H * K * V * 4), 0x7F, dtype=torch.uint8)  # NaN
    states = page[:, : (TAPS - 1) * C * 2].view(BF16), page[:, (TAPS - 1) * C * 2 :].view(torch.float32)
    slots, found, done = torch.tensor([4, 0, 2]), torch.empty_like(trained), [0, 0, 0]
    while any(a < n for a, n in zip(done, lengths, strict=True)):
        live = [r for r in range(3) if done[r] < lengths[r]]
        fresh = [min(chunk, lengths[r] - done[r]) for r in live]
        at = [range(int(starts[r]) + done[r], int(starts[r]) + done[r] + n) for r, n in zip(live, fresh, strict=True)]
        picked = torch.tensor([row for part in at for row in part])
        xs, gates, weights = rows(x, picked)  # type: ignore[arg-type]
        begins = torch.tensor([done[r] == 0 for r in live])
        found[picked] = delta_net_paged(xs, gates, weights, starts_of(tuple(fresh)), sizes, states, slots[live], begins)
        for r, n in zip(live, fresh, strict=True):
            done[r] += n
    assert torch.equal(found, trained)
    assert bool((page[[1, 3, 5]] == 0x7F).all())  # other slots are left alone


def reference(x: Tensor, a: Tensor, b: Tensor, w: Tensor, A_log: Tensor, dt_bias: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """One sequence in FP64."""
    KH, H, K, V = sizes
    y = F.silu(F.conv1d(F.pad(x.t(), (TAPS - 1, 0))[None], w.unsqueeze(1), groups=w.shape[0])[0].t())
    q, k, v = (t.unflatten(1, (heads, -1)) for t, heads in zip(y.split([KH * K, KH * K, H * V], 1), (KH, KH, H), strict=True))
    q, k = ((t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(H // KH, 1) for t in (q, k))
    decay, beta = (-A_log.exp() * F.softplus(a + dt_bias)).exp(), b.sigmoid()
    S, out = x.new_zeros(H, K, V), []
    for t in range(x.shape[0]):
        S = S * decay[t, :, None, None]
        u = (v[t] - torch.einsum("hk,hkv->hv", k[t], S)) * beta[t, :, None]
        S = S + k[t].unsqueeze(-1) * u.unsqueeze(1)
        out.append(torch.einsum("hk,hkv->hv", q[t], S) * K**-0.5)
    return torch.stack(out)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_values_and_gradients_are_those_of_fp64(sizes: tuple[int, int, int, int]) -> None:
    starts = starts_of(LENGTHS)
    x, gates, weights = given(sizes, int(starts[-1]))
    ours = [t.clone().float().requires_grad_() for t in (x, *gates, *weights)]
    theirs = [t.double().requires_grad_() for t in (x, *gates, *weights)]
    out = delta_net(ours[0], (ours[1], ours[2]), (ours[3], ours[4], ours[5]), starts, sizes)
    pieces = [slice(a, b) for a, b in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)]
    expected = torch.cat([reference(*(t[part] for t in theirs[:3]), *theirs[3:], sizes=sizes) for part in pieces])
    assert sqnr(out.detach(), expected.detach()) > SQNR_DELTA_NET
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(BF16)
    out.backward(grad)
    expected.backward(grad.double())
    for name, mine, right in zip(("x", "a", "b", "convolution", "A_log", "dt_bias"), ours, theirs, strict=True):
        assert mine.grad is not None and right.grad is not None
        assert sqnr(mine.grad, right.grad) > SQNR_DELTA_NET_GRADIENT, name


def test_it_is_hugging_faces_formula() -> None:
    """transformers' chunks of 64 tokens, on the same convolution."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    sizes = KH, H, K, V = SIZES["shared"]
    x, (a, b), (w, A_log, dt_bias) = given(sizes, 150)
    y = ops.conv(x, w, starts_of((150,)))
    q, k, v = (t.unflatten(1, (n, -1))[None] for t, n in zip(y.split([KH * K, KH * K, H * V], 1), (KH, KH, H), strict=True))
    q, k = (t.float().repeat_interleave(H // KH, 2) for t in (q, k))
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias)
    hf, _ = torch_chunk_gated_delta_rule(q, k, v.float(), g[None], b.float().sigmoid()[None], use_qk_l2norm_in_kernel=True)
    assert sqnr(delta_net(x, (a, b), (w, A_log, dt_bias), starts_of((150,)), sizes), hf[0]) > SQNR_DELTA_NET


@pytest.mark.parametrize("name", [name for name in build.supported() if name != build.instruction_set()])
def test_every_instruction_set_has_the_same_bits(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    sizes = SIZES["odd"]
    x, starts = given(sizes, 66), starts_of((64, 2))
    once, w = delta_net(*x, starts, sizes), x[2][0][:, 0].contiguous()
    normed = ops.rms_norm(x[0], w, 1e-6, one_plus=True)[0]
    held: ctypes.CDLL = build.load(name)
    monkeypatch.setattr(ops, "library", lambda: held)
    assert torch.equal(delta_net(*x, starts, sizes), once)
    assert torch.equal(ops.rms_norm(x[0], w, 1e-6, one_plus=True)[0], normed)


def test_threads_do_not_change_bits() -> None:
    sizes = SIZES["shared"]
    x, starts = given(sizes, 200), starts_of((150, 50))
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(delta_net(*x, starts, sizes))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


def test_a_faded_state_is_zero() -> None:
    """A state that decays would become subnormal, which is slow, and which some libraries turn off in one process."""
    sizes = KH, H, K, V = SIZES["shared"]
    x, (a, b), weights = given(sizes, 40)
    x[1:, 2 * KH * K :] = 0  # no values after the first token
    states = torch.zeros(1, (TAPS - 1) * x.shape[1], dtype=BF16), torch.zeros(1, H * K * V)
    delta_net_paged(x, (a + 20, b), weights, starts_of((40,)), sizes, states, torch.tensor([0]), torch.tensor([True]))
    assert bool((states[1] == 0).all())


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_norms_that_multiply_by_one_plus_their_weight(backend: str) -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

    x = torch.randn(257, 200, generator=torch.Generator().manual_seed(0)).to(BF16)
    hf = Qwen3NextRMSNorm(200)
    with torch.no_grad():
        hf.weight.copy_(torch.randn(200, generator=torch.Generator().manual_seed(1)).to(BF16))
    with dispatched(backend):
        weight, leaf = hf.weight.detach().clone().requires_grad_(), x.clone().requires_grad_()
        y = rms_norm(leaf, weight, 1e-6, one_plus=True)
        part = rms_norm(x[5:12], weight, 1e-6, one_plus=True)
        y.float().square().sum().backward()
    assert float((y == hf(x)).float().mean()) > 0.995 and torch.equal(part, y[5:12])
    x64, w64 = x.double().requires_grad_(), hf.weight.detach().double().requires_grad_()
    y64 = x64 * (x64.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + w64)
    y64.square().sum().backward()
    assert leaf.grad is not None and weight.grad is not None and x64.grad is not None and w64.grad is not None
    assert sqnr(leaf.grad, x64.grad) > 35 and sqnr(weight.grad, w64.grad) > 35


def test_torchs_sigmoid_of_bf16_depends_on_the_value_alone() -> None:
    """Both sides multiply attention by ``torch.sigmoid(gate)``: no place in a vector, and no stride, may change a bit."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16)
    x = x[~x.isnan()]
    whole = torch.sigmoid(x)
    assert torch.equal(torch.cat([torch.sigmoid(part) for part in x.split(1)]), whole)
    assert all(torch.equal(torch.sigmoid(x[at:]), whole[at:]) for at in range(1, 33))
    assert torch.equal(torch.sigmoid(torch.stack((x, x), 1)[:, 1]), whole)


def test_without_kernels_it_is_refused() -> None:
    with dispatched("torch"), pytest.raises(ConfigError, match=r"gated delta nets: required .*found the torch ops\. Use .*lin"):
        require_kernels("cpu")
    require_kernels("cpu"), require_kernels("cuda")  # the driver of a GPU's trainer may have none
    for device, backend in (("cuda", "torch"), ("npu", "auto")):
        with pytest.raises(ConfigError, match="gated delta nets: required a GPU, or a CPU and a C compiler"):
            require_kernels(device, backend)
