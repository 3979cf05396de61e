"""The project's kernels on a GPU, bit for bit against formulas on a CPU and against each other, and a whole prepared model."""

from __future__ import annotations

import pytest
import torch

import jetrl_patch
from jetrl_patch.backends import quantize as reference
from jetrl_patch.config import Config
from jetrl_patch.exact import dispatch, ops
from jetrl_patch.kernels.formats import FP8, groups
from jetrl_patch.sync.digest import formula
from jetrl_patch.trainer import prepare

from ..dispatched import dispatched
from ..models import build
from ..waits import NothingIsReadBack

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # numpy's, in the interpreter
INTERPRETED = True
FORMATS = ["pow2", "fp32"]
#: [M, K] on a GPU; the interpreter takes the first two
SHAPES = [(1, 128), (130, 260), (300, 3584), (4096, 1000), (16384, 4096)]


@pytest.fixture(autouse=True)
def on_triton(device, monkeypatch):
    """What computes the exact operations: the project's kernels."""
    monkeypatch.setattr(dispatch, "attentions", {})
    if device.type == "cpu":
        monkeypatch.setattr(dispatch, "_chosen", {"cpu": "triton", "cuda": "triton"})
        yield
    else:
        with dispatched("auto", "cuda") as chosen:
            assert chosen == "triton"
            yield


@pytest.fixture(params=SHAPES, ids=str)
def shape(request, device):
    if device.type == "cpu" and request.param not in SHAPES[:2]:
        pytest.skip("too large for the interpreter")
    return request.param


def values(M: int, K: int, seed: int = 0) -> torch.Tensor:
    """BF16 with groups of very different size, zeros, and values next to powers of two; on the CPU."""
    generator = torch.Generator().manual_seed(seed + M + K)
    x = torch.randn(M, K, generator=generator) * torch.exp2(torch.randint(-20, 20, (M, 1), generator=generator).float())
    x[M // 2, : K // 2] = 0.0
    return x.to(torch.bfloat16)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether both have equal bytes, wherever they are."""
    a, b = (t.cpu().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8) for t in (found, expected))
    return found.shape == expected.shape and found.dtype == expected.dtype and torch.equal(a, b)


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("kind", ["quantize_activation", "quantize_tokens", "quantize_weight"])
def test_the_reference_computes_the_same_on_a_gpu(device, shape, kind, scale_format):
    x, quantizer = values(*shape), getattr(reference, kind)
    assert all(map(same, quantizer(x.to(device), scale_format), quantizer(x, scale_format)))


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("columns", [False, True])
def test_both_layouts_from_one_read(device, shape, scale_format, columns):
    from jetrl_patch.kernels.quantize import quantize_both

    x = values(*shape)
    (q, s), (qt, st) = reference.quantize_activation(x, scale_format), reference.quantize_tokens(x, scale_format)
    found = quantize_both(x.to(device), scale_format, columns=columns)
    assert same(found[0], q) and same(found[1], s) and same(found[2][:, : shape[0]], qt.t()) and same(found[3], st)
    assert found[2].shape[1] == (groups(shape[0]) * 128)


@pytest.mark.parametrize("scale_format", FORMATS)
def test_an_activation_is_regrouped_for_wgrad(device, shape, scale_format):
    from jetrl_patch.kernels.quantize import requantize_tokens

    q, s = reference.quantize_activation(values(*shape), scale_format)
    expected, scales = reference.quantize_tokens(reference.dequantize_activation(q, s, torch.bfloat16), scale_format)
    found = requantize_tokens(q.to(device), s.to(device), scale_format)
    assert same(found[0][:, : shape[0]], expected.t()) and same(found[1], scales)


@pytest.mark.parametrize("scale_format", FORMATS)
def test_a_fused_norm_is_the_norm_and_the_quantizer(device, shape, scale_format):
    from jetrl_patch.kernels import norm, quantize

    x, residual, weight = (values(*s, seed).to(device) for s, seed in ((shape, 0), (shape, 1), ((1, shape[1]), 2)))
    made = norm.norm_quantize_rows(x, None, weight[0], 1e-6, scale_format, keep=True)
    y = ops.rms_norm(x, weight[0], 1e-6)
    q, s = quantize.quantize_rows(y, scale_format)
    assert same(made.y_MK, y) and same(made.q_MK, q) and same(made.s_MG, s)
    added = norm.norm_quantize_rows(x, residual, weight[0], 1e-6, scale_format)
    q, s = quantize.quantize_rows(ops.rms_norm(x + residual, weight[0], 1e-6), scale_format)
    assert same(added.total_MK, x + residual) and same(added.q_MK, q) and same(added.s_MG, s)
    alone = norm.norm_quantize_rows(x, None, weight[0], 1e-6, scale_format)
    assert alone.total_MK is None and same(alone.q_MK, made.q_MK) and same(alone.s_MG, made.s_MG)


@pytest.mark.parametrize("scale_format", FORMATS)
def test_a_fused_activation_is_the_activation_and_the_quantizer(device, shape, scale_format):
    from jetrl_patch.kernels import norm, quantize

    gate, up = (values(*shape, seed).to(device) for seed in (0, 1))
    y = ops.silu_mul(gate, up)
    made = norm.silu_mul_quantize_rows(gate, up, scale_format, keep=True)
    q, s = quantize.quantize_rows(y, scale_format)
    assert same(made.y_MK, y) and same(made.q_MK, q) and same(made.s_MG, s)


@pytest.mark.parametrize(("rows", "groups_"), [(1, 1), (300, 33), (18944, 28)])
def test_block_scales_are_those_of_the_rows(device, rows, groups_):
    from jetrl_patch.kernels.gemm_common import block_scales

    s = torch.rand(-(-rows // 128), groups_, generator=torch.Generator().manual_seed(0)).repeat_interleave(128, 0)[:rows]
    s[-1, 0] *= 2  # a block whose rows share no scale, unless it has one row
    expected = reference.block_scales(s.contiguous())
    for given in (s.to(device), s.t().contiguous().to(device).t()):
        found = block_scales(given)
        assert torch.equal(found.isnan().cpu(), expected.isnan()) and same(found.nan_to_num(), expected.nan_to_num())
    assert bool(expected.isnan().any()) == (rows > 1)


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [(1, 1), (70, 300), (4096, 3584)], ids=str)
def test_the_digest_is_the_formula(device, size, dtype):
    if device.type == "cpu" and size[0] > 100:
        pytest.skip("too large for the interpreter")
    from jetrl_patch.kernels.digest import digest

    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (size[0], size[1] * dtype.itemsize), generator=generator, dtype=torch.uint8)
    matrix = raw.view(torch.uint8 if dtype == FP8 else dtype)
    assert same(digest(matrix.to(device), 1 << 20, 12345), formula(matrix, 1 << 20, 12345))
    part = matrix[size[0] // 2 :, size[1] // 3 :]
    on_device = matrix.to(device)[size[0] // 2 :, size[1] // 3 :]
    assert same(digest(on_device, 3, 10), formula(part, 3, 10))


@pytest.fixture
def model(device, monkeypatch):
    """A tiny Qwen3, prepared as a trainer's on a GPU."""
    jetrl_patch.enable(precision="fp8-unified", platform=device.type)
    if device.type == "cpu":
        monkeypatch.setattr(prepare, "choose_backend", lambda *asked: "triton")
        monkeypatch.setattr(dispatch, "configure", lambda *args: "triton")
    made = build("qwen3", num_hidden_layers=1 if device.type == "cpu" else 4).train().to(device)
    prepare.prepare_model(made, Config(precision="fp8-unified").resolved(), device_type="cuda")
    return made


def log_probs(model, ids, lengths):
    """Of a packed row [1, T] of sequences."""
    positions = torch.cat([torch.arange(n, device=ids.device) for n in lengths])[None]
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
    return ops.token_log_probs(logits, ids[0].roll(-1))


def test_a_prepared_model_gives_a_sequence_its_bits_in_every_batch(device, model):
    lengths = (5, 1, 9) if device.type == "cpu" else (300, 1, 77, 1025, 64)
    ids = (torch.arange(2, 2 + sum(lengths), device=device) * 7 % 200 + 2)[None]
    whole = log_probs(model, ids, lengths)
    whole.sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in model.parameters())
    with torch.no_grad():
        start = 0
        for n in lengths:
            alone = log_probs(model, ids[:, start : start + n], (n,))
            assert torch.equal(whole[start : start + n - 1], alone[: n - 1])
            start += n


def test_the_steps_after_the_first_wait_for_nothing(device, model):
    from jetrl_patch.exact import sequences

    lengths = (5, 1, 9)
    ids = torch.arange(2, 2 + sum(lengths), device=device)[None]
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
    sequences.mark(positions, 4)

    def step():
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
        ops.token_log_probs(logits, ids[0].roll(-1)).sum().backward()

    step()  # compiles
    with NothingIsReadBack():
        step()
