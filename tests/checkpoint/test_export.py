"""Exports as other software reads them: tensor by tensor, in transformers, and with vLLM's FP8 method."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from jetrl_patch.checkpoint import export as module
from jetrl_patch.checkpoint import record
from jetrl_patch.checkpoint.command import command
from jetrl_patch.checkpoint.export import export
from jetrl_patch.checkpoint.formats import check_error
from jetrl_patch.checkpoint.source import INDEX, SINGLE
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, ModelError
from jetrl_patch.families import FAMILIES
from jetrl_patch.fp8.expert_layers import per_expert
from jetrl_patch.fp8.quantize import dequantize_weight, quantize_weight
from tests.fp8.thresholds import sqnr
from tests.models import save


class Lines:
    """A console that records its lines."""

    def __init__(self) -> None:
        self.text = ""

    def print(self, line: str) -> None:
        self.text += line + "\n"


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> Path:
    return Path(save(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", steps=1))


@pytest.fixture
def copy(qwen3, tmp_path) -> Path:
    return Path(shutil.copytree(qwen3, tmp_path / "copy"))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        new = load_file(file)
        assert not set(new) & set(found)
        found |= new
    return found


def config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def straightforward(w: torch.Tensor, scale_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A plain Python quantizer, block by block."""
    rows, columns = -(-w.shape[0] // 128), -(-w.shape[1] // 128)
    q, s = torch.empty(w.shape, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            at = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            block = w[at].to(torch.bfloat16).float()
            scale = block.abs().max().clamp(min=1e-10) / 448
            if scale_format == "pow2":
                mantissa, exponent = torch.frexp(scale)
                scale = torch.ldexp(torch.tensor(1.0), exponent - (mantissa == 0.5).int())
            s[i, j] = scale
            q[at] = (block / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return q, s


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
    assert torch.equal(tensors(tmp_path / "a")[name + "_scale_inv"], expected[1])
    assert len(command(copy, tmp_path / "b", "fp8", "pow2", ["o_proj"], lines).layers) == 18


def test_what_is_there_is_not_overwritten(qwen3, tmp_path):
    (tmp_path / "empty").mkdir()
    export(qwen3, tmp_path / "empty", "bf16")
    with pytest.raises(ConfigError, match="required a new or empty folder, found a folder with files"):
        export(qwen3, tmp_path / "empty", "fp8")
    assert "quantization_config" not in config(tmp_path / "empty")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3.4e38])
@pytest.mark.parametrize("format", ["bf16", "fp8"])
def test_a_value_that_is_not_finite_is_named_and_nothing_is_left(copy, tmp_path, bad, format):
    """3.4e38 is finite in FP32 but not in BF16."""
    found = {name: value.float() for name, value in tensors(copy).items()}
    found["model.layers.1.mlp.up_proj.weight"][3, 5] = bad
    save_file(found, copy / SINGLE, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight: .* found 1 NaN or Inf"):
        export(copy, tmp_path / "out", format)
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def cut(folder):
    data = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(data[: len(data) // 2])


def lose(folder):
    found = tensors(folder)
    del found["model.layers.2.mlp.down_proj.weight"]
    save_file(found, folder / SINGLE)


def add(folder):
    save_file(tensors(folder) | {"model.extra.weight": torch.zeros(2)}, folder / SINGLE)


def reshape(folder):
    found = tensors(folder)
    found["model.norm.weight"] = torch.zeros(3)
    save_file(found, folder / SINGLE)


def change(**changes):
    def apply(folder):
        (folder / "config.json").write_text(json.dumps(config(folder) | changes))

    return apply


BROKEN = [
    (cut, ConfigError, "model.safetensors: required a complete safetensors file"),
    (lose, ModelError, "1 missing, such as model.layers.2.mlp.down_proj.weight"),
    (add, ModelError, "1 unknown, such as model.extra.weight"),
    (reshape, ModelError, r"model.norm.weight of .*required shape \[256\], found \[3\]"),
    (lambda f: (f / "config.json").unlink(), ConfigError, r"required a Hugging Face checkpoint \(config.json"),
    (lambda f: (f / SINGLE).unlink(), ConfigError, ", found no weights"),
    (lambda f: (f / SINGLE).rename(f / "pytorch_model.bin"), ConfigError, ", found pytorch_model.bin"),
    (lambda f: (f / "config.json").write_text("{"), ConfigError, "config.json: required a JSON object"),
    (lambda f: (f / "lora_train_meta.json").write_text("{}"), ConfigError, "required full weights, found adapters"),
    (change(quantization_config={"quant_method": "awq"}), ConfigError, "quant_method='awq'"),
    (change(model_type="nobodys"), ModelError, "required a causal language model"),
    (change(intermediate_size=640), ModelError, r"required shape \[256, 640\], found \[256, 512\]"),
]


@pytest.mark.parametrize(("harm", "error", "says"), BROKEN)
def test_what_is_no_whole_checkpoint_is_one_clear_error(copy, tmp_path, harm, error, says):
    harm(copy)
    with pytest.raises(error, match=says):
        command(copy, tmp_path / "out", "fp8", None, None, Lines())
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_a_shard_that_is_lost_is_named(qwen3, tmp_path):
    done = export(qwen3, tmp_path / "a", "bf16", shard_bytes=400_000)
    (tmp_path / "a" / done.shards[1]).unlink()
    with pytest.raises(ConfigError, match=f"{done.shards[1]}: required a complete safetensors file"):
        export(tmp_path / "a", tmp_path / "b", "fp8")


def test_what_vllm_could_not_merge_is_refused(qwen3, tmp_path):
    with pytest.raises(ConfigError, match=r"all or none of them in FP8.*--exclude q_proj --exclude k_proj"):
        export(qwen3, tmp_path / "out", "fp8", exclude=("k_proj",))
    narrow = Path(save(tmp_path / "narrow", "qwen3", steps=0, num_key_value_heads=1))
    with pytest.raises(ConfigError, match=r"k_proj: required a multiple of 128 rows.* found 64 rows"):
        export(narrow, tmp_path / "out", "fp8")
    export(narrow, tmp_path / "out", "fp8", exclude=("q_proj", "k_proj", "v_proj"))


def test_tied_embeddings_and_odd_widths(tmp_path):
    options = {"tie_word_embeddings": True, "hidden_size": 320, "intermediate_size": 1000, "num_key_value_heads": 1}
    odd = Path(save(tmp_path / "odd", "llama", steps=0, **options))
    done = export(odd, tmp_path / "out", "fp8", exclude=("self_attn", "gate_proj", "up_proj"))
    after = tensors(tmp_path / "out")
    assert "lm_head.weight" not in after
    assert after[done.layers[0] + ".weight_scale_inv"].shape == (3, 8)  # down_proj: 320 x 1000


def test_another_value_on_disk_is_found(qwen3, tmp_path, monkeypatch):
    """Verification detects a shard that was written incorrectly."""
    import safetensors.torch

    def save_wrongly(held, path, **options):
        wrong = {name: value.clone() for name, value in held.items()}
        wrong["model.layers.1.mlp.up_proj.weight"].view(torch.uint8)[5, 6] ^= 1
        save_file(wrong, path, **options)

    monkeypatch.setattr(safetensors.torch, "save_file", save_wrongly)
    for format in ("bf16", "fp8"):
        with pytest.raises(
            ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight on disk: required the tensor as written"
        ):
            export(qwen3, tmp_path / "out", format)
    assert list(tmp_path.iterdir()) == []


def test_a_quantizer_that_is_off_is_found(qwen3, tmp_path, monkeypatch):
    w = torch.randn(200, 300)
    q, s = quantize_weight(w, "fp32")
    assert 25 < check_error("w", w, q, s) < 60
    s[1, 2] *= 1.01
    with pytest.raises(ModelError, match="within half a step of e4m3"):
        check_error("w", w, q, s)
    assert check_error("zeros", torch.zeros(3, 4), *quantize_weight(torch.zeros(3, 4), "pow2")) == float("inf")
    monkeypatch.setattr(module, "check_error", lambda name, *_: 30.0 if "layers.0" in name else float("nan"))
    assert set(export(qwen3, tmp_path / "out", "fp8").sqnr) == set(export(qwen3, tmp_path / "two", "fp8").layers)


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


MIXTURES = ["qwen3_moe", "olmoe", "qwen2_moe", "mixtral", "glm4_moe"]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    root = tmp_path_factory.mktemp("mixtures")
    return lambda family: root / family if (root / family).exists() else Path(save(root / family, family, steps=0))


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_keeps_its_names_and_its_fp32_buffers_in_bf16(mixture, tmp_path, family):
    export(mixture(family), tmp_path / "bf16", "bf16")
    written, before = tensors(tmp_path / "bf16"), tensors(mixture(family))
    assert set(written) == set(before) and all(torch.equal(written[name], before[name]) for name in before)
    biases = [name for name in written if name.endswith("e_score_correction_bias")]
    assert len(biases) == (2 if family == "glm4_moe" else 0) and all(written[name].dtype == torch.float32 for name in biases)


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_in_fp8_as_transformers_reads_it(mixture, tmp_path, family):
    """Each expert's matrices by the names of the family's checkpoints, quantized by the trainer's quantizer."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    folder, exclude = mixture(family), ("layers.1.mlp.experts", "o_proj")
    done = export(folder, tmp_path / "out", "fp8", exclude=exclude)
    before, after = tensors(folder), tensors(tmp_path / "out")
    record = FAMILIES[family]
    matrices = {name for name in before if ".experts." in name}
    quantized = {name for name in matrices if ".layers.1." not in name}
    assert len(matrices) == (2 if family == "glm4_moe" else 3) * 8 * 3
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


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "glm4_moe"])
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
