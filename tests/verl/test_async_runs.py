"""Real asynchronous runs of verl: every token is equal under the weights that made it, and the metrics name their version."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.rescore_script import rescore
from tests.verl.run_verl import A, R, Run, make_task

TIMEOUT = 1200
STEPS = 10
UNIFIED = {"JETRL_PRECISION": "fp8-unified"}
SAVE = ["trainer.save_freq=1", f"{A}.checkpoint.save_contents=[model,optimizer,extra,hf_model]"]
#: the rollout has its own processes and receives weights through a checkpoint engine
APART = [
    "trainer.v1.trainer_mode=separate_async",
    f"{R}.nnodes=1",
    f"{R}.n_gpus_per_node=1",
    f"{R}.checkpoint_engine.backend=nccl",
    "trainer.v1.separate_async.parameter_sync_step=1",
    "ray_kwargs.ray_init.num_gpus=2",
]
TOGETHER = ["trainer.v1.trainer_mode=colocate_async"]
_PROGRAM = [
    "hydra.searchpath=[pkg://verl.trainer.config]",
    "actor_rollout_ref.hybrid_engine=False",
    "rollout.nnodes=1",
    "rollout.n_gpus_per_node=1",
    f"{R}.checkpoint_engine.backend=nccl",
    "ray_kwargs.ray_init.num_gpus=2",
    "++algorithm.rollout_correction.bypass_mode=False",  # so that the trainer's own log-probs are there to compare
]
ONE_STEP = _PROGRAM
#: steps of four prompts each
FULLY = [
    *_PROGRAM, "ray_kwargs.ray_init.num_cpus=32",  # trainer and rollouter ask for 10 each
    "data.train_batch_size=0", "data.gen_batch_size=1", f"rollout.total_rollout_steps={4 * STEPS}",
    f"{R}.mode=async", "async_training.staleness_threshold=0.5", "async_training.trigger_parameter_sync_step=1",
    "trainer.test_freq=1000",
]  # fmt: skip
MAIN, EXPERIMENTAL = "verl.trainer.main_ppo", "verl.experimental"
#: name -> the program and its settings
MODES = {
    "colocate_async": (MAIN, TOGETHER),
    "separate_async": (MAIN, APART),
    "one_step_off": (f"{EXPERIMENTAL}.one_step_off_policy.main_ppo", ONE_STEP),
    "fully_async": (f"{EXPERIMENTAL}.fully_async_policy.fully_async_main", FULLY),
}

#: saves the samples of each step: tokens, mask, log-probs, the version that made them, the trainer's. Partial rollouts, which
#: several versions made, are counted
DUMPER = """
import os, wrapt

@wrapt.when_imported("verl.trainer.ppo.ray_trainer")
def _(module):
    original = module.RayPPOTrainer._compute_old_log_prob
    def _compute_old_log_prob(self, batch):
        import torch
        from jetrl_patch.adapters.verl.state import DRIVER
        rows = []
        for i in range(len(batch)):
            first, last = (batch.non_tensor_batch[name][i] for name in ("min_global_steps", "max_global_steps"))
            if first != last:
                print("PARTIAL ROLLOUT", first, last, flush=True)
                continue
            row, width = batch.batch[i], batch.batch["responses"].shape[1]
            seen = row["attention_mask"].bool()
            sequence, before = row["input_ids"][seen], torch.zeros(int(seen[:-width].sum()) - 1)
            kept = seen[-width:]
            rows.append((sequence, torch.cat((before.long(), row["response_mask"][kept].long())),
                         torch.cat((before, row["rollout_log_probs"][kept].float())), int(first), int(DRIVER.version)))
        torch.save(rows, os.path.join(os.environ["SAMPLES"], f"samples-{self.global_steps}.pt"))
        return original(self, batch)
    module.RayPPOTrainer._compute_old_log_prob = _compute_old_log_prob

@wrapt.when_imported("verl.trainer.ppo.v1.trainer_base")
def _(module):
    original = module.PPOTrainer._compute_old_log_prob
    def _compute_old_log_prob(self, batch, metrics):
        import torch
        import transfer_queue
        from jetrl_patch.adapters.verl.state import DRIVER
        fields = ["prompts", "responses", "response_mask", "rollout_log_probs"]
        data = transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        rows = []
        for tag, *row in zip(batch.tags, *(data[field].unbind() for field in fields)):
            first, last = tag.get("min_global_steps"), tag.get("max_global_steps")
            if tag.get("is_padding", False):
                continue
            if first != last:
                print("PARTIAL ROLLOUT", first, last, flush=True)
                continue
            prompt, response, mask, log_probs = row
            before = torch.zeros(len(prompt) - 1)
            rows.append((torch.cat((prompt, response)), torch.cat((before.long(), mask.long())),
                         torch.cat((before, log_probs.float())), int(first), int(DRIVER.version)))
        torch.save(rows, os.path.join(os.environ["SAMPLES"], f"samples-{self.global_steps}.pt"))
        return original(self, batch, metrics)
    module.PPOTrainer._compute_old_log_prob = _compute_old_log_prob
"""

#: writes a digest of the policy's weights when an update of it begins and when it ends
CHAIN = """
@wrapt.when_imported("verl.workers.engine_workers")
def _(module):
    import functools
    original = module.ActorRolloutRefWorker.update_actor
    def digest(self):
        from jetrl_patch.sync.digest import add, digest
        return add(*(digest(p._local_tensor) for p in self.actor.engine.module.parameters()))
    @functools.wraps(original)
    def update_actor(self, data):
        before = digest(self)
        result = original(self, data)
        with open(os.path.join(os.environ["SAMPLES"], "chain.txt"), "a") as out:
            print(before, digest(self), file=out)
        return result
    module.ActorRolloutRefWorker.update_actor = update_actor
"""

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT)]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = make_task(tmp_path_factory.mktemp("task"), fill=True)
    (folder / "hook").mkdir()
    (folder / "hook" / "sitecustomize.py").write_text(DUMPER + CHAIN)
    return folder


def run(task: Path, out: Path, *extra: str, steps: int = STEPS, **options: str) -> Run:
    environ = {**UNIFIED, "PYTHONPATH": str(task / "hook"), "SAMPLES": str(out)}
    found = Run(task, f"trainer.default_local_dir={out}", *SAVE, *extra, environ=environ, steps=steps, **options)
    assert found.wait(TIMEOUT) == 0, found.failure
    return found


@pytest.mark.parametrize("mode", MODES)
def test_samples_are_equal_under_the_version_that_made_them(task, tmp_path, mode):
    program, extra = MODES[mode]
    steps = run(task, tmp_path, *extra, program=program).metrics()
    checkpoints = tmp_path / "global_step_{v}" / "actor" / "huggingface"
    initial = 1 if mode == "one_step_off" else 0  # it syncs at the beginning of step 1, before there is an update
    tokens, equal, versions, late = rescore(tmp_path, initial, task / "model", str(checkpoints))
    print(f"{mode}: {equal} of {tokens} tokens equal, {versions} versions, {late} samples older than the trainer")
    assert equal == tokens >= 1000 and versions >= 4 and late > 0
    assert len(steps) >= STEPS - 2  # the fully asynchronous trainer logs a step in the line of the next
    for step in steps:
        assert step.get("jetrl/bit_equal_fraction_current", 1.0) == 1.0
        assert step["jetrl/sync_bytes"] > 0
    stale = [step["jetrl/stale_fraction"] for step in steps if "jetrl/stale_fraction" in step]  # which a line may be ahead of
    assert len(stale) >= STEPS - 3 and all(0.0 <= share <= 1.0 for share in stale) and any(stale)


#: name -> the program, its settings for this many updates between two syncs, and all updates
CYCLES = {
    "separate_async": lambda n: (
        MAIN,
        [
            *APART, f"trainer.v1.separate_async.parameter_sync_step={n}", f"data.train_batch_size={2 * n}",
            f"{A}.ppo_mini_batch_size=2",
        ],
        3 * n,
    ),
    "fully_async": lambda n: (
        MODES["fully_async"][0],
        [*FULLY, f"async_training.trigger_parameter_sync_step={n}", f"rollout.total_rollout_steps={4 * 3 * n}"],
        3 * n,
    ),
}  # fmt: skip
PLACES = {
    "plain": (),
    "offload": (f"{A}.fsdp_config.param_offload=True", f"{A}.fsdp_config.optimizer_offload=True"),
    "policy": (f"{A}.fsdp_config.offload_policy=True",),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("updates", [2, 4])
@pytest.mark.parametrize("mode", CYCLES)
def test_no_update_between_two_syncs_is_lost(task, tmp_path, mode, updates, place):
    """Each update begins with the bits at which the last one ended, and the old weights have the rollout's log-probs."""
    program, extra, expected = CYCLES[mode](updates)
    steps = run(task, tmp_path, *extra, *PLACES[place], program=program, steps=3).metrics()
    chain = [line.split() for line in (tmp_path / "chain.txt").read_text().splitlines()]
    print(f"{mode}, {updates} updates a sync: {len(chain)} updates, {len({before for before, _ in chain})} different weights")
    assert len(chain) == expected
    assert [before for before, _ in chain[1:]] == [after for _, after in chain[:-1]]
    assert all(before != after for before, after in chain)
    current = [step["jetrl/bit_equal_fraction_current"] for step in steps if "jetrl/bit_equal_fraction_current" in step]
    assert current and set(current) == {1.0}


def _youngest(title: str, mark: str) -> int:
    """The youngest process of this run with the title; separate rollouts start last. Its environment names the run."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            named = (place / "cmdline").read_bytes().decode(errors="replace").startswith(title)
            if named and mark.encode() in (place / "environ").read_bytes():
                found.append(int(place.name))
        except OSError:  # ended meanwhile
            continue
    return max(found)


@pytest.mark.parametrize("mode", ["separate_async", "one_step_off", "fully_async"])
@pytest.mark.parametrize("victim", ["ray::WorkerDict", "VLLM::EngineCore"], ids=["trainer", "rollout"])
def test_a_killed_process_ends_the_run_with_an_error(task, tmp_path, victim, mode):
    program, extra = MODES[mode]
    extra = [word.replace(f"total_rollout_steps={4 * STEPS}", "total_rollout_steps=800") for word in extra]
    environ = {**UNIFIED, "JETRL_SYNC_TIMEOUT": "20", "SAMPLES": str(tmp_path), "PYTHONPATH": str(task / "hook")}
    found = Run(task, f"trainer.default_local_dir={tmp_path}", *extra, environ=environ, steps=200, program=program)
    found.wait_for(lambda text: "step:2 " in text, TIMEOUT)
    os.kill(_youngest(victim, str(tmp_path)), signal.SIGKILL)
    begun = time.monotonic()
    assert found.wait(TIMEOUT) != 0
    print(f"the run ended {time.monotonic() - begun:.0f} s after its {victim} was killed")
    assert "step:200 " not in found.text and re.search(r"(ActorDiedError|EngineDeadError|SyncError|RayActorError)", found.text)
