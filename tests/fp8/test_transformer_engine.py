"""TransformerEngine's layers are recognized and left unchanged or refused, and their bytes are used unchanged."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from jetrl_patch.backends import get_backend, quantize, transformer_engine
from jetrl_patch.errors import ModelError, SyncError
from jetrl_patch.fp8.convert import select_layers, swap_linears
from jetrl_patch.fp8.linear import Fp8Linear
from jetrl_patch.sync.protocol import COMMIT, MANIFEST, Terms, decode_json
from jetrl_patch.sync.send import SyncStats, quantized_stream
from jetrl_patch.trainer.source import Source
from tests.fp8 import te_fakes as te

TERMS = Terms(precision="fp8-unified", align="linear", scale_format="pow2", backend="te")


class Layer(nn.Module):
    def __init__(self, make) -> None:
        super().__init__()
        self.o_proj, self.down_proj, self.gate = make(256, 128), make(256, 128), nn.Linear(256, 4)


class Model(nn.Module):
    def __init__(self, make) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(make) for _ in range(2))
        self.lm_head = nn.Linear(128, 8)


def te_model(recipe=None, kind=te.Linear):
    return Model(lambda k, n: kind(k, n, recipe))


def test_exact_mode_does_not_cover_them():
    from jetrl_patch.config import Config
    from jetrl_patch.trainer.prepare import prepare_model

    model = te_model(te.Float8BlockScaling())
    with pytest.raises(ModelError, match=r"align='exact': .*TransformerEngine in layers.0.o_proj, .*Use align='linear'"):
        prepare_model(model, Config(backend="te").resolved())


def weight(n=256, k=384, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp(torch.randn(n, k, generator=generator) * 2)
    return (torch.randn(n, k, generator=generator) * scale).bfloat16()


@pytest.mark.parametrize(
    "kind", [te.Linear, te.LayerNormLinear, te.TERowParallelLinear, te.TELayerNormColumnParallelLinear]
)
def test_linears_and_their_subclasses_are_recognised(kind):
    assert transformer_engine.is_te_linear(kind(128, 128))


@pytest.mark.parametrize("other", [nn.Linear(4, 4), te.DotProductAttention(), Fp8Linear(4, 4), nn.LayerNorm(4)])
def test_other_modules_are_not(other):
    assert not transformer_engine.is_te_linear(other)


def test_tensors_are_recognised():
    assert transformer_engine.is_te_tensor(te.quantized(weight())) and transformer_engine.is_te_tensor(
        te.MXFP8Tensor((1, 1))
    )
    assert not transformer_engine.is_te_tensor(weight()) and not transformer_engine.is_te_tensor(nn.Parameter(weight()))


@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
def test_blockwise_linears_are_left_alone(scale_format):
    model = te_model(te.Float8BlockScaling(scale_format == "pow2"))
    before = {name: (type(m), dict(vars(m))) for name, m in model.named_modules()}
    names = swap_linears(model, scale_format=scale_format, backend="te", k_splits=2)
    assert names == select_layers(model) == [f"layers.{i}.{n}" for i in (0, 1) for n in ("o_proj", "down_proj")]
    assert {name: (type(m), dict(vars(m))) for name, m in model.named_modules()} == before


@pytest.mark.parametrize(
    ("recipe", "found"),
    [
        (None, "found no recipe, so it computes in BF16"),
        (te.DelayedScaling(), "found DelayedScaling"),
        (te.MXFP8BlockScaling(), "found MXFP8BlockScaling"),
        (te.Float8BlockScaling(pow2=False), "found Float8BlockScaling with fp8_quant_fwd_inp.power_2_scale=False"),
        (te.Float8BlockScaling(fp8_format=te.Format.HYBRID), "fp8_format=HYBRID"),
        (te.Float8BlockScaling(w_block_scaling_dim=1), "w_block_scaling_dim=1"),
        (te.Float8BlockScaling(backward_override="high_precision"), "backward_override=high_precision"),
    ],
)
def test_another_recipe_is_one_error(recipe, found):
    model = te_model(recipe)
    with pytest.raises(ModelError, match=rf"layer layers.0.o_proj: required .*Float8BlockScaling.*{found}.*. Use"):
        swap_linears(model, backend="te")
    assert all(type(m) is te.Linear for n, m in model.named_modules() if n.endswith("proj"))


def test_a_mix_is_refused_and_nothing_is_changed():
    model = te_model(te.Float8BlockScaling())
    model.layers[1].o_proj = nn.Linear(256, 128)
    with pytest.raises(ModelError, match=r"found 3 of TransformerEngine .* 1 others .first: layers.1.o_proj"):
        swap_linears(model, backend="te")
    with pytest.raises(ModelError, match="found 3 of TransformerEngine"):
        swap_linears(model, backend="torch")
    assert type(model.layers[1].o_proj) is nn.Linear


def test_a_plain_layer_may_be_left_out_beside_them():
    model = te_model(te.Float8BlockScaling())
    for layer in model.layers:
        layer.o_proj = nn.Linear(256, 128)
    assert swap_linears(model, ("o_proj",), backend="te") == ["layers.0.down_proj", "layers.1.down_proj"]


def test_the_backend_must_be_the_one_that_computes_the_layers():
    with pytest.raises(
        ModelError, match=r"backend='triton': required .*TransformerEngine's layers.*Use backend=\"te\""
    ):
        swap_linears(te_model(te.Float8BlockScaling()), backend="triton")
    with pytest.raises(ModelError, match=r"backend='te': required .*nn.Linear .first: layers.0.o_proj.*cublaslt"):
        swap_linears(Model(nn.Linear), backend="te")


def test_a_block_must_hold_nothing_else():
    model = te_model()
    assert len(transformer_engine.require_te_linears(model, 4)) == 4  # the router's gate does not count
    with pytest.raises(ModelError, match=r"required 8 layers .* found 4."):
        transformer_engine.require_te_linears(model, 8)
    model.layers[0].local = nn.Linear(4, 4)
    with pytest.raises(ModelError, match=r"found 4, and 1 other layers with matrices .first: layers.0.local"):
        transformer_engine.require_te_linears(model, 4)


@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
@pytest.mark.parametrize(("n", "k"), [(256, 384), (128, 512), (200, 130)])
def test_bytes_and_scales_are_taken_as_they_are(n, k, scale_format):
    source = te.quantized(weight(n, k), scale_format == "pow2")
    q, s = transformer_engine.take("l", source, scale_format)
    assert q.dtype == torch.float8_e4m3fn and torch.equal(q.view(torch.uint8), source.parts["rowwise_data"])
    assert s.shape == (-(-n // 128), -(-k // 128)) and s.is_contiguous()
    assert torch.equal(s, source.parts["rowwise_scale_inv"][:, : s.shape[1]]) and not (s == 7).any()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 10**6), st.integers(-20, 20))
def test_power_of_two_scales_give_the_contracts_bytes(n, k, seed, exponent):
    """In "pow2" either formula may quantize BF16 parameters."""
    w = (weight(n, k, seed).float() * 2.0**exponent).bfloat16()
    q, s = transformer_engine.take("l", te.quantized(w), "pow2")
    ours, scales = quantize.quantize_weight(w, "pow2")
    assert torch.equal(q.view(torch.uint8), ours.view(torch.uint8)) and torch.equal(s, scales)


def test_fp32_scales_do_not_which_is_why_only_its_own_bytes_are_sent():
    w = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(1)).bfloat16()
    q, _ = transformer_engine.take("l", te.quantized(w, pow2=False), "fp32")
    ours, _ = quantize.quantize_weight(w, "fp32")
    share = (q.view(torch.uint8) != ours.view(torch.uint8)).float().mean().item()
    assert 1e-4 < share < 5e-3


GOOD = te.quantized(weight())


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (te.MXFP8Tensor((256, 384)), "required a Float8BlockwiseQTensor, found MXFP8Tensor"),
        (GOOD.but(rowwise_data=None), "only column-wise data"),
        (GOOD.but(is_2D_scaled=False), "found kFloat8E4M3 in 1x128 groups"),
        (GOOD.but(fp8_dtype=te.DType.kFloat8E5M2), "found kFloat8E5M2 in 128x128 blocks"),
        (GOOD.but(quantizer=type("Q", (), {"block_len": 64})()), "in 64x64 blocks"),
        (
            GOOD.but(rowwise_data=GOOD.parts["rowwise_data"].t()),
            r"required uint8 \[256, 384\], found .*\[384, 256\]",
        ),
        (GOOD.but(rowwise_scale_inv=GOOD.parts["rowwise_scale_inv"].t()), r"required FP32 scales \[2, 3\].*\[4, 2\]"),
        (GOOD.but(rowwise_scale_inv=GOOD.parts["rowwise_scale_inv"].bfloat16()), "torch.bfloat16"),
        (GOOD.but(rowwise_scale_inv=GOOD.parts["rowwise_scale_inv"] * 1.5), "power-of-two scales"),
        (GOOD.but(rowwise_scale_inv=GOOD.parts["rowwise_scale_inv"] * float("inf")), "NaN or Inf"),
        (GOOD.but(rowwise_data=GOOD.parts["rowwise_data"] | 0x7F), "NaN or Inf"),
    ],
)
def test_anything_else_is_an_error_with_the_layers_name(wrong, match):
    with pytest.raises(SyncError, match=rf"layers.0.o_proj.*{match}"):
        transformer_engine.take("layers.0.o_proj", wrong, "pow2")


def sent(weights, layers=("layers.0.o_proj",), terms=TERMS, shapes=None, quantize=None):
    weights = list(weights)
    shapes = shapes or {name: tuple(w.shape) for name, w in weights}
    stats = SyncStats()
    stream = quantized_stream(iter(weights), terms=terms, layers=layers, shapes=shapes, stats=stats, quantize=quantize)
    return dict(stream), stats


def test_a_sync_sends_its_bytes_and_never_quantizes_them_again():
    source = te.quantized(weight())

    def again(*_):
        raise AssertionError("quantized again")

    found, stats = sent([("layers.0.o_proj.weight", source), ("norm.weight", weight(1, 8)[0])], quantize=again)
    assert set(found) == {MANIFEST, COMMIT, "norm.weight", "layers.0.o_proj.weight", "layers.0.o_proj.weight_scale_inv"}
    q, s = transformer_engine.take("l", source, "pow2")
    assert torch.equal(found["layers.0.o_proj.weight"].view(torch.uint8), q.view(torch.uint8))
    assert torch.equal(found["layers.0.o_proj.weight_scale_inv"], s)
    assert stats.layers == 1 and stats.quantized == 256 * 384 + s.nbytes and stats.quantized_as_bf16 == 2 * 256 * 384
    assert set(decode_json(found[COMMIT], COMMIT)["digests"]) == set(found) - {MANIFEST, COMMIT}


@pytest.mark.parametrize("terms", [TERMS, Terms(precision="fp8-rollout", align="none", scale_format="pow2")])
def test_fp8_where_the_rollout_has_bf16_is_refused(terms):
    name = "lm_head.weight" if terms.quantized else "layers.0.o_proj.weight"
    weights = [(name, te.quantized(weight())), ("layers.0.o_proj.weight", weight())][: 2 if terms.quantized else 1]
    with pytest.raises(SyncError, match=f"{name} is a Float8BlockwiseQTensor in the trainer"):
        sent(weights, terms=terms)


@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
def test_bf16_parameters_are_quantized_by_its_own_quantizer(monkeypatch, scale_format):
    te.install(monkeypatch)
    terms = Terms(precision="fp8-unified", align="linear", scale_format=scale_format, backend="te")
    model = te_model(te.Float8BlockScaling(scale_format == "pow2"))
    source = Source(layers=["layers.0.o_proj"], modules=dict(model.named_modules()), shapes={}, terms=terms)
    w = weight()
    q, s = source.quantize("layers.0.o_proj", w)
    theirs = te.quantized(w, scale_format == "pow2").parts
    assert torch.equal(q.view(torch.uint8), theirs["rowwise_data"]) and torch.equal(
        s, theirs["rowwise_scale_inv"][:, :3]
    )


@pytest.mark.parametrize("rows", [1, 7, 130])
def test_the_rollouts_activations_are_its_quantizers_with_fp32_scales(monkeypatch, rows):
    te.install(monkeypatch)
    backend, x = get_backend("te"), weight(rows, 256)
    q, s = backend.quantize_activation(x, "fp32")
    scale = 448 / x.float().view(rows, 2, 128).abs().amax(-1)
    assert torch.equal(s, 1 / scale) and s.shape == (rows, 2)
    expected = (x.float() * scale.repeat_interleave(128, 1)).to(torch.float8_e4m3fn)
    assert torch.equal(q.view(torch.uint8), expected.view(torch.uint8))


def test_an_activation_of_another_shape_is_refused(monkeypatch):
    te.install(monkeypatch)
    blocks = te.quantized(weight(130, 256))
    monkeypatch.setattr(te.Float8BlockQuantizer, "__call__", lambda self, x: blocks.but())
    with pytest.raises(ModelError, match=r"1x128 quantizer of .130, 384.: .*found .130, 256. and"):
        transformer_engine.quantize_rows(weight(130, 384), "fp32")


def test_the_rollouts_activations_are_the_contracts_with_power_of_two_scales():
    x = weight(9, 256)
    for found, wanted in zip(
        get_backend("te").quantize_activation(x, "pow2"), quantize.quantize_activation(x, "pow2"), strict=True
    ):
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


def test_its_own_quantizer():
    """``test_te_package`` has the rest of the package, which needs no GPU."""
    tex = pytest.importorskip("transformer_engine_torch")
    pytest.importorskip("transformer_engine.pytorch")
    assert tex.DType.kFloat8E4M3.name == "kFloat8E4M3"
    if not torch.cuda.is_available():
        pytest.skip("its quantizer needs a GPU")
    for scale_format in ("pow2", "fp32"):
        w = weight(256, 640).cuda()
        q, s = transformer_engine.quantize_weight("l", w, scale_format)
        theirs = te.quantized(w.cpu(), scale_format == "pow2")
        assert torch.equal(q.cpu().view(torch.uint8), theirs.parts["rowwise_data"])
        assert torch.equal(s.cpu(), theirs.parts["rowwise_scale_inv"][:, :5])
        for rows in (1, 7, 130):
            q, s = transformer_engine.quantize_rows(w[:rows].contiguous(), scale_format)
            assert q.shape == (rows, 640) and s.shape == (rows, 5)
