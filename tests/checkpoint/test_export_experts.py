"""Exports of mixtures of experts, as transformers and vLLM read them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from jetrl_patch.backends.quantize import dequantize_weight, quantize_weight
from jetrl_patch.cli.export import export
from jetrl_patch.errors import ConfigError, ModelError
from jetrl_patch.fp8.convert import per_expert
from jetrl_patch.models.families import FAMILIES
from tests.checkpoint.exported import config, straightforward, tensors
from tests.models import save

MIXTURES = ["qwen3_moe", "olmoe", "qwen2_moe", "mixtral", "glm4_moe", "deepseek_v3"]
#: the first block is dense, and a bias corrects scores
BY_SIGMOID = ("glm4_moe", "deepseek_v3")
#: compressed queries as wide as whole blocks of 128 rows, which all published models have
OPTIONS = {"deepseek_v3": {"q_lora_rank": 256}}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    root = tmp_path_factory.mktemp("mixtures")
    return lambda family: root / family if (root / family).exists() else Path(
        save(root / family, family, steps=0, **OPTIONS.get(family, {}))
    )


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_keeps_its_names_and_its_fp32_buffers_in_bf16(mixture, tmp_path, family):
    export(mixture(family), tmp_path / "bf16", "bf16")
    written, before = tensors(tmp_path / "bf16"), tensors(mixture(family))
    assert set(written) == set(before) and all(torch.equal(written[name], before[name]) for name in before)
    biases = [name for name in written if name.endswith("e_score_correction_bias")]
    assert len(biases) == (2 if family in BY_SIGMOID else 0) and all(written[name].dtype == torch.float32 for name in biases)


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_in_fp8_as_transformers_reads_it(mixture, tmp_path, family):
    """Each expert's matrices by the names of the family's checkpoints, quantized by the trainer's quantizer."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    folder, exclude = mixture(family), ("layers.1.mlp.experts", "o_proj")
    if family == "deepseek_v3":  # transformers dequantizes no weight that ends inside a block, DeepSeek's own neither
        exclude += ("q_a_proj", "kv_a_proj_with_mqa")
    done = export(folder, tmp_path / "out", "fp8", exclude=exclude)
    before, after = tensors(folder), tensors(tmp_path / "out")
    record = FAMILIES[family]
    matrices = {name for name in before if ".experts." in name}
    quantized = {name for name in matrices if ".layers.1." not in name}
    assert len(matrices) == (2 if family in BY_SIGMOID else 3) * 8 * 3
    assert quantized == {f"{name}.weight" for name in done.layers if ".experts." in name}
    assert set(after) == set(before) | {f"{name}.weight_scale_inv" for name in done.layers}
    for name, value in before.items():
        if name.removesuffix(".weight") in done.layers:
            q, s = straightforward(value, "pow2")
            assert torch.equal(after[name].view(torch.uint8), q.view(torch.uint8)) and torch.equal(after[f"{name}_scale_inv"], s)
        else:
            assert torch.equal(after[name], value), name
    routers = {f"model.layers.{layer}.{part}" for layer in (1, 2) for part in ("mlp.gate", record.to_stored("mlp.gate"))}
    assert routers <= set(done.left) and "model.layers.1.mlp.experts" in done.left
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.bfloat16
    )
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    for name, value in loaded.state_dict().items():
        expected = plain[name]
        parts = [own.removesuffix(".weight") for own, _ in per_expert(name, expected)]
        if record.to_stored(parts[0]) in done.layers:
            made = [dequantize_weight(*quantize_weight(m, "pow2"), torch.bfloat16) for _, m in per_expert(name, expected)]
            expected = made[0] if len(made) == 1 else torch.stack(made).reshape(expected.shape)
        assert torch.equal(value, expected), name


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", *BY_SIGMOID])
def test_vllms_own_fp8_experts_want_these_names_and_shapes(mixture, tmp_path, monkeypatch, family):
    fp8 = pytest.importorskip("vllm.model_executor.layers.quantization.fp8")
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    export(mixture(family), tmp_path / "out", "fp8", exclude=("layers.1.mlp.experts",))
    parsed, record = fp8.Fp8Config.from_config(config(tmp_path / "out")["quantization_config"]), FAMILIES[family]
    for layer in (1, 2):
        for name, skipped in (("mlp.gate", True), ("mlp.experts", layer == 1)):  # the names of vLLM's own modules
            assert is_layer_skipped(f"model.layers.{layer}.{record.to_stored(name)}", parsed.ignored_layers) == skipped
    monkeypatch.setattr("vllm.distributed.get_tensor_model_parallel_world_size", lambda: 1)
    method = fp8.Fp8MoEMethod.__new__(fp8.Fp8MoEMethod)
    method.quant_config, method.block_quant, method.weight_block_size = parsed, True, [128, 128]
    method.moe_block_shape, method.weight_scale_refine, method.weight_scale_name = [128, 128], None, "weight_scale_inv"
    method.moe = SimpleNamespace(w13_num_shards=2, has_bias=False)
    layer = torch.nn.Module()
    method.create_weights(layer, 8, 256, 128, torch.bfloat16, weight_loader=lambda *_: None)
    wanted = {name: (tuple(p.shape), p.dtype) for name, p in layer.named_parameters()}
    parts = [record.to_stored(part) for part in ("gate_proj", "down_proj", "up_proj")]
    after, prefix = tensors(tmp_path / "out"), f"model.layers.2.{record.to_stored('mlp.experts')}."
    found: dict[str, list[torch.Tensor]] = {}
    mapping = RoutedExperts.build_expert_params_mapping(*parts, 8, routed_experts_prefix="routed_experts")
    names = [name.removeprefix(prefix) for name in after if name.startswith(prefix)]
    for name in names:
        ((ours, theirs),) = [(p, w) for p, w, _, _ in mapping if name.startswith(w.removeprefix("experts."))]
        found.setdefault(name.replace(theirs.removeprefix("experts."), ours.rpartition(".")[2]), []).append(after[prefix + name])
    assert len(names) == 8 * 3 * 2 and set(found) == set(wanted)
    for name, pieces in found.items():
        (count, rows, columns), dtype = wanted[name]
        assert {(tuple(t.shape), t.dtype) for t in pieces} == {((rows * count // len(pieces), columns), dtype)}


@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_blocks_that_predict_a_second_token_are_left_out(tmp_path, form):
    from safetensors.torch import load_file, save_file

    folder = Path(save(tmp_path / "model", "deepseek_v3", steps=0, **OPTIONS["deepseek_v3"], num_nextn_predict_layers=1))
    weights = load_file(folder / "model.safetensors")
    last = {name.replace("layers.2.", "layers.3."): weight for name, weight in weights.items() if ".layers.2." in name}
    more = {**{name: weight.clone() for name, weight in last.items()}, "model.layers.3.eh_proj.weight": torch.ones(256, 512)}
    save_file(weights | more, folder / "model.safetensors", {"format": "pt"})
    assert config(folder)["num_nextn_predict_layers"] == 1
    export(folder, tmp_path / "out", form)
    assert not any("layers.3." in name for name in tensors(tmp_path / "out"))
    assert config(tmp_path / "out")["num_nextn_predict_layers"] == 0


def test_an_expert_that_ends_inside_a_block_is_refused_or_left_out(tmp_path):
    folder = Path(save(tmp_path / "odd", "qwen3_moe", steps=0, moe_intermediate_size=200))
    says = r"mlp\.experts: required a multiple of 128 rows of gate and up.*found 200 rows\. .*--exclude experts"
    with pytest.raises(ConfigError, match=says):
        export(folder, tmp_path / "fp8", "fp8")
    assert not (tmp_path / "fp8").exists()
    done = export(folder, tmp_path / "fp8", "fp8", exclude=("experts",))
    assert len(done.layers) == 3 * 4
    with pytest.raises(ModelError, match=r"required all 24 matrices of model\.layers\.0\.mlp\.experts in FP8 or none"):
        export(folder, tmp_path / "some", "fp8", exclude=("experts.3",))
