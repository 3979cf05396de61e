"""Exports that would be wrong: one clear error each, and nothing is left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from jetrl_patch.backends.quantize import quantize_weight
from jetrl_patch.cli import export as module
from jetrl_patch.cli.checkpoint import SINGLE, check_error
from jetrl_patch.cli.export import command, export
from jetrl_patch.errors import ConfigError, ModelError
from tests.checkpoint.exported import Lines, config, tensors
from tests.models import save


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
