"""``old_log_probs="rollout"`` in the driver: the trainer loops skip the pass, or run it for a share of the samples."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict

from jetrl_patch import session
from jetrl_patch.adapters.verl import metrics, old_log_probs, state
from jetrl_patch.adapters.verl.state import DRIVER
from jetrl_patch.config import Config
from jetrl_patch.errors import AuditError, ConfigError
from jetrl_patch.trainer.audit import Audit
from tests.verl.audited import GO_ON, STOP, nested, one_ulp_off

WIDTH = 6


@pytest.fixture
def mode(monkeypatch):
    """Settings of this process, with everything fresh."""
    state.reset()
    monkeypatch.setattr(session, "is_active", lambda: True)

    def set_mode(config: Config) -> None:
        monkeypatch.setattr(session, "active_config", lambda: config)

    set_mode(STOP)
    yield set_mode
    state.reset()


class Trainer:
    """What the adapter reads from both trainers, for a batch of 8 samples: 2 prompts in a mini-batch of ``mini``."""

    def __init__(self, mini: int = 4, epochs: int = 1, ranks: int = 1, warmup: int = 0, **rollout: Any) -> None:
        self.global_steps = 5
        self.config = OmegaConf.create(
            {
                "algorithm": {"rollout_correction": {"rollout_is": "token", "rollout_is_threshold": 2.0}},
                "trainer": {"critic_warmup": warmup},
                "actor_rollout_ref": {
                    "actor": {"ppo_mini_batch_size": mini, "ppo_epochs": epochs},
                    "rollout": {"n": 2, "log_prob_use_dynamic_bsz": False, "log_prob_micro_batch_size_per_gpu": 1} | rollout,
                },
            }
        )
        self.actor_rollout_wg = SimpleNamespace(_dispatch_info={}, _query_dispatch_info=lambda role: list(range(ranks)))


def samples(count: int = 8) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    mask = (torch.arange(WIDTH) < torch.randint(1, WIDTH + 1, (count, 1), generator=generator)).long()
    mask[0, 0] = 0
    trainer = -torch.rand(count, WIDTH, generator=generator)
    padding = torch.where(mask.bool(), 0.0, float("nan"))
    return {"response_mask": mask, "trainer": trainer, "rollout_log_probs": trainer + padding}


class V0:
    """``RayPPOTrainer._compute_old_log_prob`` over real batches, with a pass that remembers its samples."""

    def __init__(self, data: dict[str, torch.Tensor]) -> None:
        self.passes: list[list[int]] = []
        self.data = {"row": torch.arange(len(data["trainer"])), **data}

    def __call__(self, trainer: Trainer) -> tuple[Any, Any]:
        from verl.protocol import DataProto

        def original(_: Any, batch: Any) -> Any:
            self.passes.append(batch.batch["row"].tolist())
            assert batch.meta_info["global_token_num"] == [10 + row for row in self.passes[-1]]
            found = batch.batch["trainer"]
            return DataProto.from_dict({"old_log_probs": found, "entropys": torch.ones_like(found)}), 0.5

        batch = DataProto.from_dict(dict(self.data))
        batch.meta_info["global_token_num"] = [10 + row for row in range(len(self.data["row"]))]
        return metrics.v0_old_log_prob(original)(trainer, batch)


ALL = list(range(8))
REPORT = {"monitor": {}, "lines": [], "sync_seconds": 0.1}


def report(sums: Any = None, failed: bool = False) -> dict[str, Any]:
    return {"jetrl": {**REPORT, "audit": {"sums": sums, "differed": failed}}}


def compared(data: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What a worker reports after its first update over these samples."""
    audit = Audit()
    audit.compare(data["trainer"], data["rollout_log_probs"], data["response_mask"], GO_ON)
    return report(audit.take(), audit.failed)


def test_one_update_needs_no_pass_and_the_log_says_what_was_compared(mode):
    data, lines = samples(), []
    v0, trainer = V0(data), Trainer()
    write = metrics.log(lambda self, line, step, backend: lines.append(line))
    metrics.note_sync([report()])  # the first sync, before the first step
    result, mfu = v0(trainer)
    assert v0.passes == [] and mfu != mfu and result.batch["entropys"].isnan().all()
    assert torch.equal(result.batch["old_log_probs"], torch.where(data["response_mask"].bool(), data["trainer"], 0.0))
    half = [{name: value[rows] for name, value in data.items()} for rows in (slice(0, 4), slice(4, 8))]
    metrics.note_sync([compared(part) for part in half])
    verls = dict.fromkeys(old_log_probs._OF_THE_PASS, 1.0)
    write(None, {"training/global_step": 1, "actor/pg_loss": 2.0, **verls}, 1)
    write(None, {"training/global_step": 2, **verls}, 2)
    tokens = int(data["response_mask"].sum())
    assert lines[0]["jetrl/audited_tokens"] == lines[0]["jetrl/tokens"] == tokens and lines[0]["actor/pg_loss"] == 2.0
    assert lines[0]["jetrl/bit_equal_fraction"] == lines[0]["jetrl/correction_weight_min"] == 1.0
    assert lines[0]["jetrl/logp_abs_diff_max"] == 0.0 and not verls.keys() & lines[0].keys()
    assert verls.keys() <= lines[1].keys()  # of a step whose pass ran


def test_the_names_that_are_dropped_are_verls():
    import inspect

    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.utils.debug import metrics as debug

    text = inspect.getsource(RayPPOTrainer.fit) + inspect.getsource(debug.calculate_debug_metrics)
    for name in old_log_probs._OF_THE_PASS:
        assert f'"{name}"' in text


@pytest.mark.parametrize(
    ("trainer", "rows"),
    [
        (Trainer(mini=2), [0]),
        (Trainer(epochs=2), [0]),
        (Trainer(mini=2, ranks=2), [0, 4]),
        (Trainer(mini=2, ranks=2, log_prob_micro_batch_size_per_gpu=2), [0, 2, 4, 6]),
        (Trainer(mini=2, ranks=2, log_prob_micro_batch_size_per_gpu=2, log_prob_use_dynamic_bsz=True), [0, 4]),
        (Trainer(warmup=9), [0]),
    ],
    ids=["mini-batches", "epochs", "ranks", "micro-batches", "dynamic micro-batches", "no update"],
)
def test_where_another_number_of_updates_follows_a_share_goes_through_the_pass(mode, trainer, rows):
    data = samples()
    v0 = V0(data)
    metrics.note_sync([report()])
    v0(trainer)
    assert v0.passes == [rows]
    metrics.note_sync([report()])
    assert DRIVER.metrics["jetrl/audited_tokens"] == int(data["response_mask"][rows].sum())
    mode(STOP.replace(audit_fraction=0.0))
    v0(trainer)
    assert v0.passes == [rows]


def test_a_step_that_compared_nothing_says_so(mode, capsys):
    """Without an update and with ``audit_fraction=0``, nothing proves that rollout and trainer agree."""
    mode(STOP.replace(audit_fraction=0.0))
    v0, trainer, lines = V0(samples()), Trainer(warmup=9), []
    metrics.note_sync([report()])
    v0(trainer)
    metrics.note_sync([report()])
    metrics.log(lambda self, line, step, backend: lines.append(line))(None, {"training/global_step": 1}, 1)
    assert v0.passes == [] and lines[0]["jetrl/tokens"] == 0 and lines[0]["jetrl/bit_equal_fraction"] != 1.0
    assert "this step compared no log-prob" in capsys.readouterr().out


def test_a_difference_in_the_share_stops_the_run_before_its_updates(mode):
    data = samples()
    data["rollout_log_probs"] = one_ulp_off(data["rollout_log_probs"], 4, 0)
    v0, trainer = V0(data), Trainer(mini=2, ranks=2)
    metrics.note_sync([report()])
    with pytest.raises(AuditError, match="token 0 of sample 4"):
        v0(trainer)
    mode(GO_ON)
    metrics.note_sync([report()])
    DRIVER.take()
    result, mfu = v0(trainer)
    assert torch.equal(result.batch["old_log_probs"], data["trainer"]) and mfu == 0.5
    metrics.note_sync([report()])
    v0(trainer)
    assert v0.passes == [[0, 4], [0, 4], ALL, ALL]
    assert 0 < DRIVER.metrics["jetrl/bit_equal_fraction"] < 1 and "jetrl/audited_tokens" not in DRIVER.metrics


def test_a_workers_difference_brings_the_pass_back(mode, capsys):
    mode(GO_ON)
    data = samples()
    v0, trainer = V0(data), Trainer()
    metrics.note_sync([report()])
    v0(trainer)
    wrong = compared({**data, "rollout_log_probs": one_ulp_off(data["rollout_log_probs"], 3, 0)})
    metrics.note_sync([report(), wrong])
    assert v0.passes == [] and DRIVER.metrics["jetrl/bit_equal_fraction"] < 1 and "runs again" in capsys.readouterr().out
    for _ in range(2):
        v0(trainer)
        metrics.note_sync([report(wrong["jetrl"]["audit"]["sums"], failed=True)])  # the worker's figures are no longer the step's
    assert v0.passes == [ALL, ALL]
    assert "jetrl/audited_tokens" in DRIVER.take() and "runs again" not in capsys.readouterr().out


def test_without_log_probs_or_a_new_sync_the_pass_runs(mode):
    data = samples()
    v0, trainer = V0(data), Trainer()
    v0(trainer)
    metrics.note_sync([report()])
    v0(trainer)
    v0(trainer)  # the weights may have changed
    assert v0.passes == [ALL, ALL]
    del v0.data["rollout_log_probs"]
    metrics.note_sync([report()])
    with pytest.raises(ConfigError, match="response_logprobs"):
        v0(trainer)
    mode(Config().resolved())
    V0(data)(trainer)
    assert v0.passes == [ALL] * 2


class Queue:
    """The two calls of the TransferQueue that are used: rows of different lengths, by key and field."""

    def __init__(self, data: dict[str, torch.Tensor]) -> None:
        lengths = [WIDTH - row % 3 for row in range(len(data["trainer"]))]
        self.rows = {
            f"key{row}": {name: value[row, :length] for name, value in data.items()} for row, length in enumerate(lengths)
        }

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        there = [name for name in select_fields if all(name in self.rows[key] for key in keys)]
        return TensorDict({n: nested([self.rows[key][n] for key in keys]) for n in there}, batch_size=len(keys))

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: TensorDict) -> Any:
        for name in fields.keys():  # noqa: SIM118
            for key, row in zip(keys, fields[name].unbind(), strict=True):
                self.rows[key][name] = row
        return "batch"


@pytest.fixture
def v1(mode, monkeypatch):
    """``PPOTrainer._compute_old_log_prob`` over a queue of 8 samples of the last step's weights, and what it passed."""
    data = samples()
    queue, passes = Queue(data), []
    DRIVER.version = 4
    calls = SimpleNamespace(kv_batch_get=queue.kv_batch_get, kv_batch_put=queue.kv_batch_put)
    monkeypatch.setitem(sys.modules, "transfer_queue", calls)

    class Batch:
        partition_id = "train"

        def __init__(self, keys: list[str]) -> None:
            self.keys, self.tags = keys, [{"min_global_steps": 4, "max_global_steps": 4} for _ in keys]

        select_keys = staticmethod(lambda keys: Batch(keys))

    def original(_: Any, batch: Any, logged: dict[str, Any]) -> Any:
        passes.append([int(key.removeprefix("key")) for key in batch.keys])
        logged["actor/entropy"] = 1.0
        fields = {"old_log_probs": nested([queue.rows[key]["trainer"] for key in batch.keys])}
        return queue.kv_batch_put(batch.keys, "train", TensorDict(fields, batch_size=len(batch.keys)))

    batch = Batch(list(queue.rows))
    logged: dict[str, Any] = {}

    def step(trainer: Trainer) -> Any:
        return metrics.v1_old_log_prob(original)(trainer, batch, logged)

    return SimpleNamespace(step=step, batch=batch, queue=queue, passes=passes, logged=logged, data=data)


def test_v1_writes_the_rollouts_log_probs_where_the_pass_would(v1):
    metrics.note_sync([report()])
    assert v1.step(Trainer()) == "batch"
    assert v1.passes == [] and v1.logged == {}
    for row in v1.queue.rows.values():
        assert torch.equal(row["old_log_probs"], torch.where(row["response_mask"].bool(), row["trainer"], 0.0))


def test_v1_passes_a_share_and_logs_nothing_of_it(v1):
    v1.batch.tags[7] = {"is_padding": True}
    metrics.note_sync([report()])
    assert v1.step(Trainer(mini=2, ranks=2)) == "batch"
    assert v1.passes == [[0, 4]] and v1.logged == {}
    metrics.note_sync([report()])
    expected = sum(int(v1.queue.rows[f"key{row}"]["response_mask"].sum()) for row in (0, 4))
    assert DRIVER.metrics["jetrl/audited_tokens"] == expected and DRIVER.metrics["jetrl/bit_equal_fraction"] == 1.0


@pytest.mark.parametrize("rows", [8, 1])
@pytest.mark.parametrize("config", [Config(), Config(old_log_probs="recompute"), Config(align="linear")])
def test_v1_without_log_probs(v1, mode, capsys, config, rows):
    """Before, the pass ran, and then a KeyError named a field of the queue. One agent among several may return none."""
    mode(config.resolved())
    for key in list(v1.queue.rows)[:rows]:
        del v1.queue.rows[key]["rollout_log_probs"]
    metrics.note_sync([report()])
    if config.exact:
        with pytest.raises(ConfigError, match=r"required response_logprobs .*found none\. Return response_logprobs"):
            v1.step(Trainer())
        assert v1.passes == []
    else:
        assert v1.step(Trainer()) == "batch" and v1.passes == [ALL]
        assert "returns no response_logprobs" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["min_global_steps", "max_global_steps"])
@pytest.mark.parametrize("step", [3, 5, None])
def test_v1_runs_the_pass_for_samples_of_other_weights(v1, name, step):
    v1.batch.tags[6][name] = step
    metrics.note_sync([report()])
    v1.step(Trainer())
    assert v1.passes == [ALL] and v1.logged
