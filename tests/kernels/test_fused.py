"""When norms and activations are fused with quantization: never on a CPU, and only if there is a kernel for it."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("triton")

from jetrl_patch.config import Config
from jetrl_patch.fp8 import fused, producers
from jetrl_patch.fp8.convert import swap_linears
from jetrl_patch.models.families import FAMILIES
from jetrl_patch.trainer import prepare

from ..models import build, config_of

LINEAR = Config(precision="fp8-unified", align="linear").resolved()


def test_who_decides():
    assert producers.available("triton", "cuda") and producers.available("cublaslt", "cuda")
    assert not producers.available("triton", "cpu")
    assert not producers.available("native", "cpu") and not producers.available("torch", "cuda")


def kinds(model):
    return {name: type(module).__name__ for name, module in model.named_modules()}


def test_nothing_changes_on_a_cpu():
    model = build("qwen3")
    before = kinds(model)
    names = prepare.prepare_model(model, LINEAR)
    assert kinds(model) == {**before, **dict.fromkeys(names, "Fp8Linear")}
    assert type(model.model.layers[0]) is type(build("qwen3").model.layers[0])


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_a_model_for_a_gpu_is_fused_without_touching_its_weights(family, monkeypatch):
    monkeypatch.setattr(prepare, "choose_backend", lambda *asked: "triton")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(family))
    before, parameters = kinds(model), {name: id(p) for name, p in model.named_parameters()}
    fp8 = prepare.prepare_model(model, LINEAR, device_type="cuda")
    changed = {name for name, kind in kinds(model).items() if kind != before[name]} - set(fp8)
    parts = ("input_layernorm", "post_attention_layernorm", "mlp", "self_attn")  # attention rotates by one kernel
    assert changed == {f"model.layers.{i}.{part}" for i in range(3) for part in parts}
    assert {name: id(p) for name, p in model.named_parameters()} == parameters
    assert isinstance(model.model.layers[0].mlp, type(build(family).model.layers[0].mlp))
    assert fused.fuse(model, "triton", "cuda") == []  # a second time changes nothing


def test_what_feeds_no_fp8_layer_stays(monkeypatch):
    model = build("qwen2")
    swap_linears(model, exclude=("down_proj", "self_attn.*"), backend="triton")
    assert {name.rsplit(".", 1)[-1] for name in fused.fuse(model, "triton", "cuda")} == {"post_attention_layernorm"}
    model = build("qwen2", hidden_act="gelu")
    swap_linears(model, backend="triton")
    assert not any(name.endswith("mlp") for name in fused.fuse(model, "triton", "cuda"))


def test_other_families_stay():
    model = build("llama")
    swap_linears(model, backend="triton")
    for module in model.modules():
        if type(module).__name__ in (FAMILIES["llama"].norm, FAMILIES["llama"].mlp):
            module.__class__ = type(f"Other{type(module).__name__}", (type(module),), {})
    assert fused.fuse(model, "triton", "cuda") == []
