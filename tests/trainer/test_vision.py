"""Models with a vision tower in the trainer: what becomes FP8, what is accepted, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import jetrl_patch
from jetrl_patch.cli.parity import cli
from jetrl_patch.config import Config
from jetrl_patch.errors import JetrlError, ModelError
from jetrl_patch.fp8.convert import select_layers
from jetrl_patch.fp8.linear import Fp8Linear
from jetrl_patch.measure import pictures
from jetrl_patch.measure.parity import check_model
from jetrl_patch.models.families import FAMILIES
from jetrl_patch.models.layers import is_quantized
from jetrl_patch.models.structure import unit_of
from jetrl_patch.trainer.preflight import check_checkpoint, needed_ep
from jetrl_patch.trainer.source import convert
from tests import vision_models

LINEAR, ROLLOUT = Config(precision="fp8-unified", align="linear"), Config(precision="fp8-rollout")
#: FP8 layers of both blocks, of which one may have a delta net, with three of its five
LAYERS = {
    "qwen2_5_vl": 2 * 7, "qwen3_vl": 2 * 7, "qwen3_vl_moe": 2 * (4 + 8 * 3), "glm4v": 2 * 6, "qwen3_5": 6 + 7,
    "qwen3_5_moe": 6 + 7 + 2 * 8 * 3,
}  # fmt: skip
EXACT = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
MIXTURES = [family for family in vision_models.FAMILIES if FAMILIES[family].mixture]


def prepared(model: Any, config: Config) -> Any:
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return convert(model, config.resolved(), shapes, rollout_tp=1, device_type="cpu")


def looking(family: str) -> dict[str, Any]:
    """What a processor makes of an image of 16 patches, between two words: 4 tokens."""
    ids = [5, vision_models.FIRST, *[vision_models.FIRST + 2] * 4, vision_models.FIRST + 1, 6, 7]
    patch = vision_models.FAMILIES[family][1]["patch_size"]
    kinds = torch.tensor([[int(token == vision_models.FIRST + 2) for token in ids]])
    return {
        "input_ids": torch.tensor([ids]),
        "mm_token_type_ids": kinds,
        "pixel_values": torch.randn(16, 3 * 2 * patch * patch, dtype=torch.bfloat16),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"])
def test_positions_of_one_dimension_on_one_side_are_refused(family: str, tmp_path: Path) -> None:
    """Without ``mrope_section`` vLLM has no M-RoPE, and transformers its own default."""
    made = vision_models.config_of(family)
    made.save_pretrained(tmp_path)
    assert check_checkpoint(tmp_path, ROLLOUT, 1) is not None
    rope = made.text_config.rope_parameters
    made.text_config.rope_parameters = {key: value for key, value in rope.items() if key != "mrope_section"}
    made.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"required rope_parameters\.mrope_section .*found no rope_param.* Set it"):
        check_checkpoint(tmp_path, ROLLOUT, 1)


@pytest.mark.parametrize("width", [128, 256])
def test_experts_whose_shapes_do_not_tell_their_layout_are_refused(tmp_path: Path, width: int) -> None:
    """Of a hidden size of 256. transformers 5.10 would load them transposed, without an error."""
    for size, accepted in ((384, True), (width, False)):
        vision_models.config_of("qwen3_vl_moe", moe_intermediate_size=size).save_pretrained(tmp_path)
        if accepted:
            assert check_checkpoint(tmp_path, LINEAR, 1) is not None
            continue
        with pytest.raises(ModelError, match=f"stored transposed.*hidden_size=256, moe_intermediate_size={width}"):
            check_checkpoint(tmp_path, LINEAR, 1)


@pytest.mark.parametrize("family", vision_models.FAMILIES)
def test_the_linears_of_the_language_model_become_fp8_and_nothing_else(family: str) -> None:
    jetrl_patch.enable(precision="fp8-unified", align="linear")
    model = vision_models.build(family)
    before = {name: type(module) for name, module in model.named_modules()}
    source = prepared(model, LINEAR)
    changed = {name for name, module in model.named_modules() if type(module) is not before[name]}
    assert changed == {name for name in source.layers if unit_of(name) == name} and len(source.layers) == LAYERS[family]
    assert all(name.startswith("model.language_model.layers.") for name in source.layers)
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)} - changed
    assert "lm_head" in linears and any(".merger." in name for name in linears) and any(".blocks." in name for name in linears)

    inputs = looking(family)
    seen = model(**inputs).logits
    seen.float().logsumexp(-1).sum().backward()
    assert all(isinstance(module, Fp8Linear) for name, module in model.named_modules() if name in changed)
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for n, p in model.named_parameters() if "mlp" in n)
    other = model(**{**inputs, "pixel_values": -inputs["pixel_values"]}).logits
    assert not torch.equal(seen[:, -1], other[:, -1])


@pytest.mark.parametrize("family", EXACT)
def test_exact_mode_swaps_every_op_and_keeps_the_config(family: str) -> None:
    """A padded row has the log-probs of a packed one. Both have an image."""
    jetrl_patch.enable(precision="fp8-unified")
    model = vision_models.build(family)
    config = Config(precision="fp8-unified").resolved()
    tower = model.config.vision_config._attn_implementation
    source = prepared(model, config)
    plain = [name for name, module in model.named_modules() if type(module) in (nn.Linear, nn.LayerNorm, nn.Embedding, nn.Conv3d)]
    assert not plain and len(source.layers) == LAYERS[family]
    assert model.config.vision_config._attn_implementation == tower
    inputs = looking(family)
    ids, kinds = inputs["input_ids"], inputs["mm_token_type_ids"]
    angles = model.model.get_rope_index(ids, kinds, image_grid_thw=inputs["image_grid_thw"])[0]
    text = torch.arange(ids.shape[1]).expand(1, 1, -1)
    packed = {
        "input_ids": ids.repeat(1, 2), "pixel_values": inputs["pixel_values"].repeat(2, 1),
        "image_grid_thw": inputs["image_grid_thw"].repeat(2, 1), "position_ids": torch.cat((text, angles)).repeat(1, 1, 2),
    }  # fmt: skip
    padded = {
        **inputs, "input_ids": nn.functional.pad(ids, (3, 0)), "mm_token_type_ids": nn.functional.pad(kinds, (3, 0)),
        "attention_mask": nn.functional.pad(torch.ones_like(ids), (3, 0)),
    }  # fmt: skip
    left, right = model(**packed, use_cache=False).logits[0].chunk(2)
    assert torch.equal(left, right)
    assert torch.equal(model(**padded, use_cache=False).logits[0, 3:], left)
    assert torch.equal(model(**inputs, use_cache=False).logits[0], left)
    left.float().logsumexp(-1).sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.model.visual.parameters())


@pytest.mark.parametrize("family", vision_models.FAMILIES)
def test_a_bf16_trainer_names_the_same_layers(family: str) -> None:
    jetrl_patch.enable(precision="fp8-rollout")
    model = vision_models.build(family)
    source = prepared(model, ROLLOUT)
    assert source.layers == select_layers(model) and not any(isinstance(m, Fp8Linear) for m in model.modules())


def test_a_tower_is_known_by_its_name_on_both_sides() -> None:
    for name in ("model.visual.blocks.0.attn.qkv", "visual.blocks.0.mlp.gate_proj", "model.visual.layers.3.proj"):
        assert not is_quantized(name, ())
    assert is_quantized("model.language_model.layers.0.mlp.gate_proj", ())
    assert is_quantized("model.layers.0.visually.proj", ())
    model = vision_models.build("qwen2_5_vl")
    with pytest.raises(ModelError, match=r"exclude pattern 'visual' matches no FP8 layer"):
        select_layers(model, ("visual",))
    assert len(select_layers(model, ("language_model.layers.1",))) == 7


@pytest.mark.parametrize("family", vision_models.FAMILIES)
def test_what_is_accepted_by_config_json(tmp_path: Path, family: str) -> None:
    vision_models.config_of(family).save_pretrained(tmp_path)
    channel = Config(precision="fp8-rollout", rollout_granularity="channel")
    cut = family == "qwen3_vl_moe"  # its experts, by two ranks
    for config in (LINEAR, ROLLOUT, *[channel] * (family not in MIXTURES)):
        for tp in (1, 2):
            ep = needed_ep(tmp_path, config, tp)
            assert ep == (tp if cut else 1)
            assert check_checkpoint(tmp_path, config, tp, ep).model_type == family
    if family in MIXTURES:
        with pytest.raises(ModelError, match=r"scales per channel does not quantize experts\), found num_experts=8\."):
            check_checkpoint(tmp_path, channel, 1)
    if cut:
        with pytest.raises(ModelError, match=r"the experts of \w+: required .*whole blocks of 128, found 384\. Use expert"):
            check_checkpoint(tmp_path, LINEAR, 2)
    exact = Config(precision="fp8-unified")
    if family in EXACT:
        assert check_checkpoint(tmp_path, exact, 1).model_type == family
    else:
        says = rf"required one of the model families .*found model_type='{family}' \(its vision tower"
        with pytest.raises(ModelError, match=says):
            check_checkpoint(tmp_path, exact, 1)
    with pytest.raises(ModelError, match=r"with an FP8 rollout one of qwen2_5_vl, .*found text_config and vision_config\."):
        check_checkpoint(tmp_path, Config(precision="int8-rollout"), 1)
    with pytest.raises(ModelError, match=r"cuts a block.*model\.language_model\.layers\.0\.(self_attn\.o|linear_attn\.out)_proj"):
        check_checkpoint(tmp_path, LINEAR, 4, needed_ep(tmp_path, LINEAR, 4))
    with pytest.raises(ModelError, match=r"invariant_scale=1\.5: required one of the model families"):
        check_checkpoint(tmp_path, Config(precision="fp8-rollout", invariant_scale=1.5), 1)


def test_experts_of_a_language_model_are_still_found(tmp_path: Path) -> None:
    config = vision_models.config_of("qwen2_5_vl")
    config.text_config.num_experts = 4
    with pytest.raises(ModelError, match=r"required a dense model.*found num_experts=4\."):
        convert(SimpleNamespace(config=config), LINEAR, {}, rollout_tp=1, device_type="cpu")


def test_parity_needs_what_processes_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(*names: str) -> None:
        monkeypatch.setattr("jetrl_patch.measure.pictures.is_installed", lambda name: name in names)

    path, file = str(tmp_path), tmp_path / "config.json"
    vision_models.config_of("qwen3_vl").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    installed("PIL", "torchvision")
    with pytest.raises(ModelError, match=r"required the model's image processor \(preprocessor_config\.json\), found no such"):
        check_model(path, [LINEAR])
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert check_model(path, [LINEAR, Config()]) is True
    with pytest.raises(ModelError, match=r"--tp 3.*4 attention and 2 key/value heads"):
        check_model(path, [LINEAR], tp=3)
    with pytest.raises(ModelError, match=r"--explain compares trainers of a text model.*has a vision tower"):
        cli.main(["--model", path, "--explain"])
    vision_models.config_of("glm4v").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="found model_type='glm4v'"):
        cli.main(["--model", path, "--align", "exact"])
    installed("PIL")
    with pytest.raises(JetrlError, match=r"required pillow and torchvision, found no torchvision\. Install them"):
        check_model(path, [LINEAR])
    file.write_text('{"model_type": "llava", "vision_config": {}}')
    with pytest.raises(ModelError, match=r"required a text model, or one of qwen2_5_vl, .*found model_type='llava'"):
        check_model(path, [LINEAR])


def test_pictures_are_before_and_in_a_prompt() -> None:
    first, second = both = [pictures.Picture(None, torch.empty(0), torch.empty(0), 4) for _ in range(2)]
    found, shown = pictures.place_pictures([[1, 2, 3]] * 4, both, [7, 8, 9])
    assert found == [[1, 2, 3], [7, 8, 9, 1, 2, 3], [7, 8, 9, 1, 7, 8, 9, 2, 3], [1, 2, 3]]
    assert [[*map(id, seen)] for seen in shown] == [[], [id(second)], [id(first), id(second)], []]
    image, other = pictures.noise(1, 64, 96), pictures.noise(2, 64, 96)
    assert image.size == (96, 64) and image.tobytes() == pictures.noise(1, 64, 96).tobytes() != other.tobytes()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_for_a_gpu_the_language_model_is_fused_and_the_tower_is_not(family: str, monkeypatch: Any) -> None:
    from transformers import AutoModelForImageTextToText

    from jetrl_patch.trainer import prepare

    jetrl_patch.enable(precision="fp8-unified", align="linear")
    monkeypatch.setattr(prepare, "choose_backend", lambda *asked: "triton")
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(vision_models.config_of(family))
    before = {name: type(module) for name, module in model.named_modules()}
    fp8 = prepare.prepare_model(model, LINEAR.resolved(), device_type="cuda")
    changed = {name for name, module in model.named_modules() if type(module) is not before[name]} - set(fp8)
    rotated = ("self_attn",) if family == "qwen3_vl" else ()  # Qwen2.5-VL's angles have three dimensions
    parts = ("input_layernorm", "post_attention_layernorm", "mlp", *rotated)
    assert changed == {f"model.language_model.layers.{i}.{part}" for i in range(2) for part in parts}
