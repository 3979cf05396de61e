"""When norms and activations are fused with quantization: never on a CPU, and only if there is a kernel for it."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("triton")

from jetrl_patch.adapters.transformers import fused, prepare
from jetrl_patch.config import Config
from jetrl_patch.exact import elementwise as passing
from jetrl_patch.fp8 import producers
from jetrl_patch.fp8.convert import swap_linears
from jetrl_patch.models.families import FAMILIES

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


class Block(torch.nn.Module):
    """In the order of statements that is served, and then in others that are not."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.Identity()

    def forward(self, x, *, scale=2):
        kept = x
        x = self.norm(x)
        return kept + scale * x


class Normed(Block):
    def forward(self, x):
        kept = x
        normed = self.norm(x)
        return kept + normed + x


class Cast(Block):
    def forward(self, x):
        kept = x.float()
        x = self.norm(x)
        return kept + x


class Two(Block):
    def forward(self, x):
        kept = x
        x = self.norm(x, kept)
        return kept + x


class Other(Block):
    def forward(self, x, y):
        kept = y
        x = self.norm(x)
        return kept + x


class InPlace(Block):
    def forward(self, x):
        kept = x
        x = self.norm(x)
        kept += x
        return kept


class Decorated(Block):
    @torch.no_grad()
    def forward(self, x):
        kept = x
        x = self.norm(x)
        return kept + x


class Closed(Block):
    def forward(self, x):
        kept = x
        x = self.norm(x)
        return kept + x + super().forward(x)


class Inherited(Block):
    pass


def test_the_residual_comes_from_the_norm_where_the_source_says_so():
    kind, norms = fused._block(Block)
    assert norms == ("norm",) and kind.__name__ == "Block" and issubclass(kind, Block)
    block, x = kind(), torch.arange(3.0)
    assert torch.equal(block(x), 3 * x) and torch.equal(block(x, scale=1), 2 * x)
    block.norm.forward = lambda x: passing.passing(x + 1, x * 10)
    assert torch.equal(block(x), 10 * x + 2 * (x + 1))
    block.norm.forward = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError) as raised:
        block(x)
    source, first = inspect.getsourcelines(Block.forward)
    entry = next(entry for entry in raised.traceback if entry.name == "forward")
    assert entry.lineno + 1 == first + next(i for i, line in enumerate(source) if "self.norm" in line)
    left = (Normed, Cast, Two, Other, InPlace, Decorated, Closed, Inherited, kind)
    assert all(fused._block(other) is None for other in left)
    typed = "class Typed(Block):\n    def forward(self, x):\n        kept = x\n        x = self.norm(x)\n        return kept"
    exec(typed, globals(), made := {})
    assert fused._block(made["Typed"]) is None  # no source to read


@pytest.mark.parametrize("kept", [0, 2])
def test_the_frameworks_wrap_the_same_blocks(kept):
    """Also with a block whose norms feed no FP8 layer."""
    fsdp = pytest.importorskip("verl.utils.fsdp_utils")
    model = build("qwen2")
    swap_linears(model, exclude=(f"layers.{kept}.*",), backend="triton")
    fused.fuse(model, "triton", "cuda")
    before = type(model.model.layers[0])
    assert fused.add_in_norms(model, "triton", "cuda") == [f"model.layers.{i}" for i in range(3)]
    (kind,) = {type(layer) for layer in model.model.layers}
    assert kind is not before and sum(getattr(m, "jetrl_passes", False) for m in model.modules()) == 4
    policy = fsdp.get_fsdp_wrap_policy(model)
    found = [m for m in model.modules() if policy(module=m, recurse=False, nonwrapped_numel=1)]
    assert found == list(model.model.layers)
    targets = fsdp._select_fsdp2_wrap_targets(model, list(model._no_split_modules))
    assert [m for m in targets if m in found] == found


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_is_served(model_type):
    module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    blocks = [kind for name, kind in vars(module).items() if name.endswith("DecoderLayer") and isinstance(kind, type)]
    for found in map(fused._block, blocks):
        assert found is not None and sorted(found.norms) == ["input_layernorm", "post_attention_layernorm"]
    assert blocks


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
