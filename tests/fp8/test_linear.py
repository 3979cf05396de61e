"""``Fp8Linear``: gradients, saved tensors, caching, and the in-place swap."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from jetrl_patch.backends import quantize
from jetrl_patch.config import Config
from jetrl_patch.errors import ModelError
from jetrl_patch.fp8.convert import select_layers, split_layers, swap_linears
from jetrl_patch.fp8.linear import Fp8Linear, Fp8State, quantized_gradient, set_quantized_gradient
from jetrl_patch.models.layers import check_splits, is_quantized, is_row_parallel, matches

from .layer import run_and_compare
from .thresholds import SAVED_BYTES_RATIO, SQNR_UNQUANTIZED, sqnr


def make(K=320, N=130, bias=True, dtype=torch.float32, scale_format="pow2", backend="native"):
    torch.manual_seed(0)
    layer = nn.Linear(K, N, bias=bias).to(dtype)
    layer.__class__ = Fp8Linear
    layer.fp8 = Fp8State(scale_format, backend)
    return layer


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
@pytest.mark.parametrize("shape", [(3, 7), (1, 1), (2, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_gradients(backend, scale_format, shape, dtype):
    layer = make(dtype=dtype, scale_format=scale_format, backend=backend)
    x = torch.randn(*shape, 320, dtype=dtype, requires_grad=True)
    g = torch.randn(*shape, 130).to(torch.bfloat16)
    y = run_and_compare(layer, x, g, scale_format)
    assert y.dtype == torch.bfloat16 and x.grad.dtype == dtype and layer.weight.grad.dtype == dtype
    # The bias gradient is a plain sum: equal to FP32 up to the dtype's rounding.
    assert torch.equal(layer.bias.grad, g.reshape(-1, 130).float().sum(0).to(dtype))


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
def test_a_split_of_k_shows_in_the_output_alone(backend, scale_format):
    """DGrad contracts over N and WGrad over tokens, whatever the rollout's ranks do with K."""
    gen, found = torch.Generator().manual_seed(1), {}
    g, given = (torch.randn(260, width, generator=gen).to(torch.bfloat16) for width in (130, 2048))
    given *= 2.0 ** torch.arange(0, 24, 3).repeat_interleave(128).repeat(2)
    given[:20, 1024:] = -given[:20, :1024]  # sums that cancel show the rounding
    for splits in (1, 2, 4, 8):
        layer = make(2048, 130, bias=False, dtype=torch.bfloat16, scale_format=scale_format, backend=backend)
        layer.fp8.splits = splits
        layer.weight.data[:, 1024:] = layer.weight.data[:, :1024]
        x = given.clone().requires_grad_()
        y = layer(x)
        y.backward(g)
        found[splits] = y.detach(), x.grad, layer.weight.grad
        x64, w64, g64 = (t.detach().double() for t in (x, layer.weight, g))
        expected = {"fprop": x64 @ w64.t(), "dgrad": g64 @ w64, "wgrad": g64.t() @ x64}
        for name, value in zip(expected, found[splits], strict=True):
            assert sqnr(value, expected[name]) > SQNR_UNQUANTIZED[name, scale_format], (name, splits)
    for splits in (2, 4, 8):
        assert not torch.equal(found[splits][0], found[1][0])
        for split, whole in zip(found[splits][1:], found[1][1:], strict=True):
            assert torch.equal(split, whole)


def saved_bytes(layer, x):
    storages = {}

    def pack(t):
        if t.untyped_storage().data_ptr() != layer.weight.untyped_storage().data_ptr():
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(x)
    return sum(storages.values())


def test_saved_bytes():
    x = torch.randn(4096, 512, dtype=torch.bfloat16, requires_grad=True)
    plain = nn.Linear(512, 128).to(torch.bfloat16)
    ours = make(512, 128, dtype=torch.bfloat16)
    bf16 = saved_bytes(plain, x)
    assert bf16 == x.nbytes
    assert saved_bytes(ours, x) / bf16 <= SAVED_BYTES_RATIO


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_no_weight_is_kept_for_backward_but_the_parameter_itself(backend):
    """FSDP and ZeRO-3 need this: bytes held between forward and backward would add up to the whole model on every rank."""
    layer = make(256, 128, backend=backend)
    x = torch.randn(8, 256, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = layer(x)
    weights = [t for t in saved if t.shape == layer.weight.shape]
    assert [t.data_ptr() for t in weights] == [layer.weight.data_ptr()]
    assert sum(t.nbytes for t in saved) == layer.weight.nbytes + x.numel() + 8 * 2 * 4  # x in FP8, its scales
    assert (y.grad_fn.state._cached is None) == (backend == "torch")


def test_backward_reads_the_weight_where_it_is_gathered_again():
    """As FSDP does: storage is emptied after forward and refilled before backward, and the version does not change."""
    results = []
    for gathered in (False, True):
        layer = make(256, 128, backend="torch", bias=False)
        x = torch.ones(8, 256, requires_grad=True)
        y = layer(x)
        if gathered:
            content, storage = layer.weight.detach().clone(), layer.weight.untyped_storage()
            size = storage.nbytes()
            storage.resize_(0)
            storage.resize_(size)
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(layer.weight):
                layer.weight.copy_(content)
        y.sum().backward()
        results.append((x.grad, layer.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_layers_that_read_the_same_input_save_it_once():
    x = torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        for layer in (first := make(256, 64), make(256, 64), make(256, 64)):
            layer.fp8.inputs = first.fp8.inputs  # as of the layers of one module
            layer(x)
    assert saved[0] == saved[3] == saved[6] and saved[1] == saved[4]


def test_the_layers_of_a_module_share_their_input():
    """Also in a copy, which begins without one; and layers of other modules do not."""
    block = torch.nn.ModuleDict({"attn": torch.nn.ModuleDict(), "mlp": torch.nn.ModuleDict()})
    for name in ("attn.q_proj", "attn.k_proj", "mlp.up_proj"):
        parent, leaf = name.split(".")
        block[parent][leaf] = torch.nn.Linear(256, 64)
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([block])})
    swap_linears(model)
    x = torch.randn(8, 256, dtype=torch.bfloat16)
    block["attn"]["q_proj"](x)
    for made in (block, copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        (q, k), up = made["attn"].values(), made["mlp"]["up_proj"]
        assert q.fp8.inputs is k.fp8.inputs is not up.fp8.inputs
        assert (q.fp8.inputs._value is None) == (made is not block)


def test_an_input_changed_in_place_is_quantized_again():
    layer = make(256, 64)
    x = torch.randn(8, 256, dtype=torch.bfloat16)
    first = layer(x)
    x.mul_(-1)
    second = layer(x)
    assert not torch.equal(second, first) and torch.equal(second, layer(x.clone()))


def test_a_quantized_input_is_dropped_with_its_tensor_and_not_with_an_earlier_one():
    layer = make(256, 64)
    last = layer.fp8.inputs
    earlier, x = (torch.randn(8, 256, dtype=torch.bfloat16) for _ in range(2))
    layer(earlier)
    layer(x)
    del earlier
    assert last._source() is x and last._value is not None
    del x
    assert last._source is last._value is None


def test_weight_is_quantized_once_per_value(monkeypatch):
    layer = make(256, 64)
    calls = []
    original = type(layer.fp8.backend).quantize_weight
    monkeypatch.setattr(
        type(layer.fp8.backend), "quantize_weight", lambda *a: calls.append(1) or original(*a)
    )
    x = torch.randn(8, 256)
    for _ in range(3):
        layer(x).float().sum().backward()
    assert len(calls) == 1
    with torch.no_grad():
        layer.weight[3, 5] += 1.0  # a write without an optimizer or a version to rely on
    layer(x)
    layer.weight.data.view(-1)[7] = 3.0
    layer(x)
    assert len(calls) == 3
    expected = quantize.quantize_weight(layer.weight, "pow2")
    assert torch.equal(layer.fp8.quantized(layer.weight).q.view(torch.uint8), expected.q.view(torch.uint8))


def test_checkpointing_gives_the_same_gradients():
    results = []
    for use in (False, True):
        layer = make(256, 256)
        x = torch.randn(16, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).requires_grad_()
        run = lambda t, layer=layer: layer(torch.nn.functional.silu(layer(t)))  # noqa: E731
        y = checkpoint(run, x, use_reentrant=False) if use else run(x)
        y.backward(torch.ones_like(y))
        results.append((x.grad, layer.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(256, 256), nn.Linear(256, 256)
        self.gate, self.gate_up_proj = nn.Linear(256, 8), nn.Linear(256, 512)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(256, 300)


def test_swap_in_place_keeps_everything_else():
    model = Model()
    before = {name: id(p) for name, p in model.named_parameters()}
    keys = list(model.state_dict())
    names = swap_linears(model, exclude=("layers.1.o_proj",), backend="native")
    assert names == ["layers.0.q_proj", "layers.0.o_proj", "layers.0.gate_up_proj", "layers.1.q_proj", "layers.1.gate_up_proj"]
    assert {name: id(p) for name, p in model.named_parameters()} == before and list(model.state_dict()) == keys
    assert type(model.lm_head) is nn.Linear and type(model.layers[0].gate) is nn.Linear
    assert isinstance(model.layers[0].q_proj, Fp8Linear) and "fp8=pow2" in repr(model.layers[0].q_proj)
    assert swap_linears(model, exclude=("layers.1.o_proj",), backend="native") == names
    assert isinstance(copy.deepcopy(model).layers[0].q_proj, Fp8Linear)


def test_swap_works_on_meta_tensors():
    with torch.device("meta"):
        model = Model()
    assert len(swap_linears(model, backend="native")) == 6
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        ("model.layers.0.mlp.gate_up_proj", "mlp.gate", False),
        ("model.layers.0.mlp.gate", "mlp.gate", True),
        ("model.layers.1.self_attn.q_proj", "layers.1", True),
        ("model.layers.11.self_attn.q_proj", "layers.1", False),
        ("model.layers.0.mlp.down_proj", "down_*", True),
        ("model.layers.0.mlp.down_proj", "*", True),
        ("model.layers.0.mlp.down_proj", "proj", False),
    ],
)
def test_patterns_match_whole_parts(name, pattern, expected):
    assert matches(name, pattern) is expected


def test_routers_and_heads_are_never_fp8():
    assert not is_quantized("lm_head", ()) and not is_quantized("model.layers.0.mlp.gate", ())
    assert is_quantized("model.layers.0.mlp.gate_proj", ()) and not is_quantized("score", ())


def test_bad_models_are_refused_before_anything_changes():
    with pytest.raises(ModelError, match=r"no nn\.Linear to quantize"):
        swap_linears(nn.Sequential(nn.LayerNorm(4)))
    model = Model()
    with pytest.raises(ModelError, match="matches no FP8 layer"):
        select_layers(model, exclude=("mlp.gat",))
    model.layers[0].q_proj.__class__ = type("LoraLinear", (nn.Linear,), {})
    with pytest.raises(ModelError, match="LoraLinear"):
        swap_linears(model)
    assert not any(isinstance(m, Fp8Linear) for m in model.modules())


def test_a_split_that_cuts_a_block_is_refused_with_the_layers():
    layers = [("layers.0.self_attn.o_proj", 256), ("layers.0.mlp.down_proj", 1000), ("layers.0.mlp.up_proj", 320)]
    check_splits(layers, 1)
    with pytest.raises(ModelError, match=r"size 2 cuts a block .* layers\.0\.mlp\.down_proj \(K = 1000\)\. .*JETRL_ON_CUT=bf16"):
        check_splits(iter(layers), 2)
    with pytest.raises(ModelError, match="in 2 layers"):
        check_splits(layers, 4)
    model = Model()
    with pytest.raises(ModelError, match="o_proj"):
        swap_linears(model, backend="native", k_splits=4)
    assert not any(isinstance(m, Fp8Linear) for m in model.modules())


@pytest.mark.parametrize("tp", [1, 2])
def test_k_is_split_where_both_sides_add_in_rank_order(tp):
    for exact in (False, True):
        model = Model()
        swap_linears(model, backend="native", k_splits=tp, exact=exact)
        found = {name: m.fp8.splits for name, m in model.named_modules() if isinstance(m, Fp8Linear)}
        assert set(found.values()) == ({1, tp} if exact else {1})
        assert all((splits > 1) == (exact and tp > 1 and is_row_parallel(name)) for name, splits in found.items())


@pytest.mark.parametrize(("tp", "cut"), [(1, []), (2, []), (4, ["layers.0.o_proj", "layers.1.o_proj"])])
def test_cut_layers_stay_in_bf16_when_the_user_says_so(tp, cut):
    model = Model()
    names, left = split_layers(model, Config(on_cut="bf16"), tp)
    assert left == cut and sorted(names + left) == sorted(select_layers(model))
    assert swap_linears(model, backend="native", k_splits=tp, names=names) == names
    assert all(type(dict(model.named_modules())[name]) is nn.Linear for name in cut)
    channel = Config(precision="fp8-rollout", rollout_granularity="channel")
    assert split_layers(Model(), channel, tp) == (select_layers(Model()), [])  # one scale per row: nothing is cut
    if cut:
        with pytest.raises(ModelError, match="JETRL_ON_CUT=bf16"):
            split_layers(Model(), Config(), tp)


def test_training_from_scratch_ends_near_bf16():
    """Teacher and student: the final FP8 loss is within 2% of the BF16 loss."""
    losses = {}
    for kind in ("bf16", "fp8"):
        torch.manual_seed(0)
        block = nn.ModuleList([nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 32)])
        model = nn.ModuleDict({"layers": nn.ModuleList([block])})
        if kind == "fp8":
            swap_linears(model, backend="native")
        teacher = nn.Linear(64, 32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        last = []
        for step in range(300):
            x = torch.randn(256, 64, generator=torch.Generator().manual_seed(step))
            target = teacher(x).argmax(-1)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                h = x
                for i, layer in enumerate(model["layers"][0]):
                    h = layer(h if i == 0 else torch.nn.functional.silu(h))
            loss = nn.functional.cross_entropy(h.float(), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            last.append(loss.item())
        losses[kind] = sum(last[-50:]) / 50
    assert losses["fp8"] <= 1.02 * losses["bf16"], losses


def test_bytes_travel_with_their_gradient_alone():
    state, grad, both = Fp8State("pow2", "triton"), torch.randn(3, 128).bfloat16(), (object(), object())
    assert quantized_gradient(grad, state) is None
    set_quantized_gradient(grad, both, state)
    assert quantized_gradient(grad, state) is both
    for other in (Fp8State("fp32", "triton"), Fp8State("pow2", "deep_gemm")):
        assert quantized_gradient(grad, other) is None
    for changed in (grad + 1, grad.view(128, 3), grad.clone(), grad.detach()):
        assert quantized_gradient(changed, state) is None
    grad.mul_(2)
    assert quantized_gradient(grad, state) is None
