"""Exports as other software reads them: tensor by tensor, in transformers, and with vLLM's FP8 method."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from jetrl_patch.backends.quantize import quantize_weight
from jetrl_patch.cli.checkpoint import INDEX, SINGLE
from jetrl_patch.cli.export import command, export
from jetrl_patch.config import Config
from jetrl_patch.trainer import record
from tests.checkpoint.exported import Lines, config, straightforward, tensors
from tests.fp8.thresholds import sqnr
from tests.models import save


@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
@pytest.mark.parametrize("exclude", [(), ("layers.1", "down_proj")])
def test_fp8_is_the_contracts_bytes_and_the_rest_bf16(qwen3, tmp_path, scale_format, exclude):
    done = export(qwen3, tmp_path / "out", "fp8", scale_format=scale_format, exclude=exclude)
    before, after = tensors(qwen3), tensors(tmp_path / "out")
    assert len(done.layers) == (21 if not exclude else 12)
    assert "model.layers.1.mlp.up_proj" in (done.left if exclude else done.layers) and "lm_head" in done.left
    for name, value in before.items():
        if name.removesuffix(".weight") in done.layers:
            q, s = straightforward(value, scale_format)
            assert after[name].dtype == torch.float8_e4m3fn and after[name + "_scale_inv"].dtype == torch.float32
            assert torch.equal(after.pop(name).view(torch.uint8), q.view(torch.uint8)), name
            assert torch.equal(after.pop(name + "_scale_inv"), s), name
        else:
            assert torch.equal(after.pop(name), value.to(torch.bfloat16)), name
    assert not after
    assert config(tmp_path / "out")["quantization_config"] == {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": done.left,
    }  # fmt: skip
    assert all(25 < db < 60 for db in done.sqnr.values())


def test_bf16_is_rounded_once_and_has_no_quantization(copy, tmp_path):
    fp32 = {name: value.float() + 1e-5 for name, value in tensors(copy).items()}
    save_file(fp32, copy / SINGLE, metadata={"format": "pt"})
    export(copy, tmp_path / "out", "bf16")
    after = tensors(tmp_path / "out")
    assert {n: t.dtype for n, t in after.items()} == dict.fromkeys(fp32, torch.bfloat16)
    assert all(torch.equal(after[name], value.to(torch.bfloat16)) for name, value in fp32.items())
    assert "quantization_config" not in config(tmp_path / "out")
    assert config(tmp_path / "out").get("dtype", config(tmp_path / "out").get("torch_dtype")) == "bfloat16"


def test_shards_keep_to_their_size_and_hold_everything_once(qwen3, tmp_path):
    whole = export(qwen3, tmp_path / "one", "fp8")
    assert whole.shards == [SINGLE] and not (tmp_path / "one" / INDEX).exists()
    done = export(qwen3, tmp_path / "many", "fp8", shard_bytes=400_000)
    assert len(done.shards) > 3 and done.shards[0] == f"model-00001-of-{len(done.shards):05d}.safetensors"
    assert all((tmp_path / "many" / shard).stat().st_size < 450_000 for shard in done.shards)
    index = json.loads((tmp_path / "many" / INDEX).read_text())
    assert index["metadata"]["total_size"] == done.size == whole.size
    one, many = tensors(tmp_path / "one"), tensors(tmp_path / "many")
    assert set(one) == set(many) == set(index["weight_map"])
    assert all(torch.equal(one[n].view(-1).view(torch.uint8), many[n].view(-1).view(torch.uint8)) for n in one)
    for name, shard in index["weight_map"].items():
        assert name in load_file(tmp_path / "many" / shard)


def test_an_export_of_shards_is_that_of_the_whole(qwen3, tmp_path):
    export(qwen3, tmp_path / "shards", "bf16", shard_bytes=400_000)
    export(tmp_path / "shards", tmp_path / "a", "fp8")
    export(qwen3, tmp_path / "b", "fp8")
    assert (tmp_path / "a" / SINGLE).stat().st_size == (tmp_path / "b" / SINGLE).stat().st_size
    a, b = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    assert all(torch.equal(a[n].view(-1).view(torch.uint8), b[n].view(-1).view(torch.uint8)) for n in b)


def test_transformers_loads_it_and_dequantizes_to_the_same_values(qwen3, tmp_path):
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    done = export(qwen3, tmp_path / "out", "fp8", exclude=("layers.0",))
    parsed = FineGrainedFP8Config.from_dict(config(tmp_path / "out")["quantization_config"])
    assert (parsed.weight_block_size, parsed.activation_scheme) == ([128, 128], "dynamic")
    assert parsed.modules_to_not_convert == done.left
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.bfloat16
    ).state_dict()
    for name, value in tensors(qwen3).items():
        expected = value.to(torch.bfloat16)
        if name.removesuffix(".weight") in done.layers:
            q, s = quantize_weight(value, "pow2")
            rows = s.repeat_interleave(128, 0).repeat_interleave(128, 1)[: q.shape[0], : q.shape[1]]
            expected = (q.float() * rows).to(torch.bfloat16)
            assert 25 < sqnr(expected, value) < 60
        assert torch.equal(loaded[name], expected), name


def test_vllms_own_fp8_method_wants_these_names_shapes_and_layers(qwen3, tmp_path, monkeypatch):
    fp8 = pytest.importorskip("vllm.model_executor.layers.quantization.fp8")
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    done = export(qwen3, tmp_path / "out", "fp8", exclude=("layers.0",))
    written = config(tmp_path / "out")["quantization_config"]
    parsed = fp8.Fp8Config.from_config(written)
    assert parsed.is_checkpoint_fp8_serialized and parsed.activation_scheme == "dynamic"
    assert parsed.weight_block_size == [128, 128] and parsed.ignored_layers == done.left
    packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    for layer in range(3):
        for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
            skipped = is_layer_skipped(f"model.layers.{layer}.{name}", parsed.ignored_layers, packed)
            assert skipped == (layer == 0)
    # the parameters that vLLM's own code registers for a block-quantized layer, without its kernels
    method = fp8.Fp8LinearMethod.__new__(fp8.Fp8LinearMethod)
    method.block_quant, method.weight_block_size, method.act_q_static = True, [128, 128], False
    method.is_scale_e8m0, method.activation_quant_key, method.weight_quant_key = False, None, None
    method.input_dtype = method.out_dtype = torch.bfloat16
    monkeypatch.setattr(fp8, "init_fp8_linear_kernel", lambda **_: None)
    monkeypatch.setattr("vllm.model_executor.parameter.get_tensor_model_parallel_rank", lambda: 0, raising=False)
    monkeypatch.setattr("vllm.model_executor.parameter.get_tensor_model_parallel_world_size", lambda: 1, raising=False)
    monkeypatch.setattr("vllm.distributed.get_tensor_model_parallel_world_size", lambda: 1)
    after = tensors(tmp_path / "out")
    for name in done.layers:
        layer = torch.nn.Module()
        layer.tp_size = 1
        N, K = after[name + ".weight"].shape
        method.create_weights(layer, K, [N], K, N, torch.bfloat16, weight_loader=lambda *_: None)
        wanted = {n: (tuple(p.shape), p.dtype) for n, p in layer.named_parameters()}
        found = {n: after[f"{name}.{n}"] for n in wanted}
        assert set(wanted) == {"weight", "weight_scale_inv"}
        assert wanted == {n: (tuple(t.shape), t.dtype) for n, t in found.items()}


def test_tokenizer_and_templates_go_along_and_the_runs_record_does_not(copy, tmp_path):
    (copy / "tokenizer_config.json").write_text("{}")
    (copy / "chat_template.jinja").write_text("x")
    (copy / "optimizer.pt").write_bytes(b"0")
    record.write(copy, Config())
    export(copy, tmp_path / "out", "fp8")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja", SINGLE}


def test_a_run_s_record_decides_unless_the_command_line_does(copy, tmp_path):
    record.write(copy, Config(scale_format="fp32", exclude=("layers.2",)))
    lines = Lines()
    done = command(copy, tmp_path / "a", "fp8", None, None, lines)
    assert len(done.layers) == 14 and "fp32 scales" in lines.text and "worst SQNR" in lines.text
    name = "model.layers.0.mlp.up_proj.weight"
    expected = quantize_weight(tensors(copy)[name], "fp32")
    assert torch.equal(tensors(tmp_path / "a")[name + "_scale_inv"], expected.s)
    assert len(command(copy, tmp_path / "b", "fp8", "pow2", ["o_proj"], lines).layers) == 18


def test_tied_embeddings_and_odd_widths(tmp_path):
    options = {"tie_word_embeddings": True, "hidden_size": 320, "intermediate_size": 1000, "num_key_value_heads": 1}
    odd = Path(save(tmp_path / "odd", "llama", steps=0, **options))
    done = export(odd, tmp_path / "out", "fp8", exclude=("self_attn", "gate_proj", "up_proj"))
    after = tensors(tmp_path / "out")
    assert "lm_head.weight" not in after
    assert after[done.layers[0] + ".weight_scale_inv"].shape == (3, 8)  # down_proj: 320 x 1000


def test_the_command_line(qwen3, tmp_path, monkeypatch, capsys):
    from jetrl_patch.cli.main import main

    monkeypatch.setattr("sys.argv", ["jetrl", "export", str(qwen3), str(tmp_path / "out"), "--format", "fp8"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    out = capsys.readouterr().out
    assert "21 layers in FP8 (blocks of 128x128, pow2 scales)" in out and "1 layers in BF16: lm_head" in out
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and "ConfigError: export to" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["jetrl", "export", str(qwen3), str(tmp_path / "b"), "--format", "fp4"])
    with pytest.raises(SystemExit):
        main()
    assert "--format 'fp4' must be 'bf16' or 'fp8'" in capsys.readouterr().err
