"""Queries and keys rotated by one kernel, in the interpreter: Hugging Face's bits, and gradients against FP64."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
import triton
from transformers.models.glm4_moe.modeling_glm4_moe import apply_rotary_pos_emb as partial
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb as eager

from jetrl_patch.backends.row_equality import Unequal
from jetrl_patch.exact import dispatch, ops, trial
from jetrl_patch.fp8 import fused as adapter
from jetrl_patch.fp8 import producers
from jetrl_patch.models.families import FAMILIES

from ..fp8.thresholds import KERNEL_EQUALS_ORACLE, SQNR_KERNEL_FP32, sqnr
from ..models import build
from .traffic import Traffic

assert triton.knobs.runtime.interpret
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

BF16, FP32 = torch.bfloat16, torch.float32
#: batch, query heads, key heads, tokens, head width, rotated width, rows of the tables
SIZES = [
    (1, 4, 2, 5, 64, 64, 1), (2, 7, 1, 3, 64, 64, 2), (3, 17, 5, 2, 128, 128, 1), (1, 3, 3, 1, 40, 40, 1), (2, 1, 1, 4, 2, 2, 2),
]  # fmt: skip
PARTS = [(1, 5, 2, 3, 128, 64, 1), (2, 3, 1, 2, 40, 10, 2), (1, 2, 2, 3, 64, 2, 1)]
EVERY = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16)


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setattr(dispatch, "_chosen", {"cpu": "triton"})


def rand(*shape, seed=0, dtype=BF16):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * 2).to(dtype)


def tables(rows, tokens, width, dtype=BF16, seed=5):
    """Halves that differ, so that none is read for the other."""
    angle = rand(rows, tokens, width, seed=seed, dtype=FP32)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def heads_of(layout, B, heads, T, D, dtype, seed):
    """[B, heads, T, D] in one of the ways in which it may lie in memory."""
    if layout == "fused":  # part of a projection of queries, keys and values
        return rand(B, T, heads + 3, D, seed=seed, dtype=dtype)[:, :, 1 : heads + 1].transpose(1, 2)
    if layout == "turned":
        return rand(B, heads, D, T, seed=seed, dtype=dtype).transpose(2, 3)
    made = rand(B, T, heads, D, seed=seed, dtype=dtype).transpose(1, 2)
    return made.contiguous() if layout == "by head" else made


def inputs(size, layout="by token", dtype=BF16, table=BF16):
    B, heads, others, T, D, R, rows = size
    return (
        heads_of(layout, B, heads, T, D, dtype, 1), heads_of(layout, B, others, T, D, dtype, 2), *tables(rows, T, R, table),
    )  # fmt: skip


def bits(t):
    """Zeros of either sign differ, and one NaN is as good as another."""
    whole = torch.where(t.isnan(), torch.full_like(t, float("nan")), t)
    return whole.contiguous().view(torch.int16 if t.dtype == BF16 else torch.int32)


def same(found, expected):
    pairs = list(zip(found, expected, strict=True))
    return all(f.dtype == e.dtype and f.shape == e.shape and torch.equal(bits(f), bits(e)) for f, e in pairs)


@pytest.mark.pairs
@pytest.mark.parametrize("size", SIZES + PARTS, ids=str)
@pytest.mark.parametrize("layout", ["by token", "by head", "fused", "turned"])
@pytest.mark.parametrize(("dtype", "table"), [(BF16, BF16), (BF16, FP32), (FP32, BF16), (FP32, FP32)], ids=str)
def test_has_hugging_faces_bits(size, layout, dtype, table):
    given = inputs(size, layout, dtype, table)
    found, expected = ops.rotate_pair(*given), (eager if size in SIZES else partial)(*given)
    assert same(found, expected)
    if layout == "by token" and size in SIZES:  # attention flattens these without a copy
        assert all(y.transpose(1, 2).is_contiguous() for y in (*found, *expected))


def test_every_value():
    q = EVERY.view(1, 8, 64, 128)
    given = (q, q.flip(1)[:, :3], *tables(1, 64, 128))
    assert same(ops.rotate_pair(*given), eager(*given))
    small = EVERY[(EVERY.abs() < 1e-36) & ~EVERY.isnan()][:512].view(1, 1, 8, 64)
    assert same(ops.rotate_pair(small, small, *tables(1, 8, 64)), eager(small, small, *tables(1, 8, 64)))


def gradients(function, given, grads):
    q, k, *rest = given
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    return torch.autograd.grad(function(q, k, *rest), (q, k), grads)


@pytest.mark.pairs
@pytest.mark.parametrize("size", SIZES + PARTS, ids=str)
@pytest.mark.parametrize("layout", ["by token", "by head", "fused", "turned"])
@pytest.mark.parametrize(("dtype", "table"), [(BF16, BF16), (BF16, FP32), (FP32, FP32)], ids=str)
def test_gradients_against_fp64(size, layout, dtype, table):
    given, function = inputs(size, layout, dtype, table), eager if size in SIZES else partial
    grads = [heads_of(layout, *y.shape[:3], y.shape[3], y.dtype, 7) for y in function(*given)]
    found, theirs = gradients(ops.rotate_pair, given, grads), gradients(function, given, grads)
    exact = gradients(function, [t.double() for t in given], [g.double() for g in grads])
    for ours, eagers, expected in zip(found, theirs, exact):
        assert ours.dtype == dtype and ours.shape == expected.shape
        if dtype == FP32:
            assert sqnr(ours, expected) > SQNR_KERNEL_FP32
            continue
        assert (ours == expected.to(BF16)).float().mean() > KERNEL_EQUALS_ORACLE
        assert (ours - expected).norm() <= (eagers - expected).norm()


def test_one_launch_each_way_and_its_bytes():
    size = (2, 28, 4, 6, 128, 128, 1)
    given = [t.requires_grad_(i < 2) for i, t in enumerate(inputs(size))]
    elements = sum(t.numel() for t in given[:2])
    grads = [torch.ones_like(t) for t in given[:2]]
    with Traffic() as forward:
        found = ops.rotate_pair(*given)
    with Traffic() as backward:
        torch.autograd.grad(found, given[:2], grads)
    for counted in (forward, backward):
        assert counted.launches == 1 and 4 < counted.bytes / elements < 4.5  # three tiles a token read its row of the tables
    with Traffic() as theirs:
        torch.autograd.grad(eager(*given), given[:2], grads)
    assert theirs.launches >= 24 and theirs.bytes / elements > 45


def test_nothing_is_kept_without_gradients_and_one_input_may_have_none():
    q, k, cos, sin = inputs(SIZES[0])
    with torch.no_grad():
        assert not any(y.requires_grad for y in ops.rotate_pair(q.requires_grad_(), k, cos, sin))
    found = ops.rotate_pair(q, k, cos, sin)
    both = gradients(ops.rotate_pair, (q, k, cos, sin), [torch.ones_like(y) for y in found])
    assert torch.equal(torch.autograd.grad(found[0].sum(), q)[0], both[0])
    empty = inputs((1, 4, 2, 0, 64, 64, 1))
    assert [y.shape for y in ops.rotate_pair(*empty)] == [(1, 4, 0, 64), (1, 2, 0, 64)]


def test_what_the_kernel_does_not_take(monkeypatch):
    q, k, cos, sin = inputs(SIZES[0])
    refused = {
        "float16": (q.half(), k, cos, sin), "tables in float16": (q, k, cos.half(), sin.half()),
        "a table with a gradient": (q, k, cos.float().requires_grad_(), sin.float()), "other tables": (q, k, cos, sin.float()),
        "three dimensions": (q[0], k[0], cos, sin), "other tokens": (q, k, cos[:, :3], sin[:, :3]),
        "tables wider than a head": (q[..., :32], k[..., :32], cos, sin), "axes": (q, k, cos[None], sin[None]),
    }  # fmt: skip
    assert {name for name, given in refused.items() if ops.rotate_pair(*given) is None} == set(refused)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert ops.rotate_pair(q, k, cos, sin) is None
    monkeypatch.undo()
    monkeypatch.setattr(dispatch, "_chosen", {"cpu": "native"})
    assert ops.rotate_pair(q, k, cos, sin) is None


def test_the_trial_of_a_machine_compares_it_with_the_rollouts(monkeypatch):
    tried = trial._Trial(trial.Sizes(64, 64, 5, 1, 64, 10), "cpu", (1, 33), 16)
    tried.rotary()
    right = ops.rotate_pair
    monkeypatch.setattr(ops, "rotate_pair", lambda q, k, *tables: (right(q, k, *tables)[0], k))
    with pytest.raises(Unequal, match="the trainer's"):
        tried.rotary()


#: families with another function: angles of three dimensions; interleaved halves
OTHERS = {"qwen2_5_vl", "glm4v"}


def attention_of(family):
    module = importlib.import_module(f"transformers.models.{family.model_type}.modeling_{family.model_type}")
    text = family.attention if hasattr(module, family.attention) else f"{family.prefix}TextAttention"
    return getattr(module, text)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.model_type)
def test_attention_of_every_family_is_recognized_by_what_it_computes(family):
    kind = attention_of(family)
    behavior = adapter._behavior(kind)
    assert (behavior is None) == (family.model_type in OTHERS)
    if behavior is not None:
        assert behavior.forward.__code__ is kind.forward.__code__ and adapter._behavior(kind) is behavior
        assert behavior.forward.__globals__[adapter._FUNCTION] is not kind.forward.__globals__[adapter._FUNCTION]


@pytest.mark.parametrize(
    "changed",
    [
        lambda q, k, cos, sin: eager(q.roll(1, -1), k, cos, sin),
        lambda q, k, cos, sin: tuple(y.to(BF16) for y in eager(q.float(), k.float(), cos, sin)),
        lambda q, k, cos, sin: (*eager(q, k, cos, sin), None),
        lambda q, k, cos, sin: partial(q, k, cos, sin) if cos.shape[-1] == 8 else (q, k),
        lambda q, k: (q, k),
    ],
    ids=["interleaved", "one rounding", "three results", "another partial rotation", "other arguments"],
)
def test_another_function_is_left_alone(changed):
    assert adapter._is_common(eager) and adapter._is_common(partial) and not adapter._is_common(changed)


@pytest.mark.parametrize("graphs", ["eager", "aot_eager"])
def test_a_compiled_model_computes_as_before(models, graphs):
    """A compiler that traces the copied forward finds Hugging Face's function in it."""
    _, ours = models
    found = torch.compile(ours.model.layers[0].self_attn, backend=graphs)
    x, at = rand(1, 5, ours.config.hidden_size), torch.arange(5)[None]
    tables = ours.model.rotary_emb(x, at)
    given = {"hidden_states": x, "position_embeddings": tables, "attention_mask": None}
    assert torch.equal(found(**given)[0], ours.model.layers[0].self_attn(**given)[0])


@pytest.fixture(params=["qwen3", "glm4_moe", *(pytest.param(family, marks=pytest.mark.slow) for family in ("llama", "smollm3"))])
def models(request, monkeypatch):
    """A model as it is, and rotated by the kernel."""
    plain = build(request.param, num_hidden_layers=2).to(BF16)
    ours = copy.deepcopy(plain)
    assert adapter.rotate_together(ours, "native", "cpu") == []
    monkeypatch.setattr(producers, "available", lambda backend, device_type: True)
    changed = adapter.rotate_together(ours, "triton", "cuda")
    assert changed == [name for name, module in plain.named_modules() if name.endswith("self_attn")]
    assert adapter.rotate_together(ours, "triton", "cuda") == []  # a second time changes nothing
    return plain, ours


def test_a_model_rotates_by_the_kernel_with_the_same_bits(models):
    plain, ours = models
    ids = torch.arange(2, 20).view(2, 9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 2, 0, 1, 2, 3, 4, 5]])
    given = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    with Traffic() as counted:
        found = ours(**given).logits
    expected = plain(**given).logits
    assert torch.equal(found, expected)
    with Traffic() as theirs:
        plain(**given)
    assert counted.launches < theirs.launches
    with torch.no_grad():
        assert torch.equal(ours(**given).logits, expected)
    loss = lambda model: model(**given).logits.float().logsumexp(-1).sum()  # noqa: E731
    wanted = torch.autograd.grad(loss(ours), list(ours.parameters()), allow_unused=True)
    ours.train().gradient_checkpointing_enable()
    again = torch.autograd.grad(loss(ours), list(ours.parameters()), allow_unused=True)
    for g, h in zip(wanted, again):
        assert (g is None and h is None) or torch.equal(g, h)
