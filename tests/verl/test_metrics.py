"""Metrics in verl's log, and the check that every worker is patched."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from jetrl_patch import session
from jetrl_patch.adapters.verl import metrics, old_log_probs, state, sync
from jetrl_patch.config import Config
from jetrl_patch.errors import AuditError, ConfigError, ConflictError, NotPatchedError
from jetrl_patch.measure import mismatch

pytestmark = pytest.mark.usefixtures("exact_driver")

CURRENT = torch.ones(2, dtype=torch.bool)
LOGP = -torch.rand(2, 5)
REPORT = {
    "pid": 1, "sync_seconds": 0.5, "sync_bytes": 10, "sync_bytes_bf16": 20, "sync_bytes_total": 15,
    "quantized_layers": 14, "monitor": {"jetrl/scale/x": 1.5}, "lines": ["layers.0: ill"],
}  # fmt: skip


def test_a_steps_line_gets_everything_once(capsys):
    lines = []
    write = metrics.log(lambda self, data, step, backend: lines.append((dict(data), step)))
    logp = -torch.rand(2, 5)
    metrics.note_mismatch(OmegaConf.create({"algorithm": {}}), logp, logp.clone(), torch.ones(2, 5), CURRENT)
    metrics.note_sync([{"jetrl.0": REPORT}, {"jetrl.1": {**REPORT, "sync_seconds": 0.7}}])
    write(None, {"val/accuracy": 1.0}, 0)
    write(None, {"training/global_step": 1, "actor/loss": 2.0}, 1)
    write(None, {"training/global_step": 2}, 2)
    assert lines[0] == ({"val/accuracy": 1.0}, 0)
    first = lines[1][0]
    assert first["actor/loss"] == 2.0 and first["jetrl/bit_equal_fraction"] == 1.0 and first["jetrl/tokens"] == 10
    assert first["jetrl/sync_seconds"] == 0.7 and first["jetrl/sync_bytes"] == 10
    assert first["jetrl/scale/x"] == 1.5
    ill, nothing = capsys.readouterr().out.splitlines()
    assert ill == "jetrl_patch: WARNING: layers.0: ill" and "this step compared no log-prob" in nothing
    assert first["jetrl/sync_bytes_bf16"] == 20 and first["jetrl/quantized_layers"] == 14
    assert lines[2][0].pop("jetrl/tokens") == 0 and lines[2][0].pop("training/global_step") == 2
    assert lines[2][0] and all(math.isnan(value) for value in lines[2][0].values())  # nothing of the first step


def bypassed(step):
    """Run a step of bypass mode whose losses report ``sums`` at the sync after it; return its line and what it printed."""
    parts = [(mismatch.sums(LOGP, LOGP, torch.ones(2, 5)), None)] if step else []
    state.DRIVER.current.append((CURRENT, [5, 5]))
    metrics.note_sync([{"jetrl.0": {**REPORT, "lines": [], old_log_probs.LOSS: parts}}])
    return logged({"training/global_step": 1})


def logged(data):
    lines = []
    metrics.log(lambda self, data, step, backend: lines.append(dict(data)))(None, data, 1)
    return lines[0]


def test_a_step_whose_losses_compared_nothing_is_not_silent(capsys):
    """Bypass mode while the critic warms up. A step before the next sync is still to be compared, and no minimum skips it."""
    assert bypassed(True)["jetrl/bit_equal_fraction"] == 1.0 and not capsys.readouterr().out
    found = bypassed(False)
    assert found["jetrl/tokens"] == 0 and math.isnan(found["jetrl/bit_equal_fraction"])
    assert "this step compared no log-prob" in capsys.readouterr().out
    state.DRIVER.current.append((CURRENT, [5, 5]))
    assert "jetrl/tokens" not in logged({"training/global_step": 3}) and not capsys.readouterr().out


@pytest.mark.parametrize("on_mismatch", ["stop", "recompute"])
def test_an_inexact_step_in_exact_mode_is_not_silent(monkeypatch, caplog, on_mismatch):
    config = Config(old_log_probs="recompute", on_mismatch=on_mismatch).resolved()
    monkeypatch.setattr(session, "active_config", lambda: config)
    logp, verl_config = -torch.rand(1, 4), OmegaConf.create({"algorithm": {}})
    expected = r"log-prob of response token 0 of sample 0: required the rollout's .* \(4 of 4 tokens differ, in 1 of 1 samples\)"
    with pytest.raises(AuditError, match=expected) if on_mismatch == "stop" else contextlib.nullcontext():
        metrics.note_mismatch(verl_config, logp + 1e-3, logp, torch.ones(1, 4), CURRENT[:1])
    assert ("exact mode is not exact: log-prob of response token 0" in caplog.text) == (on_mismatch == "recompute")
    monkeypatch.setattr(session, "active_config", lambda: Config(align="linear", on_mismatch=on_mismatch).resolved())
    metrics.note_mismatch(verl_config, logp + 1e-3, logp, torch.ones(1, 4), CURRENT[:1])


@pytest.mark.parametrize("results", [[None], [{}], [{"jetrl.0": REPORT}, None]])
def test_a_training_worker_that_is_not_patched_stops_the_run(results):
    with pytest.raises(NotPatchedError, match="training worker"):
        metrics.note_sync(results)


def test_a_trainer_loop_that_is_not_patched_stops_the_run():
    with pytest.raises(NotPatchedError, match="TaskRunner"):
        sync.check_mark({})


def test_other_settings_in_the_trainer_loop_stop_the_run():
    with pytest.raises(ConflictError, match="fp8-rollout"):
        sync.check_mark(Config(precision="fp8-rollout").to_env())
    sync.check_mark(Config().resolved().to_env())


def test_a_model_built_before_the_patch_stops_the_sync():
    wrapped = sync.get_per_tensor_param(lambda self: (iter(()), None))
    with pytest.raises(NotPatchedError, match="built before"):
        wrapped(SimpleNamespace())


def test_lora_stops_the_sync():
    wrapped = sync.get_per_tensor_param(lambda self: (iter(()), {"r": 8}))
    with pytest.raises(ConflictError, match="LoRA"):
        wrapped(SimpleNamespace(_jetrl=SimpleNamespace()))


def test_bf16_is_counted_and_passed_on(monkeypatch):
    monkeypatch.setattr(session, "active_config", lambda: Config(precision="bf16"))
    source = [("a", torch.ones(3)), ("b", torch.ones(2, dtype=torch.bfloat16))]
    weights, peft = sync.get_per_tensor_param(lambda self: (iter(source), "peft"))(SimpleNamespace())
    assert [name for name, _ in weights] == ["a", "b"] and peft == "peft"
    assert state.WORKER.stats.total == 16 and state.WORKER.stats.quantized == 0


@pytest.mark.parametrize("precision", ["bf16", "fp8-rollout", "fp8-unified"])
def test_an_agent_loop_without_log_probs(precision, monkeypatch, capsys):
    """verl's V0 trainer takes such samples: there is nothing to compare, which is an error only where equality is promised."""
    old, mask = torch.zeros(2, 3), torch.ones(2, 3)
    result = (SimpleNamespace(batch={"old_log_probs": old}), 0.0)
    compute = metrics.v0_old_log_prob(lambda self, batch: result)
    trainer = SimpleNamespace(config=OmegaConf.create({"algorithm": {}}))
    config = Config(precision=precision).resolved()
    monkeypatch.setattr(session, "active_config", lambda: config)
    batch = SimpleNamespace(non_tensor_batch={}, batch={"response_mask": mask})
    if config.exact:
        with pytest.raises(ConfigError, match=r"required response_logprobs .*found none\. Return response_logprobs"):
            compute(trainer, batch)
    else:
        assert compute(trainer, batch) is result
        assert "returns no response_logprobs" in capsys.readouterr().out and not state.DRIVER.metrics
    batch.batch["rollout_log_probs"] = old
    assert compute(trainer, batch) is result
    assert state.DRIVER.metrics["jetrl/bit_equal_fraction"] == 1.0
