"""verl's FSDP checkpoints: every kind of optimizer states resumes bit for bit; mismatched checkpoints are refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from jetrl_patch import session
from jetrl_patch.adapters.verl import checkpoint
from jetrl_patch.backends.quantize import quantize_weight
from jetrl_patch.cli.export import command
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError
from jetrl_patch.trainer import record
from tests.checkpoint.exported import Lines, tensors
from tests.forks import facts
from tests.models import save

SCRIPT = Path(__file__).with_name("verl_script.py")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", steps=1)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("strategy", "ranks", "states"),
    [
        ("fsdp2", 1, "8bit"),
        pytest.param("fsdp2", 2, "fp8", marks=pytest.mark.slow),
        pytest.param("fsdp", 2, "8bit", marks=pytest.mark.slow),
        pytest.param("fsdp2", 2, "fp32", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_engine_does_the_next_steps_bit_for_bit(strategy, ranks, states, model_dir, tmp_path):
    found = facts(SCRIPT, ranks, strategy, model_dir, str(tmp_path), states)
    assert found["class"] == {"fp32": "AdamW", "8bit": "AdamW8bit", "fp8": "AdamWFp8"}[states]
    share = found["kept"] / found["fp32"]
    assert share == 1 if states == "fp32" else 0.25 < share < 0.30
    settings = json.loads((tmp_path / record.FILE).read_text())["settings"]
    assert (settings["precision"], settings["align"], settings["optimizer_states"]) == ("fp8-unified", "exact", states)
    check_export(tmp_path)


def check_export(folder):
    """Merging and exporting the shards gives the bytes of the full weights; a missing shard is an error."""
    done = command(folder, folder / "out", "fp8", None, None, Lines())
    after, shards = tensors(folder / "out"), sorted(folder.glob("model_world_size_*.pt"))
    parts = [torch.load(shard, weights_only=False) for shard in shards]
    assert len(done.layers) == 21
    for layer in done.layers:
        local = [part[layer + ".weight"] for part in parts]
        if hasattr(local[0], "to_local"):
            whole = torch.cat([tensor.to_local() for tensor in local])
        else:
            whole = torch.cat([shard.tensor for tensor in local for shard in tensor.local_shards()])
        q, s = quantize_weight(whole, "pow2")
        assert torch.equal(after[layer + ".weight"].view(torch.uint8), q.view(torch.uint8)), layer
        assert torch.equal(after[layer + ".weight_scale_inv"], s)
    shards[-1].unlink()
    with pytest.raises(ConfigError, match="required shards that verl can merge"):
        command(folder, folder / "other", "fp8", None, None, Lines())
    assert not [path for path in folder.iterdir() if path.name.startswith((".", "other"))]


@pytest.fixture
def manager(monkeypatch):
    """The two wrapped methods on a manager that only records its calls, in a process with given settings."""

    def make(**settings):
        monkeypatch.setattr(session, "is_active", lambda: True)
        monkeypatch.setattr(session, "active_config", lambda: Config(**settings).resolved())
        calls = []
        own = SimpleNamespace(rank=0, should_load_optimizer=True, calls=calls)
        note = lambda kind: lambda self, path, **kw: calls.append(kind)  # noqa: E731
        own.save = lambda path: checkpoint.save_checkpoint(note("save"))(own, path, global_step=1)
        own.load = lambda path: checkpoint.load_checkpoint(note("load"))(own, path, del_local_after_load=False)
        return own

    return make


def test_the_wrapped_manager_writes_and_compares(manager, tmp_path):
    folder = tmp_path / "global_step_2" / "actor"
    first = manager(precision="fp8-unified")
    first.save(folder)
    assert record.read(folder) == Config(precision="fp8-unified").resolved()
    first.load(folder)
    assert first.calls == ["save", "load"]
    other = manager(precision="bf16")
    with pytest.raises(ConfigError, match="precision='bf16', found precision='fp8-unified'"):
        other.load(folder)
    assert other.calls == []
    meant = manager(precision="bf16", resume_any=True)
    meant.load(folder)
    assert meant.calls == ["load"]


def test_other_ranks_write_nothing_and_states_that_are_not_loaded_do_not_matter(manager, tmp_path):
    second = manager(precision="fp8-unified", optimizer_states="8bit")
    second.rank = 1
    second.save(tmp_path / "a")
    assert not (tmp_path / "a" / record.FILE).exists()
    record.write(tmp_path / "b", Config(precision="fp8-unified"))
    with pytest.raises(ConfigError, match="optimizer_states='8bit', found 'fp32'"):
        second.load(tmp_path / "b")
    second.should_load_optimizer = False
    second.load(tmp_path / "b")


def test_nothing_to_save_or_load_is_left_to_verl(manager):
    own = manager(precision="bf16")
    own.save(None)
    own.load(None)
    assert own.calls == ["save", "load"]
