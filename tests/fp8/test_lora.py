"""LoRA by its merged weight: the forward of a plain layer that holds W', and gradients of both factors against FP64."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from jetrl_patch.errors import ConfigError
from jetrl_patch.exact.modules import ExactLinear, swap
from jetrl_patch.fp8.convert import swap_linears
from jetrl_patch.fp8.linear import Fp8Linear, Fp8State
from jetrl_patch.fp8.lora import Fp8LoraLinear, adopt, merged_tensors, merged_weight

from .thresholds import SQNR_UNQUANTIZED, sqnr

peft = pytest.importorskip("peft")

K, N, R = 320, 130, 8


class Block(nn.Module):
    """One transformer block's worth of linear layers, named as in a decoder."""

    def __init__(self, bias: bool = True, heads: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"q_proj": nn.Linear(K, N, bias=bias), "o_proj": nn.Linear(N, K)})])
        self.lm_head = nn.Linear(K, 16)

    def forward(self, x):
        return self.layers[0]["o_proj"](self.layers[0]["q_proj"](x))


def lora(convert=True, scale_format="pow2", backend="native", dtype=torch.float32, model=None, merge=True, **options):
    torch.manual_seed(0)
    model = Block() if model is None else model
    model = model.to(dtype)
    if convert:
        swap_linears(model, scale_format=scale_format, backend=backend)
    settings = {"r": R, "lora_alpha": 3 * R, "target_modules": ["q_proj", "o_proj"], **options}
    model = peft.get_peft_model(model, peft.LoraConfig(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.02)
    return model, adopt(model, merge=merge)


def q_proj(model):
    return model.base_model.model.layers[0]["q_proj"]


def parts(layer):
    return layer.base_layer.weight, layer.lora_A["default"].weight, layer.lora_B["default"].weight


def plain(layer, weight):
    """An ``Fp8Linear`` that holds ``weight``."""
    other = nn.Linear(K, N).to(weight.dtype)
    other.__class__, other.fp8 = Fp8Linear, Fp8State(layer.fp8.scale_format, layer.fp8.backend_name)
    with torch.no_grad():
        other.weight.copy_(weight)
        other.bias.copy_(layer.base_layer.bias)
    return other


def by_hand(w, a, b, scaling):
    """The formula with NumPy-like scalar steps: every product and every sum rounded to FP32 by itself."""
    w, a, b = (t.detach().to(torch.bfloat16).float() for t in (w, a, b))
    total = torch.zeros_like(w)
    for j in range(a.shape[0]):
        product = torch.outer(b[:, j].double(), a[j].double())
        assert torch.equal(product.float().double(), product)  # exact, so fusing it with the sum changes nothing
        total = (total.double() + product).float()
    return (w.double() + (total.double() * torch.tensor(scaling).double()).float().double()).float().to(torch.bfloat16)


@pytest.mark.parametrize("shape", [(N, K, R), (1, 1, 1), (3, 70000, 2), (257, 129, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_merged_weight_is_the_formula(shape, dtype):
    torch.manual_seed(0)
    n, k, r = shape
    w, a, b = torch.randn(n, k, dtype=dtype), torch.randn(r, k, dtype=dtype), torch.randn(n, r, dtype=dtype)
    expected = by_hand(w, a, b, 0.3)
    assert not merged_weight(w, a.requires_grad_(), b, 0.3).requires_grad
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            assert torch.equal(merged_weight(w, a, b, 0.3), expected)
        finally:
            torch.set_num_threads(before)
    assert torch.equal(merged_weight(w, a, torch.zeros_like(b), 0.3), w.to(torch.bfloat16))
    exact = w.double() + 0.3 * b.double() @ a.double()
    assert sqnr(expected, exact) > 40


def test_the_order_of_the_sum_is_part_of_the_formula():
    """Factors of many magnitudes and a rank that a library's product sums in blocks: here that product has other bits."""
    torch.manual_seed(0)

    def wide(*shape):
        return torch.randn(shape) * 2.0 ** torch.randint(-8, 9, shape)

    w, a, b = wide(256, 256), wide(700, 256), wide(256, 700)
    assert torch.equal(merged_weight(w, a, b, 0.3), by_hand(w, a, b, 0.3))


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_gradients(backend, scale_format, dtype):
    """Y and dX equal those of a plain layer with W', bit for bit; dA and dB stay within WGrad's bound of FP64."""
    layer = q_proj(lora(scale_format=scale_format, backend=backend, dtype=dtype)[0])
    w, a, b = parts(layer)
    assert layer.scaling["default"] == 3.0 and type(layer.base_layer) is Fp8LoraLinear
    other = plain(layer, merged_weight(w, a, b, 3.0))
    x = torch.randn(3, 67, K, dtype=dtype)
    g = torch.randn(3, 67, N).to(torch.bfloat16)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = layer(ours)
    assert torch.equal(y, other(theirs)) and not torch.equal(y, layer.base_layer(x))
    y.backward(g)
    other(theirs).backward(g)
    assert torch.equal(ours.grad, theirs.grad)
    assert w.grad is None and layer.base_layer.bias.grad is None and a.grad.dtype == a.dtype
    g64, x64 = g.double().reshape(-1, N), x.double().reshape(-1, K)
    dw = g64.t() @ x64
    bound = SQNR_UNQUANTIZED["wgrad", scale_format]
    assert sqnr(a.grad, 3.0 * b.detach().double().t() @ dw) > bound
    assert sqnr(b.grad, 3.0 * dw @ a.detach().double().t()) > bound


def test_gradients_where_the_input_needs_none():
    layer, other = (q_proj(lora()[0]) for _ in range(2))
    x, g = torch.randn(40, K), torch.randn(40, N).to(torch.bfloat16)
    layer(x).backward(g)
    other(x.clone().requires_grad_()).backward(g)
    for ours, theirs in zip(parts(layer)[1:], parts(other)[1:], strict=True):
        assert torch.equal(ours.grad, theirs.grad) and ours.grad.any()


def test_gradients_do_not_depend_on_autocast():
    results = []
    for autocast in (False, True):
        layer = q_proj(lora(backend="torch")[0])
        torch.manual_seed(1)
        x, g = torch.randn(40, K), torch.randn(40, N).to(torch.bfloat16)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            layer(x).backward(g)
        results.append([part.grad for part in parts(layer)[1:]])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_no_merged_weight_is_kept_for_backward():
    layer = q_proj(lora(backend="torch")[0])
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(torch.randn(8, K, requires_grad=True))
    whole = [t for t in saved if t.shape == (N, K)]
    assert [t.data_ptr() for t in whole] == [layer.base_layer.weight.data_ptr()]


def test_toggling_and_training_never_serve_an_old_weight():
    """The cache of quantized weights goes by content: W and W' alternate, and each optimizer step makes a new W'."""
    model, _ = lora()
    layer = q_proj(model)
    w, a, b = parts(layer)
    x = torch.randn(20, K)
    base = plain(layer, w)
    for step in range(3):
        for _ in range(2):
            assert torch.equal(layer(x), plain(layer, merged_weight(w, a, b, 3.0))(x))
            with model.disable_adapter():
                assert torch.equal(layer(x), base(x))
                assert a.requires_grad and b.requires_grad  # FSDP2 may decide its dtypes here
        with torch.no_grad():
            a.add_(0.05), b.add_(0.01 * (step + 1))


def test_a_layer_kept_out_of_fp8_computes_with_its_merged_weight_too():
    x, g = torch.randn(40, K).to(torch.bfloat16), torch.randn(40, N).to(torch.bfloat16)
    for exact in (False, True):
        model = Block()
        if exact:
            swap(model.layers[0]["q_proj"], ExactLinear)
            model.layers[0]["q_proj"].jetrl_splits = 2
        layer = q_proj(lora(convert=False, dtype=torch.bfloat16, model=model)[0])
        w, a, b = parts(layer)
        other = copy.deepcopy(layer.base_layer).requires_grad_()
        with torch.no_grad():
            other.weight.copy_(merged_weight(w, a, b, 3.0))
        y = layer(x)
        assert torch.equal(y, other(x))
        y.backward(g)
        dw = g.double().t() @ x.double()
        assert sqnr(a.grad, 3.0 * b.detach().double().t() @ dw) > SQNR_UNQUANTIZED["wgrad", "pow2"]
        assert sqnr(b.grad, 3.0 * dw @ a.detach().double().t()) > SQNR_UNQUANTIZED["wgrad", "pow2"]


def test_the_precision_guard_takes_a_lora_layer_out_of_fp8():
    from jetrl_patch.fp8.to_bf16 import to_bf16

    layer = q_proj(lora()[0])
    w, a, b = parts(layer)
    to_bf16({"q": layer.base_layer}, exact=True)
    x = torch.randn(9, K).to(torch.bfloat16)
    other = nn.Linear(K, N)
    other.weight, other.bias = nn.Parameter(merged_weight(w, a, b, 3.0)), layer.base_layer.bias
    swap(other, ExactLinear)
    assert torch.equal(layer(x), other(x))


def test_scaling_follows_rank_patterns_and_rslora():
    model, scaling = lora(use_rslora=True, alpha_pattern={"o_proj": 4.0})
    assert scaling == {
        "base_model.model.layers.0.q_proj": 24 / 8**0.5,
        "base_model.model.layers.0.o_proj": 4 / 8**0.5,
    }
    layer = q_proj(model)
    x = torch.randn(9, K)
    assert torch.equal(layer(x), plain(layer, merged_weight(*parts(layer), 24 / 8**0.5))(x))


def test_a_saved_adapter_is_taken_up_with_its_own_rank_and_scaling(tmp_path):
    first, _ = lora(use_rslora=True, r=4, lora_alpha=4)
    first.save_pretrained(tmp_path)
    torch.manual_seed(0)
    model = Block()
    swap_linears(model, backend="native")
    model = peft.PeftModel.from_pretrained(model, tmp_path, is_trainable=True)  # as verl loads lora_adapter_path
    assert set(adopt(model, merge=True).values()) == {2.0}
    x = torch.randn(9, K)
    assert torch.equal(q_proj(model)(x), q_proj(first)(x)) and not torch.equal(q_proj(model)(x), q_proj(model).base_layer(x))
    assert all(part.requires_grad for part in parts(q_proj(model))[1:])


@pytest.mark.parametrize("merge", [True, False])
def test_what_is_sent_is_what_the_layers_compute_with(merge):
    model, scaling = lora(merge=merge, target_modules=["q_proj"])
    state = model.state_dict()
    names = {name.replace("base_model.model.", "").replace(".base_layer", ""): name for name in state if "lora_" not in name}
    sent = dict(merged_tensors(state, names, scaling, nullcontext))
    assert set(sent) == set(Block().state_dict())
    assert torch.equal(sent["layers.0.q_proj.weight"], merged_weight(*parts(q_proj(model)), 3.0))
    assert sent["layers.0.o_proj.weight"] is state["base_model.model.layers.0.o_proj.weight"]
    assert sent["layers.0.q_proj.bias"] is state["base_model.model.layers.0.q_proj.base_layer.bias"]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"use_dora": True}, "DoraLinearVariant"),
        ({"lora_dropout": 0.1}, "lora_dropout=0.1"),
        ({"lora_bias": True}, "a bias of its own"),
        ({"modules_to_save": ["lm_head"]}, "ModulesToSaveWrapper"),
        ({"bias": "all"}, "trained in full"),
        ({"target_modules": ["q_proj", "lm_head"]}, "outside the transformer blocks"),
        ({"target_modules": ["q_proj"], "target_parameters": ["o_proj.weight"]}, "ParamWrapper"),
    ],
)
def test_anything_but_plain_lora_is_one_error_and_changes_nothing(options, found):
    with pytest.raises(ConfigError, match=rf"LoRA in \S+: required plain LoRA.*found .*{found}.*\. [A-Z]"):
        lora(**options)


def test_two_adapters_are_refused():
    model, _ = lora(merge=False)
    model.add_adapter("second", peft.LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match="single adapter"):
        adopt(model, merge=True)
    assert type(q_proj(model).base_layer) is Fp8Linear
