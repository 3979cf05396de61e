"""``jetrl parity``: measurements, errors and exit status."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from jetrl_patch import Config, ConfigError, JetrlError, ModelError
from jetrl_patch.cli.export import export
from jetrl_patch.cli.parity import cli
from jetrl_patch.cli.parity.run import run_mode
from jetrl_patch.measure import parity, prompts
from jetrl_patch.measure.parity import Job, check_model, choose

from .. import models, vision_models
from ..fp8.thresholds import MISMATCH

KEYS = {
    "precision",
    "align",
    "tokens",
    "logp_abs_diff_mean",
    "logp_abs_diff_max",
    "k3_kl",
    "bit_equal_fraction",
    "route_mismatch",
    "standard_error",
    "logp_mean",
}


def modes(configs: list[Config]) -> list[tuple[str, str]]:
    return [(config.precision, config.resolved_align) for config in configs]


def test_all_modes_by_default() -> None:
    assert modes(choose([], [])) == [
        ("bf16", "none"),
        ("fp8-rollout", "none"),
        ("fp8-unified", "linear"),
        ("fp8-unified", "exact"),
    ]


@pytest.mark.parametrize(
    ("precisions", "aligns", "expected"),
    [
        (["fp8-unified"], [], [("fp8-unified", "exact")]),
        ([], ["linear"], [("fp8-unified", "linear")]),
        (["bf16", "fp8-unified"], ["exact"], [("bf16", "none"), ("fp8-unified", "exact")]),
        (["bf16", "bf16"], [], [("bf16", "none")]),
    ],
)
def test_chosen_modes(precisions: list[str], aligns: list[str], expected: list[tuple[str, str]]) -> None:
    assert modes(choose(precisions, aligns)) == expected


@pytest.mark.parametrize(
    ("precisions", "aligns", "said"),
    [(["bf16"], ["exact"], "add fp8-unified"), (["fp4"], [], "fp4")],
)
def test_contradictions(precisions: list[str], aligns: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        choose(precisions, aligns)


def test_a_directory_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json in it"):
        cli.main(["--model", str(tmp_path)])
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is not valid JSON"):
        cli.main(["--model", str(tmp_path)])
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="required weights"):
        cli.main(["--model", str(tmp_path)])


def test_a_family_that_is_not_covered(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match=r'(?s)gpt2.*align="linear"'):
        check_model(str(tmp_path), choose([], []))
    check_model(str(tmp_path), choose(["bf16", "fp8-unified"], ["linear"]))


def test_prompts(tmp_path: Path) -> None:
    common: dict[str, Any] = {"vocabulary": 100, "longest": 10, "seed": 0}
    random = prompts.make_prompts(None, None, count=5, **common)
    assert random == prompts.make_prompts(None, None, count=5, **common)
    assert all(0 <= token < 100 for ids in random for token in ids)
    assert all(1 <= len(ids) <= 10 for ids in random)

    def tokenize(text: str) -> list[int]:
        return [ord(c) - 31 for c in text]

    assert len(prompts.make_prompts(None, tokenize, count=20, **common)) == 20
    file = tmp_path / "prompts"
    file.write_text("one\n\ntwo\n")
    found = prompts.make_prompts(str(file), tokenize, count=3, **common)
    assert found == [tokenize("one"), tokenize("two"), tokenize("one")]
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        prompts.make_prompts(str(file), None, count=1, **common)
    with pytest.raises(ConfigError, match="cannot be read"):
        prompts.make_prompts(str(tmp_path / "none"), tokenize, count=1, **common)
    with pytest.raises(ConfigError, match="another model's"):
        prompts.make_prompts(None, tokenize, count=1, vocabulary=9, longest=10, seed=0)
    file.write_text("\n")
    with pytest.raises(ConfigError, match="contains no prompts"):
        prompts.make_prompts(str(file), tokenize, count=1, **common)
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('"a\\nb"\n\n"c"\n')
    assert prompts.make_prompts(str(lines), lambda text: [len(text)], count=2, **common) == [[3], [1]]
    for wrong in ('["a"]', "a"):
        lines.write_text(wrong)
        with pytest.raises(ConfigError, match="required a JSON string on each line, found"):
            prompts.make_prompts(str(lines), tokenize, count=1, **common)


def test_the_standard_error_is_that_of_the_responses_means() -> None:
    samples = [parity.Sample([1], [0] * 70, [0.0] * 70), parity.Sample([1], [0] * 2, [0.0] * 2)]
    difference = torch.zeros(72)
    difference[1], difference[2], difference[70] = -4.0, 3.0, 3.0
    assert parity.standard_error(difference, samples) == pytest.approx(abs(7 / 70 - 3 / 2) / 2)
    assert parity.standard_error(difference[:70], samples[:1]) is None


def result(job: Job, **figures: Any) -> dict[str, Any]:
    """A stand-in for the result of a mode's process, since testing the exit status needs no engine."""
    found: dict[str, Any] = dict.fromkeys(KEYS, 0.0) | {"route_mismatch": None}
    found |= {"precision": job.config.precision, "align": job.config.resolved_align, "scale_format": job.config.scale_format}
    return found | {"tokens": 10, "cut_layers": [], "bit_equal_fraction": 1.0, **figures}


def test_the_exit_status_is_one_when_a_promise_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "model.safetensors").touch()
    arguments = ["--model", str(tmp_path), "--json", str(tmp_path / "out.json")]
    apart = {"bit_equal_fraction": 0.75, "logp_abs_diff_max": 0.5}

    monkeypatch.setattr(cli, "run_mode", lambda job, *_: result(job))
    assert cli.main(arguments) == 0
    monkeypatch.setattr(cli, "run_mode", lambda job, *_: result(job, **({} if job.config.exact else apart)))
    assert cli.main(arguments) == 0  # the other modes promise nothing
    assert "other experts" not in capsys.readouterr().out
    written = json.loads((tmp_path / "out.json").read_text())
    assert [(r["precision"], r["align"]) for r in written] == modes(choose([], []))
    share = {"route_mismatch": 0.0521}
    monkeypatch.setattr(cli, "run_mode", lambda job, *_: result(job, **({} if job.config.exact else share)))
    assert cli.main(arguments) == 0  # a mixture
    assert "blocks: bf16 5.210%, fp8-rollout 5.210%, fp8-unified/linear 5.210%\n" in capsys.readouterr().out
    monkeypatch.setattr(cli, "run_mode", lambda job, *_: result(job, **(apart if job.config.exact else {})))
    assert cli.main(arguments) == 1
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "align=exact promises equal log-probs, but 25.00% of the tokens differ, by up to 0.5" in text


def test_layers_that_a_split_leaves_in_bf16_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    (tmp_path / "model.safetensors").touch()
    cut = [f"model.layers.{i}.self_attn.o_proj" for i in range(3)]
    monkeypatch.setattr(cli, "run_mode", lambda job, *_: result(job, cut_layers=cut if job.config.on_cut == "bf16" else []))
    arguments = ["--model", str(tmp_path), "--align", "exact", "--tp", "4"]
    assert cli.main([*arguments, "--on-cut", "bf16"]) == 0
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "tensor parallel size 4 cuts a block of 128 in 3 layers (o_proj; model.layers.0.self_attn.o_proj to" in text
    assert cli.main(arguments) == 0 and "cuts" not in capsys.readouterr().out


@pytest.mark.e2e
def test_an_error_of_the_child_keeps_its_kind(tmp_path: Path) -> None:
    model = models.save(tmp_path / "m", "qwen3", steps=0)
    job = Job(model=model, config=Config(), tokens=4, length=4, engine=(("enable_lora", True),))
    with pytest.raises(JetrlError, match="enable_lora") as caught:
        run_mode(job)
    assert type(caught.value).__name__ == "ConflictError"


@pytest.mark.e2e
@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The complete command, with each mode in its own process."""
    model = models.save(tmp_path / "m", "qwen3")
    file = tmp_path / "out.json"
    status = cli.main(["--model", model, "--tokens", "256", "--length", "16", "--json", str(file)])
    assert status == 0
    rows = {(r["precision"], r["align"]): r for r in json.loads(file.read_text())}
    assert all(set(row) >= KEYS and row["tokens"] >= 256 for row in rows.values())
    exact = rows["fp8-unified", "exact"]
    assert exact["bit_equal_fraction"] == 1.0
    assert exact["logp_abs_diff_max"] == exact["k3_kl"] == 0.0
    assert rows["fp8-rollout", "none"]["logp_abs_diff_mean"] > 1e-3
    said = capsys.readouterr()
    assert "100.00%" in said.out
    for mode in ("bf16, 1", "fp8-rollout, 2", "fp8-unified/linear, 3", "fp8-unified/exact, 4"):
        assert f"jetrl parity: loading the engine ({mode} of 4), 0:" in said.err


UNCACHED = ["--engine", '{"enable_prefix_caching": false, "max_num_batched_tokens": 48}']
EP = ["--engine", '{"enable_expert_parallel": true}']


def test_a_mixture_is_split_as_the_engine_splits_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    models.config_of("qwen3_moe").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    seen: list[Job] = []
    monkeypatch.setattr(cli, "run_mode", lambda job, *_: seen.append(job) or result(job))
    arguments = ["--model", str(tmp_path), "--align", "exact", "--tp", "2"]
    assert cli.main([*arguments, *EP]) == 0
    assert [(job.tp, job.ep) for job in seen] == [(2, 2)]
    by_columns = ["--engine", '{"enable_expert_parallel": false}']
    with pytest.raises(ModelError, match=r"each of 2 tensor parallel ranks holds whole blocks of 128, found 128\. Use expert"):
        cli.main([*arguments, *by_columns])
    assert [job.ep for job in seen] == [2]
    assert cli.main([*arguments, "--stock", "bfloat16"]) == 0
    assert [(job.stock, job.ep) for job in seen[1:]] == [("bfloat16", 2), (None, 2)]
    assert "enable_expert_parallel: tensor parallel size 2 would cut a block" in capsys.readouterr().out


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("more", [[], EP], ids=["TP", "EP"])
def test_the_command_with_a_split_mixture(tmp_path: Path, more: list[str]) -> None:
    family, options = models.VARIANTS["qwen3_moe-tp"]
    model, file = models.save(tmp_path / "m", family, **options), tmp_path / "out.json"
    arguments = ["--model", model, "--align", "exact", "--tp", "2", "--tokens", "256", "--length", "16", "--json", str(file)]
    assert cli.main([*arguments, *more]) == 0
    (row,) = json.loads(file.read_text())
    assert row["tokens"] >= 256 and row["bit_equal_fraction"] == 1.0


@pytest.mark.e2e
@pytest.mark.slow
def test_the_command_with_an_export_of_latent_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `jetrl export` writes in BF16 is a checkpoint that both sides load; no mode promises equality."""
    models.save(tmp_path / "m", "deepseek_v3")
    export(tmp_path / "m", tmp_path / "out", "bf16")
    arguments = ["--model", str(tmp_path / "out"), "--precision", "bf16", "fp8-rollout", "fp8-unified", "--align", "linear"]
    file = tmp_path / "out.json"
    assert cli.main([*arguments, "--tokens", "256", "--length", "16", "--json", str(file)]) == 0
    rows = {row["precision"]: row for row in json.loads(file.read_text())}
    for name, row in rows.items():
        assert row["tokens"] >= 256 and 0 < row["logp_abs_diff_mean"] < MISMATCH.get(name, MISMATCH["dense"])
        assert row["route_mismatch"] < 0.5
    assert rows["bf16"]["logp_abs_diff_mean"] < rows["fp8-unified"]["logp_abs_diff_mean"]
    assert "other experts in trainer and rollout, of all tokens and blocks" in capsys.readouterr().out


@vision_models.needs_images
@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("qwen2_5_vl", []),
        ("qwen3_vl", ["--align", "exact", "--batch", "7", *UNCACHED]),
        ("qwen3_vl_moe", ["--align", "exact", "--tp", "2"]),
        ("glm4v", ["--precision", "bf16", "fp8-rollout"]),
    ],
)
def test_the_command_with_images(tmp_path: Path, family: str, more: list[str]) -> None:
    model, file = vision_models.save(tmp_path / "m", family), tmp_path / "out.json"
    command = [sys.executable, "-m", "jetrl_patch", "parity", "--model", model, "--json", str(file), *more]
    environ = {**os.environ, **vision_models.environ(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--tokens", "256", "--length", "16"], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rows = {row["align"] if row["align"] != "none" else row["precision"]: row for row in json.loads(file.read_text())}
    assert all(row["tokens"] >= 256 for row in rows.values())
    for name, row in rows.items():
        if name == "exact":
            assert row["bit_equal_fraction"] == 1.0 and row["route_mismatch"] in (None, 0.0)
        else:  # with other pixels Qwen2.5-VL's is 0.25
            assert 0 < row["logp_abs_diff_mean"] < MISMATCH.get(row["precision"], MISMATCH["dense"])
    assert ("exact" in rows) is (family != "glm4v") and len(rows) == {"qwen2_5_vl": 4, "glm4v": 2}.get(family, 1)


def test_a_granularity_belongs_to_the_fp8_rollout() -> None:
    chosen = choose(["bf16", "fp8-rollout", "int8-rollout"], [], "channel")
    assert [config.granularity for config in chosen] == ["block", "channel", "channel"]
