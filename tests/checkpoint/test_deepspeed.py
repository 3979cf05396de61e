"""DeepSpeed checkpoints as OpenRLHF writes them: 8-bit states resume bit for bit; mismatched checkpoints are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jetrl_patch import session
from jetrl_patch.adapters.openrlhf import checkpoint
from jetrl_patch.adapters.openrlhf import settings as optimizer
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError
from jetrl_patch.trainer import record

SCRIPT = Path(__file__).with_name("deepspeed_script.py")


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "ranks", "states"), [(1, 1, "fp8"), (2, 1, "8bit"), (2, 2, "fp8"), (3, 1, "8bit"), (3, 2, "8bit")]
)
def test_a_resumed_engine_does_the_next_steps_bit_for_bit(stage, ranks, states, tmp_path):
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(SCRIPT.parents[2])}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", str(SCRIPT)]
    done = subprocess.run(
        [*command, str(stage), str(tmp_path), states], env=environ, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    facts = json.loads(next(x for x in done.stdout.splitlines() if x.startswith("FACTS ")).removeprefix("FACTS "))
    assert facts["class"] == {"8bit": "AdamW8bit", "fp8": "AdamWFp8"}[states]
    assert 0.25 < facts["kept"] / facts["fp32"] < 0.28
    settings = json.loads((tmp_path / "global_step2" / record.FILE).read_text())["settings"]
    assert (settings["precision"], settings["optimizer_states"]) == ("bf16", states)


@pytest.fixture
def active(monkeypatch):
    def settings(**fields):
        monkeypatch.setattr(session, "is_active", lambda: True)
        monkeypatch.setattr(session, "active_config", lambda: Config(**fields).resolved())

    return settings


class Engine:
    """DeepSpeed's: it writes a tag's folder, then names it."""

    global_steps = 7

    def __init__(self, killed: bool = False) -> None:
        self.killed = killed

    def save_checkpoint(self, save_dir, tag=None, client_state={}, save_latest=True, exclude_frozen_parameters=False):  # noqa: B006
        tag = tag or f"global_step{self.global_steps}"
        (save_dir / tag).mkdir(parents=True, exist_ok=True)
        if self.killed:
            raise KeyboardInterrupt
        assert record.read(save_dir / tag) is not None  # nobody can see the checkpoint without it
        (save_dir / "latest").write_text(tag)


def save_ckpt(self, model, save_dir, tag=None, max_num=3, max_mem=1000, client_state=None, save_latest=True):
    """OpenRLHF's: it removes old folders, including unknown ones, then saves."""
    assert not (save_dir / (tag or "global_step7")).exists()
    model.save_checkpoint(save_dir, tag=tag, client_state=client_state, save_latest=save_latest)


def load_ckpt(self, model, load_dir, tag=None, load_module_strict=True, load_optimizer_states=True,
              load_lr_scheduler_states=True, load_module_only=False):  # fmt: skip
    return load_dir, {}


SAVE, LOAD = checkpoint.save_ckpt(save_ckpt), checkpoint.load_ckpt(load_ckpt)


def test_the_tags_folder_carries_the_settings_and_they_are_compared(active, tmp_path):
    first = SimpleNamespace(is_rank_0=lambda: True)
    active(precision="fp8-unified")
    engine = Engine()
    SAVE(first, engine, tmp_path, "global_step2", client_state={})
    assert "save_checkpoint" not in vars(engine)
    assert record.read(tmp_path / "global_step2") == Config(precision="fp8-unified").resolved()
    assert LOAD(first, None, tmp_path) == (tmp_path, {})
    active(precision="bf16", optimizer_states="8bit", resume_any=True)
    with pytest.raises(ConfigError, match="optimizer_states='8bit', found 'fp32'"):
        LOAD(first, None, tmp_path)
    LOAD(first, None, tmp_path, load_optimizer_states=False)
    active(precision="bf16")
    for options in ({}, {"tag": "global_step2"}, {"load_module_only": True}):
        with pytest.raises(ConfigError, match="precision='bf16', found precision='fp8-unified'"):
            LOAD(first, None, tmp_path, **options)
    assert LOAD(first, None, tmp_path / "nothing") == (tmp_path / "nothing", {})


def test_only_the_first_rank_writes(active, tmp_path):
    active(precision="fp8-unified")
    with pytest.raises(AssertionError):  # the double's: there is no record
        SAVE(SimpleNamespace(is_rank_0=lambda: False), Engine(), tmp_path, "global_step1")
    assert not (tmp_path / "global_step1" / record.FILE).exists()


def test_a_save_that_is_cut_short_leaves_no_checkpoint_without_a_record(active, tmp_path):
    active(precision="fp8-unified")
    first, engine = SimpleNamespace(is_rank_0=lambda: True), Engine(killed=True)
    with pytest.raises(KeyboardInterrupt):
        SAVE(first, engine, tmp_path)
    assert not (tmp_path / "latest").exists() and record.read(tmp_path / "global_step7") is not None
    assert "save_checkpoint" not in vars(engine)


def initialize(args=None, model=None, optimizer=None, model_parameters=None, config=None):
    return optimizer, config


def test_deepspeed_gets_our_optimizer_where_openrlhf_names_adamw(active):
    torch = pytest.importorskip("torch")
    wrapped = optimizer.initialize(initialize)
    named = {
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 0.5, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.2, "torch_adam": True},
        }
    }
    active(optimizer_states="fp32")
    assert wrapped(config=named) == (None, named)
    active(optimizer_states="8bit")
    make, config = wrapped(None, None, None, config=named)
    assert config == {"zero_allow_untested_optimizer": True} and "optimizer" in named
    built = make([{"params": [torch.nn.Parameter(torch.ones(4))], "weight_decay": 0.0}])
    group = built.param_groups[0]
    assert type(built).__name__ == "AdamW8bit" and group["weight_decay"] == 0.0
    assert (group["lr"], list(group["betas"]), group["eps"]) == (0.5, [0.8, 0.9], 1e-6)
    for untouched in ({}, {"optimizer": {"type": "Muon", "params": {}}}, None):
        assert wrapped(config=untouched) == (None, untouched)
    mine = object()
    assert wrapped(optimizer=mine, config=named) == (mine, named)
