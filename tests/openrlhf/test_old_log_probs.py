"""OpenRLHF with ``old_log_probs="rollout"``: which steps skip the policy's pass, what is compared, what a difference does."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from jetrl_patch import session
from jetrl_patch.adapters.openrlhf import logprob, metrics, state, sync
from jetrl_patch.adapters.openrlhf.adapter import ADAPTER
from jetrl_patch.adapters.openrlhf.metrics import FIRST, LAST
from jetrl_patch.adapters.openrlhf.state import DRIVER, WORKER
from jetrl_patch.config import Config
from jetrl_patch.errors import AuditError

STOP = Config(old_log_probs="rollout", audit_fraction=0.25).resolved()
GO_ON = STOP.replace(on_mismatch="recompute")
ADVANTAGE = SimpleNamespace(is_correction_level="off")


@pytest.fixture(autouse=True)
def enable(monkeypatch):
    def use(config):
        monkeypatch.setattr(session, "is_active", lambda: True)
        monkeypatch.setattr(session, "active_config", lambda: config)

    use(STOP)
    state.reset()
    DRIVER.version = 3
    yield use
    state.reset()


def samples(count=8, version=3):
    """Experiences of one row and six response positions, of which the last two do not count."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]]).bool()
    return [
        SimpleNamespace(
            sequences=torch.zeros(1, 9), action_mask=mask, rollout_log_probs=-torch.rand(1, 6, generator=generator) * mask,
            info={FIRST: torch.tensor([version]), LAST: torch.tensor([version])}, prompts=[f"prompt {i}"],
        )
        for i in range(count)
    ]  # fmt: skip


class Maker:
    """A stand-in for ``RemoteExperienceMaker``: its policy computes the rollout's log-probs, with errors in ``wrong`` samples."""

    initial_model_group = None

    def __init__(self, monkeypatch, train_batch, wrong=(), actors=1):
        monkeypatch.setattr("ray.put", lambda value: value)
        algo = SimpleNamespace(advantage=ADVANTAGE)
        self.args = SimpleNamespace(train=SimpleNamespace(batch_size=train_batch), algo=algo)
        self.actor_model_group = SimpleNamespace(_actor_handlers=[None] * actors)
        self.wrong, self.passes = wrong, []

    def _flatten_results(self, refs, duplicate_factor):
        return [found for ref in refs for found in ref]

    @logprob.dispatch_forward
    def _dispatch_forward(self, group, sync_condition, sequences):
        self.passes.append(len(sequences))
        return [[self.computed(of) for of in sequences]]

    def computed(self, experience):
        found = experience.rollout_log_probs.clone()
        if experience.prompts[0] in self.wrong:
            found.view(torch.int32)[0, 2] += 1
        return found

    @metrics.make_experience
    def make_experience(self, batch):
        refs = self._dispatch_forward(self.actor_model_group, False, sequences=batch)
        for experience, found in zip(batch, self._flatten_results(refs, 1), strict=True):
            experience.action_log_probs = found
        return batch


def step(trainer, experience, log_probs):
    """One ``training_step`` whose forward pass gives ``log_probs``; return the old log-probs that its loss sees."""

    @logprob.training_step
    def training_step(self, experience, kl_ctl):
        logprob.check_forward(log_probs)
        return experience.action_log_probs

    return training_step(trainer, experience, 0.0)


def trainer(steps):
    return SimpleNamespace(actor=SimpleNamespace(model=SimpleNamespace(global_steps=steps)))


def report(version=4, unfinished=False):
    found = {"version": version, "lines": [], "monitor": {}, "sync_seconds": 0.0, "unfinished": unfinished}
    return found | {"audit": WORKER.audit.report()}


def test_one_update_needs_no_pass_and_every_token_is_compared(monkeypatch):
    maker, batch = Maker(monkeypatch, train_batch=8), samples()
    made = maker.make_experience(batch)
    assert maker.passes == []
    WORKER.synced_at = 5
    for experience in made:
        assert torch.equal(experience.action_log_probs, experience.rollout_log_probs)
        step(trainer(5), experience, experience.rollout_log_probs.clone().requires_grad_())
    metrics.note_sync([report()])
    found = DRIVER.take()
    assert found["jetrl/audited_tokens"] == found["jetrl/tokens"] == 32
    assert found["jetrl/bit_equal_fraction"] == found["jetrl/bit_equal_fraction_current"] == 1.0
    assert found["jetrl/stale_fraction"] == found["jetrl/clipped_fraction"] == 0.0


@pytest.mark.parametrize(("actors", "computed"), [(1, 2), (3, 3)])
def test_of_several_updates_a_share_is_computed(monkeypatch, actors, computed):
    maker = Maker(monkeypatch, train_batch=4, actors=actors)
    maker.make_experience(samples())
    assert maker.passes == [computed]
    metrics.note_sync([report()])
    assert DRIVER.take()["jetrl/audited_tokens"] == 4 * computed


def test_after_a_step_that_did_not_fill_an_update_a_share_is_computed(monkeypatch):
    """Its gradients wait in DeepSpeed, so the next step's first update ends early and the rest of its samples see new weights."""
    maker = Maker(monkeypatch, train_batch=8)
    metrics.note_sync([report(), report(unfinished=True)])
    maker.make_experience(samples(version=4))
    assert maker.passes == [2]
    metrics.note_sync([report(version=5), report(version=5)])
    maker.make_experience(samples(version=5))
    assert maker.passes == [2]


@pytest.mark.parametrize(("micro", "dynamic"), [(0, False), (3, False), (4, False), (3, True)])
def test_when_an_update_is_unfinished(micro, dynamic):
    engine = SimpleNamespace(micro_steps=micro, gradient_accumulation_steps=lambda: 2)
    args = SimpleNamespace(train=SimpleNamespace(dynamic_batch_enable=dynamic))
    assert sync.is_unfinished(engine, args) is (micro == 3 and not dynamic)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("old", ["rollout", "recompute"])
def test_what_an_environment_says_at_its_own_tokens_does_not_reach_the_loss(monkeypatch, enable, value, old):
    enable(STOP.replace(old_log_probs=old))
    batch = samples()
    for found in batch:
        found.rollout_log_probs[:, 4:] = value
    made = Maker(monkeypatch, train_batch=8).make_experience(batch)
    for found in made:
        assert torch.isfinite(found.action_log_probs).all() and torch.isfinite(found.rollout_log_probs).all()
        assert not found.action_log_probs[:, 4:].any()


def step_of(maker, step, freezing_steps):
    """One ``train_step`` of the trainer loop, whose policy is not updated; return its status."""

    @metrics.train_step
    def train_step(self, samples, global_step):
        maker.make_experience(samples)
        metrics.note_sync([report()])
        return {}, global_step + 1

    args = SimpleNamespace(critic=SimpleNamespace(freezing_steps=freezing_steps))
    DRIVER.audited = trainer = SimpleNamespace(args=args)
    return train_step(trainer, samples(), step)[0]


@pytest.mark.parametrize(("step", "freezing_steps", "passes"), [(0, 1, [2]), (1, 1, [2]), (2, 1, [2]), (3, 1, []), (0, -1, [])])
def test_while_the_policy_is_frozen_a_share_is_computed(monkeypatch, step, freezing_steps, passes):
    """Steps 0 and 1 have no update that could compare, and step 2 trains on their samples too."""
    maker = Maker(monkeypatch, train_batch=8)
    found = step_of(maker, step, freezing_steps)
    assert maker.passes == passes and found["jetrl/tokens"] == 4 * sum(passes)


def test_a_step_that_compared_nothing_says_so(monkeypatch, enable):
    lines = []
    monkeypatch.setattr(metrics, "_warn", lines.append)
    enable(STOP.replace(audit_fraction=0.0))
    found = step_of(Maker(monkeypatch, train_batch=8), 0, 1)
    assert found["jetrl/tokens"] == 0 and math.isnan(found["jetrl/bit_equal_fraction"])
    (line,) = lines
    assert line.startswith("this step compared no log-prob")


def test_a_difference_in_the_share_stops_the_run_before_its_update(monkeypatch):
    maker = Maker(monkeypatch, train_batch=4, wrong=("prompt 4",))
    with pytest.raises(AuditError, match=r"response token 2 of a sample of prompt 'prompt 4': .*1 of 4 tokens differ"):
        maker.make_experience(samples())
    assert DRIVER.skipped is None


def test_a_difference_in_the_share_has_the_whole_batch_computed_from_then_on(monkeypatch, enable, caplog):
    enable(GO_ON)
    maker, batch = Maker(monkeypatch, train_batch=4, wrong=("prompt 4", "prompt 5")), samples()
    made = maker.make_experience(batch)
    assert maker.passes == [2, 8] and "prompt 4" in caplog.text
    assert all(torch.equal(of.action_log_probs, maker.computed(of)) for of in made)
    assert DRIVER.metrics["jetrl/bit_equal_fraction"] == 30 / 32
    maker.make_experience(samples())
    assert maker.passes == [2, 8, 8]


@pytest.mark.parametrize("change", ["stale", "without log-probs", "recompute"])
def test_other_steps_are_computed_as_before(monkeypatch, enable, change):
    batch = samples()
    if change == "stale":
        batch[3].info[FIRST] = torch.tensor([2])
    elif change == "without log-probs":
        batch[3].rollout_log_probs = None
    else:
        enable(STOP.replace(old_log_probs="recompute"))
    assert not logprob.may_skip(batch, lambda found: metrics._current(found, None))
    if change != "without log-probs":
        maker = Maker(monkeypatch, train_batch=8)
        maker.make_experience(batch)
        assert maker.passes == [8]


def test_the_other_models_compute_as_before(monkeypatch):
    maker, batch = Maker(monkeypatch, train_batch=8), samples()
    DRIVER.skipped = batch
    maker._dispatch_forward("reference", False, sequences=batch)
    assert maker.passes == [8]


def wrong_by_one_ulp(experience):
    found = experience.rollout_log_probs.clone()
    found.view(torch.int32)[0, 1] += 1
    return found


def test_a_difference_in_the_first_update_stops_the_run_before_its_loss():
    (experience,) = samples(1)
    experience.action_log_probs, WORKER.synced_at = experience.rollout_log_probs, 0
    with pytest.raises(AuditError, match="response token 1 of a sample of prompt 'prompt 0'"):
        step(trainer(0), experience, wrong_by_one_ulp(experience))
    assert WORKER.checked is None


def test_or_the_update_takes_what_the_pass_would_have_computed(enable, caplog):
    enable(GO_ON)
    (experience,) = samples(1)
    experience.action_log_probs, WORKER.synced_at = experience.rollout_log_probs.clone(), 0
    own = wrong_by_one_ulp(experience)
    assert torch.equal(step(trainer(0), experience, own.clone().requires_grad_()), own)
    assert "response token 1" in caplog.text
    DRIVER.corrected = {}
    metrics.note_sync([report()])
    assert DRIVER.audit.failed and DRIVER.take()["jetrl/bit_equal_fraction"] == 3 / 4
    assert not logprob.may_skip(samples(), lambda found: metrics._current(found, None))


def test_later_updates_are_not_compared():
    (experience,) = samples(1)
    experience.action_log_probs, WORKER.synced_at = experience.rollout_log_probs, 0
    step(trainer(1), experience, wrong_by_one_ulp(experience))
    assert WORKER.audit.take() is None
    logprob.check_forward(wrong_by_one_ulp(experience))  # outside a training step
    assert WORKER.audit.take() is None


def test_the_patches_are_there_only_where_they_are_needed():
    names = {"RemoteExperienceMaker._dispatch_forward", "ActorPPOTrainer.training_step"}
    assert names <= {patch.attr for patch in ADAPTER.patches(STOP)}
    assert not names & {patch.attr for patch in ADAPTER.patches(Config(old_log_probs="recompute", precision="bf16"))}
