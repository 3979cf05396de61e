"""``jetrl doctor``'s estimate of memory: the formulas of docs/memory.md, with the sharding that a command names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jetrl_patch import registry
from jetrl_patch.cli.doctor import memory
from jetrl_patch.cli.main import app
from jetrl_patch.config import Config
from jetrl_patch.config.launches import Storage
from tests.models import build, config_of

UNIFIED, BF16 = Config(align="linear"), Config(precision="bf16")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    config_of("qwen3").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def counts() -> tuple[int, int, int]:
    """Parameters in all, of the linears in blocks, and values of the KV cache per token."""
    built = build("qwen3")
    config = built.config
    linears = sum(p.numel() for name, p in built.named_parameters() if ".layers." in name and p.dim() == 2)
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return sum(p.numel() for p in built.parameters()), linears, kv


def verl(model: Path, *extra: str) -> list[str]:
    return [f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.rollout.name=vllm", *extra]


def rows(framework: str, arguments: list[str], config: Config) -> dict[tuple[str, str], float | None]:
    launches = registry.launches(framework)
    settings = launches.read(arguments)
    storage = launches.storage(settings, config)
    model = memory.count(launches.model_path(settings)[0], storage, config.resolved())
    found = [] if model is None else memory.estimate(model, storage, config.resolved())
    return {(row.side, row.what): row.bytes for row in found}


def test_fsdp_splits_everything_over_its_ranks(model: Path, counts: tuple[int, int, int]) -> None:
    everything, linears, kv = counts
    tp = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
    found = rows("verl", verl(model, "trainer.n_gpus_per_node=8", tp), UNIFIED)
    assert found["trainer", "weights"] == found["trainer", "gradients"] == 4 * everything / 8
    assert found["trainer", "optimizer"] == 8 * everything / 8
    assert found["trainer", "FP8 weights held"] == 2 * linears / config_of("qwen3").num_hidden_layers
    assert found["rollout", "weights"] == pytest.approx((linears * (1 + 4 / 128**2) + 2 * (everything - linears)) / 2)
    assert found["rollout", "KV cache of one token"] == 2 * kv / 2


def test_what_the_plugins_settings_change(model: Path, counts: tuple[int, int, int]) -> None:
    everything, linears, _ = counts
    eight = verl(model, "trainer.n_gpus_per_node=8")
    assert rows("verl", eight, UNIFIED.replace(fp8_all_gather=True))["trainer", "FP8 weights held"] == linears / 8
    kept = [*eight, "actor_rollout_ref.actor.fsdp_config.reshard_after_forward=false"]
    assert rows("verl", kept, UNIFIED)["trainer", "FP8 weights held"] == 4 * linears
    assert rows("verl", verl(model, "trainer.n_gpus_per_node=1"), UNIFIED)["trainer", "FP8 weights held"] == 2 * linears
    assert rows("verl", eight, UNIFIED.replace(optimizer_states="8bit"))["trainer", "optimizer"] == 2.03 * everything / 8
    plain = rows("verl", eight, BF16)
    assert ("trainer", "FP8 weights held") not in plain and plain["rollout", "weights"] == everything  # two ranks by default


@pytest.mark.parametrize(("stage", "split"), [(0, (1, 1, 1)), (1, (1, 1, 4)), (2, (1, 4, 4)), (3, (4, 4, 4))])
def test_zero_splits_by_its_stage(stage: int, split: tuple[int, ...], counts: tuple[int, int, int], model: Path) -> None:
    arguments = [
        "--actor.model_name_or_path", str(model), "--vllm.num_engines", "1", "--reward.remote_url", "reward.py",
        "--algo.advantage.estimator", "group_norm", "--rollout.n_samples_per_prompt", "4",
        "--actor.num_gpus_per_node", "4", "--ds.zero_stage", str(stage),
    ]  # fmt: skip
    found = rows("openrlhf", arguments, BF16)
    expected = [each * counts[0] / ranks for each, ranks in zip((2, 2, 12), split, strict=True)]
    assert [found["trainer", what] for what in ("weights", "gradients", "optimizer")] == expected


def test_what_utilization_leaves_on_a_gpu(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows("verl", verl(model), UNIFIED)["rollout", "KV cache"] is None
    monkeypatch.setattr(memory, "_gpu", lambda config: 80 * 2.0**30)
    found = rows("verl", verl(model, "actor_rollout_ref.rollout.gpu_memory_utilization=0.4"), UNIFIED)
    assert found["rollout", "KV cache, at most"] == 32 * 2.0**30 - (found["rollout", "weights"] or 0)


def test_an_engine_whose_split_is_not_read_is_said(model: Path) -> None:
    storage = Storage(trainer="how megatron splits the model is not read")
    count = memory.count(model, storage, UNIFIED)
    assert count is not None
    found = memory.estimate(count, storage, UNIFIED)
    assert [row.how for row in found if row.side == "trainer"] == ["how megatron splits the model is not read"]


def test_the_table_and_the_json(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    command = ["python", "-m", "verl.trainer.main_ppo", *verl(model)]
    output = CliRunner().invoke(app, ["doctor", "--", *command]).output
    assert "an estimate" in output and memory.NOT_COUNTED in output
    found = json.loads(CliRunner().invoke(app, ["doctor", "--json", "--", *command]).stdout)["memory"]
    assert {"trainer", "rollout"} == {row["side"] for row in found}
    assert not json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)["memory"]
