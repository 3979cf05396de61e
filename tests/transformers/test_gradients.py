"""Each family's gradients beside those of transformers' own model in FP32: a mode changes roundings, not what is trained."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor

import jetrl_patch
from jetrl_patch.errors import ModelError
from jetrl_patch.fp8.convert import select_layers
from jetrl_patch.fp8.lora import adopt
from jetrl_patch.models.families import FAMILIES, covering, record_of
from jetrl_patch.models.structure import unit_of
from jetrl_patch.trainer.prepare import prepare_model

from ..fp8.thresholds import SQNR_GRADIENT, SQNR_GRADIENT_NETS, UNDERFLOW, sqnr
from .stock import PAD, follow, gradients, made, routes_of, texts

pytestmark = pytest.mark.pins

#: odd widths, tied embeddings, biases, a block without experts, rotary angles of other types
VARIANTS = (
    "qwen2-odd", "qwen3-tied", "llama-odd", "llama3-rope", "olmoe-odd", "qwen2_moe-odd", "mixtral-odd", "glm4_moe-odd",
    "deepseek_v3-plain", "qwen3_next-odd", "qwen3_5-tied",
)  # fmt: skip
_NO_TOWERS = Version(transformers.__version__) >= Version("5.19")  # exact mode refuses those of this release


def supported(*names: str) -> list[str]:
    return [name for name in names if not (_NO_TOWERS and FAMILIES[name.partition("-")[0]].tower)]


#: what is compared: everything, and each kind of parameter by itself where there is one
PARTS = (
    "", ".mlp.experts.", ".mlp.gate.", ".mlp.shared_expert", "kv_b_proj", ".visual.", "A_log", "dt_bias", "conv1d", "in_proj",
    "linear_attn.norm",
)  # fmt: skip
#: modules whose forward hooks do not run once, as on transformers' model: the activation and the convolution are part of another
#: op, and latent attention calls the layer for each half of its weight
NOT_CALLED_ONCE = {"act_fn forward", "activation_fn forward", "conv1d forward", "kv_b_proj forward"}


def converted(name: str, exclude: tuple[str, ...] = ()) -> Any:
    jetrl_patch.enable(precision="fp8-unified", exclude=exclude)
    model = made(name)
    prepare_model(model, jetrl_patch.status().config)
    return model


def compared(ours: Any, plain: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Both gradients of each parameter, with ours' routes on both sides. Fails if one side alone has a gradient."""
    family, given = record_of(ours.config), texts(ours)
    routes = routes_of(ours, family)
    found = gradients(ours, given)
    if family.mixture:
        follow(plain, family, routes)
    expected = gradients(plain, given)
    assert found.keys() == expected.keys()
    return {name: (grad.float(), expected[name]) for name, grad in found.items()}


def whole_sqnr(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """The SQNR of several gradients together, in dB."""
    return sqnr(*(torch.cat([grad.flatten() for grad in side]) for side in zip(*pairs, strict=True)))


def trained(grad: Tensor) -> Tensor:
    """Which rows of a parameter a step would change."""
    return (grad != 0).view(grad.shape[0], -1).any(1)


@pytest.mark.parametrize("layers", ["fp8", "bf16"])
@pytest.mark.parametrize("name", supported(*covering("exact"), *VARIANTS))
def test_the_same_numbers_are_trained(name: str, layers: str) -> None:
    """With all layers in FP8, and with one: there a wrong factor stands out of the noise."""
    plain = made(name)
    names = select_layers(plain)
    others = tuple(layer for layer in names if unit_of(layer) != unit_of(names[-1]))
    ours = converted(name, others if layers == "bf16" else ())
    family, tied = record_of(ours.config), ours.get_input_embeddings().weight is ours.lm_head.weight
    pairs = compared(ours, plain.float())
    _, embedded = pairs[f"{family.decoder}.embed_tokens.weight"]
    assert trained(embedded)[PAD] == tied and trained(embedded).sum() > 40

    # FP8's noise, which delta nets amplify; and beside a token with a large gradient others have none
    noisy = family.delta_net and layers == "fp8"
    underflow = 0
    for parameter, (grad, theirs) in pairs.items():
        underflow += int(((grad == 0) & (theirs != 0)).sum())
        if parameter.endswith(("k_proj.bias", "qkv.bias")):  # one bias for all keys changes no weight: its gradient is noise
            continue
        assert not grad[theirs == 0].any(), f"{parameter}: elements are trained here alone"
        assert noisy or grad.dim() == 1 or torch.equal(trained(grad), trained(theirs)), f"{parameter}: rows are not trained here"
    assert noisy or underflow < UNDERFLOW * sum(grad.numel() for grad, _ in pairs.values())
    for part in PARTS:
        chosen = [pair for parameter, pair in pairs.items() if part in parameter]
        if chosen and not noisy:
            reached = whole_sqnr(chosen)
            assert reached > (SQNR_GRADIENT_NETS if family.delta_net else SQNR_GRADIENT[layers]), (part, reached)


def hooked(model: Any) -> Counter[str]:
    """Counts the calls of hooks on every module and parameter, by name."""
    calls: Counter[str] = Counter()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: calls.update([f"{name} forward"]))
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda _, name=name: calls.update([f"{name} gradient"]))
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.update([f"{name} accumulated"]))
    return calls


@pytest.mark.parametrize("name", supported(*covering("exact")))
def test_frozen_parameters_and_hooks(name: str) -> None:
    """Freezing half of the parameters changes no bit of the others' gradients. Hooks run as often as on transformers' model."""
    ours, plain = converted(name), made(name)
    calls, expected = hooked(ours), hooked(plain)
    given = texts(ours)
    whole = {parameter: grad.clone() for parameter, grad in gradients(ours, given).items()}
    gradients(plain, given)
    assert {call.rpartition(".")[2] for call in calls | expected if calls[call] != expected[call]} <= NOT_CALLED_ONCE

    for frozen in range(2):
        for index, parameter in enumerate(ours.parameters()):
            parameter.requires_grad_(index % 2 != frozen)
        found = gradients(ours, given)
        assert list(found) == [parameter for index, parameter in enumerate(whole) if index % 2 != frozen]
        for parameter, grad in found.items():
            assert torch.equal(grad, whole[parameter]), parameter


@pytest.mark.parametrize("name", supported("qwen3-tied", "phi3", "qwen3_moe", "qwen3_vl"))
def test_lora_trains_its_factors_alone(name: str) -> None:
    peft = pytest.importorskip("peft")
    ours, plain = converted(name), made(name).float()
    targets = r".*\.(layers|blocks)\.\d+\.(self_attn|attn|mlp)\.\w*(_proj|qkv)"
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets)
    adapted = []
    for model in (ours, plain):
        torch.manual_seed(0)
        adapted.append(peft.get_peft_model(model, settings))
    assert adopt(adapted[0], merge=True)
    for start, trains in ((0, "lora_B"), (0.02, "lora_")):
        for model in adapted:
            torch.manual_seed(1)
            for parameter, tensor in model.named_parameters():
                if "lora_B" in parameter:
                    torch.nn.init.normal_(tensor, 0, start)
        pairs = compared(*adapted)
        for parameter, (grad, theirs) in pairs.items():
            assert "lora_" in parameter and grad.any() == theirs.any() == (trains in parameter), parameter
        assert whole_sqnr(list(pairs.values())) > SQNR_GRADIENT["fp8"]


def test_a_lookup_that_changes_the_weights_is_refused() -> None:
    jetrl_patch.enable(precision="fp8-unified")
    model = made("qwen3")
    model.model.embed_tokens.max_norm = 1.0
    with pytest.raises(ModelError, match=r"embed_tokens: required .* changes no weight, found max_norm=1\.0\. "):
        prepare_model(model, jetrl_patch.status().config)
