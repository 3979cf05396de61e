"""The FP32 ``lm_head``: against FP64, row by row, gradients, and under autocast."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from jetrl_patch.config import Config
from jetrl_patch.errors import ModelError
from jetrl_patch.exact.head import widen_head
from jetrl_patch.trainer.prepare import prepare_model
from tests.models import config_of

EXACT = Config(head_dtype="float32")
BF16 = Config(precision="bf16", head_dtype="float32")
FP16 = Config(precision="fp16", head_dtype="float32")


def head(config: Config, master: torch.dtype = torch.float32, bias: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    model.lm_head = nn.Linear(192, 77, bias=bias, dtype=master)
    widen_head(model, config)
    return model.lm_head


@pytest.mark.parametrize("config", [EXACT, BF16, FP16])
@pytest.mark.parametrize("bias", [False, True])
def test_logits_are_the_unrounded_product_of_16_bit_operands(config, bias):
    layer = head(config, bias=bias)
    dtype = getattr(torch, config.compute_dtype)
    x = torch.randn(2, 9, 192).to(dtype)
    with torch.autocast("cpu", dtype=dtype):
        logits = layer(x)
    rounded = [p.detach().to(dtype).double() for p in layer.parameters()]
    oracle = x.double() @ rounded[0].t() + (rounded[1] if bias else 0)
    assert logits.dtype == torch.float32 and logits.shape == (2, 9, 77)
    assert (logits - oracle).abs().max() < 1e-5 < (oracle.to(dtype) - oracle).abs().max()


def test_exact_rows_do_not_depend_on_their_neighbours():
    layer = head(EXACT)
    x = torch.randn(300, 192).bfloat16()
    x[17] *= 1e4
    whole = layer(x)
    for rows in ([0], [17, 3], list(range(5, 200))):
        assert torch.equal(layer(x[rows]), whole[rows])
    assert layer(x[:0]).shape == (0, 77)


@pytest.mark.parametrize("config", [EXACT, BF16, FP16])
@pytest.mark.parametrize("master", ["float32", "16 bits"])
def test_gradients(config, master):
    dtype = getattr(torch, config.compute_dtype)
    layer = head(config, torch.float32 if master == "float32" else dtype)
    x = torch.randn(4, 6, 192).to(dtype).requires_grad_()
    g = torch.randn(4, 6, 77)
    layer(x).backward(g)
    w = layer.weight.detach().to(dtype).double()
    dx, dw = g.double() @ w, torch.einsum("abv,abk->vk", g.double(), x.detach().double())
    for found, oracle in ((x.grad, dx), (layer.weight.grad, dw)):
        assert ((found.double() - oracle).norm() / oracle.norm()) < 4e-3
    assert x.grad.dtype == dtype and layer.weight.grad.dtype == layer.weight.dtype


@pytest.mark.parametrize("config", [BF16, FP16, Config(precision="fp8-rollout", head_dtype="float32"),
                                    Config(align="linear", head_dtype="float32")])  # fmt: skip
def test_every_mode_widens_the_head_of_a_model(config):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    dtype = getattr(torch, config.compute_dtype)
    model = AutoModelForCausalLM.from_config(config_of("llama", num_hidden_layers=1, tie_word_embeddings=True)).to(dtype)
    names = set(model.state_dict())
    plain = model(input_ids=torch.arange(6)[None]).logits
    prepare_model(model, config)
    logits = model(input_ids=torch.arange(6)[None]).logits
    assert (plain.dtype, logits.dtype) == (dtype, torch.float32)
    assert set(model.state_dict()) == names and isinstance(model.lm_head, nn.Linear)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    if not config.quantized_rollout:  # a second call changes nothing
        prepare_model(model, config)
        assert torch.equal(model(input_ids=torch.arange(6)[None]).logits, logits)


def test_a_model_without_an_lm_head_is_refused():
    with pytest.raises(ModelError, match=r"required an lm_head that is an nn.Linear"):
        widen_head(SimpleNamespace(lm_head=None), BF16)
