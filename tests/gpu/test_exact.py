"""The exact ops on a GPU: the row trial that every engine runs, values against FP64, and a captured decode step."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from jetrl_patch.backends import capability
from jetrl_patch.exact import delta_net, dispatch, flash3, ops, trial
from jetrl_patch.fp8.lora import merged_weight

from ..dispatched import dispatched
from ..exact import test_delta_net as delta_nets
from ..fp8.thresholds import (
    KERNEL_EQUALS_ORACLE,
    SQNR_ATTENTION,
    SQNR_ATTENTION_GRADIENT,
    SQNR_DELTA_NET,
    SQNR_DELTA_NET_GRADIENT,
    SQNR_GEMM,
    sqnr,
)
from .optional import not_tried

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
MODELS = {
    "example": trial.Sizes(256, 512, 4, 2, 64, 512),
    "Qwen2.5-0.5B": trial.Sizes(896, 4864, 14, 2, 64, 151936),
    "Qwen2.5-7B": trial.Sizes(3584, 18944, 28, 4, 128, 152064),
    "Qwen3-8B": trial.Sizes(4096, 12288, 32, 8, 128, 151936),
    "Qwen3-Next-80B-A3B": trial.Sizes(2048, 5120, 16, 2, 256, 151936),
    "Llama-3.1-8B TP=4": trial.Sizes(4096, 3584, 8, 2, 128, 128256),
}
LENGTHS = [1, 33, 7, 64, 300, 1025]


@pytest.fixture(autouse=True)
def kernels(device):
    ok, reason = capability.check_exact_cuda()
    if not ok:
        pytest.skip(reason)
    with dispatched("auto", "cuda") as chosen:
        assert chosen == "triton"
        yield


@pytest.fixture(params=["triton", flash3.FLASH3])
def attention(request, monkeypatch):
    """What computes attention: the project's kernel, or FlashAttention-3 where vLLM has it."""
    kernel, missing = flash3.find()
    if request.param == flash3.FLASH3 and kernel is None:
        not_tried("FlashAttention-3", missing)
    chosen = request.param if request.param == flash3.FLASH3 else ""
    monkeypatch.setattr(dispatch, "attentions", {("cuda", width): chosen for width in (64, 128, 256)})
    return request.param


def rand(device, *shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(BF16)


#: Moonlight, and a rank of DeepSeek-V3 with TP 8
LATENT = {"Moonlight": (2048, 11264, 16, 163840), "DeepSeek-V3 TP=8": (7168, 2304, 16, 129280)}
LATENT = {name: trial.Sizes(*sizes[:3], 1, 576, sizes[3], 512) for name, sizes in LATENT.items()}


@pytest.mark.parametrize("model", [*MODELS, *LATENT])
def test_rows_do_not_depend_on_the_batch(device, model):
    found = dict(trial.compare_ops((MODELS | LATENT)[model], device, large=trial.LARGE))
    assert all(verdict.ok for verdict in found.values()), found


@pytest.mark.parametrize("page", [16, 64, 128])
@pytest.mark.parametrize("model", MODELS)
def test_rows_of_attention_do_not_depend_on_the_batch(device, attention, model, page):
    sizes = MODELS[model]
    verdict = trial.compare_attention((sizes.heads, sizes.kv_heads), sizes.head_dim, device, page, large=trial.LARGE)
    assert verdict.ok, verdict.found


def oracle(q, k, v, ends, scale):
    out, per = [], q.shape[1] // k.shape[1]
    for a, b in itertools.pairwise(ends):
        Q, K, V = (
            t[a:b].double().transpose(0, 1) for t in (q, k.repeat_interleave(per, 1), v.repeat_interleave(per, 1))
        )
        hidden = torch.ones(b - a, b - a, dtype=torch.bool, device=q.device).triu(1)
        weights = (Q @ K.transpose(-1, -2) * scale).masked_fill(hidden, float("-inf")).softmax(-1)
        out.append((weights @ V).transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 64), (7, 1, 64), (8, 2, 128), (28, 4, 128), (16, 2, 256)])
def test_attention_and_its_gradients_against_fp64(device, attention, heads, kv_heads, width):
    ends = [0, *itertools.accumulate(LENGTHS)]
    q, k, v = (
        rand(device, ends[-1], h, width, seed=i).requires_grad_() for i, h in enumerate((heads, kv_heads, kv_heads))
    )
    grad = rand(device, *q.shape, seed=5)
    cu = torch.tensor(ends, dtype=torch.int32, device=device)
    out = ops.attention_varlen(q, k, v, cu, width**-0.5)
    out.backward(grad)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected = oracle(*wide, ends, width**-0.5)
    expected.backward(grad.double())
    assert sqnr(out.detach(), expected.detach()) > SQNR_ATTENTION
    for ours, theirs in zip((q, k, v), wide):
        assert sqnr(ours.grad, theirs.grad) > SQNR_ATTENTION_GRADIENT


@pytest.mark.parametrize("heads", [2, 16])
def test_latent_attention_and_its_gradients_against_fp64(device, heads):
    ends, scale = [0, *itertools.accumulate(LENGTHS)], 0.07
    q, k = (rand(device, ends[-1], h, 576, seed=i).requires_grad_() for i, h in enumerate((heads, 1)))
    cu = torch.tensor(ends, dtype=torch.int32, device=device)
    out = ops.attention_varlen(q, k, k[..., :512], cu, scale)
    wide = [t.detach().double().requires_grad_() for t in (q, k)]
    expected = oracle(*wide, wide[1][..., :512], ends, scale)
    grad = rand(device, *out.shape, seed=5)
    out.backward(grad)
    expected.backward(grad.double())
    assert sqnr(out.detach(), expected.detach()) > SQNR_ATTENTION
    for ours, theirs in zip((q, k), wide):
        assert sqnr(ours.grad, theirs.grad) > SQNR_ATTENTION_GRADIENT


@pytest.mark.parametrize("shape", [(16, 32, 128, 128), (2, 4, 64, 64), (3, 3, 40, 24)])
def test_tokens_of_delta_nets_do_not_depend_on_the_batch(device, shape):
    trial.require_exact_delta_net(shape, trial.Sizes(2048, 0, 16, 2, 256, 0), device)


@pytest.mark.parametrize("shape", [(4, 8, 128, 128), (3, 3, 40, 24)])
def test_delta_nets_and_their_gradients_against_fp64(device, shape):
    lengths = (1, 130, 700)
    starts = delta_nets.starts_of(lengths).to(device)
    x, gates, weights = delta_nets.given(shape, sum(lengths))
    ours = [t.to(device).requires_grad_() for t in (x, *gates, *weights)]
    theirs = [t.detach().double().requires_grad_() for t in ours]
    out = delta_net.delta_net(ours[0], tuple(ours[1:3]), tuple(ours[3:]), starts, shape)
    ends = [0, *itertools.accumulate(lengths)]
    parts = [[t[a:b] for t in theirs[:3]] for a, b in itertools.pairwise(ends)]
    expected = torch.cat([delta_nets.reference(*part, *theirs[3:], sizes=shape) for part in parts])
    grad = rand(device, *out.shape)
    out.backward(grad)
    expected.backward(grad.double())
    assert sqnr(out.detach(), expected.detach()) > SQNR_DELTA_NET
    for name, mine, right in zip(("x", "a", "b", "convolution", "A_log", "dt_bias"), ours, theirs):
        assert sqnr(mine.grad, right.grad) > SQNR_DELTA_NET_GRADIENT, name


@pytest.mark.parametrize("shape", [(130, 260, 8), (1024, 4096, 64)])
def test_the_merged_weight_of_lora_is_that_of_a_cpu(device, shape):
    N, K, R = shape
    w, a, b = rand(device, N, K), rand(device, R, K, seed=1), rand(device, N, R, seed=2)
    assert torch.equal(merged_weight(w, a, b, 0.3).cpu(), merged_weight(w.cpu(), a.cpu(), b.cpu(), 0.3))


def test_values_of_the_other_ops(device):
    x, w = rand(device, 300, 1000), rand(device, 700, 1000, seed=1)
    exact = x.double()
    rstd = (exact.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt().float()
    assert torch.equal(ops.rms_norm(x, w[0], 1e-6), w[0] * (x.float() * rstd).to(BF16))
    assert torch.equal(ops.silu_mul(x, x.flip(1)), F.silu(exact).to(BF16) * x.flip(1))
    assert (ops.linear(x, w) == (exact @ w.double().t()).to(BF16)).float().mean() > KERNEL_EQUALS_ORACLE
    halves = [
        ops.partial_sum(x[:, part].contiguous(), w[:, part].contiguous()) for part in (slice(500), slice(500, 1000))
    ]
    assert torch.equal(ops.linear(x, w, None, 2), (halves[0] + halves[1]).to(BF16))


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
def test_log_probs_are_those_of_vllms_sampler(device, temperature):
    logits, labels = rand(device, 64, 151936) * 3, torch.arange(64, device=device)
    divided = logits.to(torch.float32).div_(torch.full((64, 1), temperature, device=device))
    expected = divided.log_softmax(-1, dtype=torch.float32).gather(1, labels[:, None]).squeeze(1)
    assert torch.equal(ops.token_log_probs(logits, labels, temperature), expected)


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_of_log_probs_against_fp64(device, dtype, temperature):
    logits, labels = (rand(device, 40, 151936) * 3).to(dtype), torch.arange(40, device=device)
    grad = rand(device, 40, seed=1).float()
    ours, reused = (logits.clone().requires_grad_() for _ in range(2))
    ops.token_log_probs(ours, labels, temperature).backward(grad)
    wide = logits.double().requires_grad_()
    (wide / temperature).log_softmax(-1).gather(1, labels[:, None]).squeeze(1).backward(grad.double())
    assert ours.grad.dtype == dtype and sqnr(ours.grad, wide.grad) > SQNR_GEMM
    found = ops.token_log_probs(scores := reused * 1, labels, temperature, reuse=True)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    (gradient,) = torch.autograd.grad(found, scores, grad)
    assert torch.equal(gradient, ours.grad)
    assert torch.cuda.max_memory_allocated() - before < logits.nbytes / 10  # written over the logits, without copies


@pytest.mark.parametrize(("heads", "others", "width", "rotated"), [(28, 4, 128, 128), (7, 1, 64, 64), (5, 3, 128, 64)])
@pytest.mark.parametrize("table", [BF16, torch.float32], ids=str)
def test_rotated_pairs_have_hugging_faces_bits_and_gradients(device, heads, others, width, rotated, table):
    from transformers.models.glm4_moe.modeling_glm4_moe import apply_rotary_pos_emb

    fused = rand(device, 2, 300, heads + others, width)  # strided, as parts of one projection are
    q, k = (t.transpose(1, 2).detach().requires_grad_() for t in fused.split((heads, others), 2))
    angle = rand(device, 1, 300, rotated, seed=1).float() * 10
    cos, sin = angle.cos().to(table), angle.sin().to(table)
    found, expected = ops.rotate_pair(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    grads = [rand(device, *y.shape, seed=2).to(y.dtype) for y in found]
    wide = [t.detach().double().requires_grad_() for t in (q, k)]
    exact = apply_rotary_pos_emb(*wide, cos.double(), sin.double())
    gradients = torch.autograd.grad(exact, wide, [g.double() for g in grads])
    eager = torch.autograd.grad(expected, (q, k), grads)
    for ours, theirs, exactly in zip(torch.autograd.grad(found, (q, k), grads), eager, gradients, strict=True):
        assert sqnr(ours, exactly) > SQNR_GEMM and (ours - exactly).norm() <= (theirs - exactly).norm()


def test_a_captured_decode_step_follows_its_inputs(device, attention):
    # Three programs share a context. Without synchronization, and with a grid that depends on shapes only, a graph serves other
    # lengths and tables.
    g = torch.Generator().manual_seed(0)
    k_cache, v_cache = (rand(device, 640, 16, 2, 64, seed=i) for i in (1, 2))
    q, starts = rand(device, 4, 4, 64), torch.arange(5, dtype=torch.int32, device=device)
    table = torch.zeros(4, 160, dtype=torch.int32, device=device)
    lengths = torch.ones(4, dtype=torch.int32, device=device)

    def step():
        return ops.attention_paged(q, k_cache, v_cache, table, lengths, starts, 0.125)

    step()  # compiles before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        lengths.copy_(torch.randint(1, 2561, (4,), generator=g))
        table.copy_(torch.randperm(640, generator=g).view(4, 160))
        graph.replay()
        assert torch.equal(captured, step())


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (300, 1000), (4096, 3584), (9, 18944)])
def test_gradients_of_silu_and_the_norm_against_fp64(device, rows, width):
    x, up, dy = (rand(device, rows, width, seed=i).requires_grad_() for i in range(3))
    weight = rand(device, width, seed=3).requires_grad_()
    wide = [t.detach().double().requires_grad_() for t in (x, up, weight)]
    cases = [(ops.silu_mul(x, up), F.silu(wide[0]) * wide[1], (x, up), wide[:2])]
    if width <= 16384:
        norm = F.rms_norm(wide[0], (width,), wide[2], 1e-6)
        cases.append((ops.rms_norm(x, weight, 1e-6), norm, (x, weight), (wide[0], wide[2])))
    for y, exact, inputs, exact_inputs in cases:
        found, expected = torch.autograd.grad(y, inputs, dy), torch.autograd.grad(exact, exact_inputs, dy.detach().double())
        for ours, theirs in zip(found, expected):
            assert sqnr(ours, theirs) > SQNR_GEMM
