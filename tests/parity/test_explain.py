"""``jetrl parity --explain``: the mismatch of a stock trainer, op by op."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from jetrl_patch import Config, ConfigError, JetrlError, ModelError
from jetrl_patch.cli.parity import cli
from jetrl_patch.cli.parity.run import run_mode
from jetrl_patch.measure.parity import OPS, RESPONSE_PARTS, Job

from .. import models


@pytest.mark.e2e
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = models.save(tmp_path / "m", "qwen3")
    file, picture = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ["--model", model, "--explain", "--tokens", "256", "--length", "32", "--batch", "8"]
    assert cli.main([*arguments, "--json", str(file), "--picture", str(picture)]) == 0
    (result,) = json.loads(file.read_text())
    steps = result["steps"]
    assert [step["op"] for step in steps] == ["", *(op for op in OPS if op not in ("router", "delta net"))]
    first, last = steps[0], steps[-1]
    assert first["alone"] is None and first["mean"] > 1e-3 and first["equal"] < 0.1
    # the last trainer is the exact one; before it, something was not
    assert last["mean"] == last["max"] == 0 and last["equal"] == 1 and set(last["depth"]) == {0.0}
    before = {step["op"]: earlier for earlier, step in itertools.pairwise(steps)}
    assert before["attention"]["mean"] > 0 and before["attention"]["depth"][0] > 0
    alone = {step["op"]: step["alone"] for step in steps[1:]}
    assert min(alone["FP8 linears"], alone["attention"]) > 0
    assert alone["RoPE"] == steps[-2]["mean"] == 0  # what was taken back is exact again
    for step in steps:
        assert len(step["parts"]) == RESPONSE_PARTS and len(step["depth"]) == len(first["depth"])
        assert sum(step["parts"]) / RESPONSE_PARTS == pytest.approx(step["mean"])  # the parts of 32 tokens are equally long
    said = capsys.readouterr().out
    assert "+ attention" in said and "growth with depth" in said
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.e2e
def test_a_mixture_has_a_router(tmp_path: Path) -> None:
    model = models.save(tmp_path / "m", "qwen3_moe")
    config = Config(upstream_fixes=True).resolved()
    steps = run_mode(Job(model=model, config=config, tokens=64, length=16, batch=4, explain=True))["steps"]
    # its activation belongs to the experts, and these to the linears
    assert [step["op"] for step in steps] == ["", *(op for op in OPS if op not in ("activation", "delta net"))]
    assert steps[0]["mean"] > 0 and steps[-1]["mean"] == 0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--explain", "--precision", "bf16"], r"Drop --precision\."),
        (["--explain", "--align", "linear", "--cost"], "Drop --align, --cost"),
        (["--explain", "--stock"], "Drop --stock"),
        (["--picture", "a.png"], "Add --explain"),
    ],
)
def test_options_that_do_not_go_together(tmp_path: Path, more: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        cli.main(["--model", str(tmp_path), *more])


def test_a_family_without_exact_mode(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match=r"(?s)--explain compares trainers with an exact rollout.*gpt2.*without --explain"):
        cli.main(["--model", str(tmp_path), "--explain"])
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"^--model .*required weights"):
        cli.main(["--model", str(tmp_path), "--explain"])


def test_a_picture_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "is_installed", lambda name: name != "matplotlib")
    with pytest.raises(JetrlError, match="--picture needs matplotlib, which is not installed"):
        cli.main(["--model", str(tmp_path), "--explain", "--picture", str(tmp_path / "a.png")])
