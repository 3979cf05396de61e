"""Real runs of verl and OpenRLHF, stopped and resumed: the next steps are the same, bit for bit.

The frameworks do not restore the rollout engine's random generator. verl and OpenRLHF start vLLM with the same seed again, so
a resumed run samples other responses than an uninterrupted one. A hook therefore seeds each sample (``tests/verl/seeded.py``);
everything that follows from the samples must then be equal.
"""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree

from jetrl_patch.backends.quantize import quantize_weight
from jetrl_patch.cli.export import command
from jetrl_patch.config import Config
from jetrl_patch.trainer import record
from tests.checkpoint.exported import Lines, tensors
from tests.openrlhf.run_openrlhf import arguments
from tests.openrlhf.run_openrlhf import make_task as make_openrlhf_task
from tests.process_run import ProcessRun
from tests.verl.run_verl import Run
from tests.verl.seeded import make_seeded_task

TIMEOUT = 500
#: metrics of a step that do not depend on samples and weights alone
CLOCKS = ("perf/", "timing", "seconds", "jetrl/sync_seconds", "memory", "training/epoch")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_seeded_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def whole(task, tmp_path_factory):
    """The checkpoints and the log of an uninterrupted run of four steps."""
    folder = tmp_path_factory.mktemp("whole")
    run = verl(task, f"trainer.default_local_dir={folder}")
    assert run.wait(TIMEOUT) == 0, run.failure
    (folder / "log.txt").write_text(run.text)
    return folder


def verl(task: Path, *extra: str, steps: int = 4, **environ: str) -> Run:
    environ = {
        "JETRL_PRECISION": "fp8-unified",
        "JETRL_OPTIMIZER_STATES": "8bit",
        "PYTHONPATH": str(task / "hook"),
        **environ,
    }
    return Run(task, "trainer.use_v1=False", "trainer.save_freq=2", *extra, steps=steps, environ=environ)


def figures(text: str) -> dict[int, dict[str, str]]:
    """Step -> every metric of its line, as printed."""
    found = {}
    for line in text.splitlines():
        if "training/global_step:" in line:
            pairs = dict(re.findall(r"([\w/@-]+):(\S+)", line[line.index("step:") :]))
            found[int(pairs["training/global_step"])] = {
                name: value for name, value in pairs.items() if not any(clock in name for clock in CLOCKS)
            }
    return found


def shards(folder: Path, ranks: int = 1) -> list[torch.Tensor]:
    """What each rank holds of the weights and optimizer states of a checkpoint."""
    found = []
    for kind, rank in itertools.product(("model", "optim"), range(ranks)):
        content = torch.load(folder / f"{kind}_world_size_{ranks}_rank_{rank}.pt", weights_only=False)
        found += [t for t in pytree.tree_leaves(content) if isinstance(t, torch.Tensor)]
    return [part for tensor in found for part in _local(tensor)]


def _local(tensor: torch.Tensor) -> list[torch.Tensor]:
    if hasattr(tensor, "local_shards"):  # of FSDP1
        return [shard.tensor for shard in tensor.local_shards()]
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(3 * TIMEOUT)
def test_verl_goes_on_with_the_same_next_steps(task, whole, tmp_path):
    saved = whole / "global_step_2"
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={saved}"]
    again = verl(task, f"trainer.default_local_dir={tmp_path}/again", *resume)
    assert again.wait(TIMEOUT) == 0, again.failure

    expected, found = figures((whole / "log.txt").read_text()), figures(again.text)
    assert sorted(expected) == [1, 2, 3, 4] and sorted(found) == [3, 4]
    for step in (3, 4):
        assert {"actor/pg_loss", "actor/grad_norm", "critic/rewards/mean", "jetrl/logp_abs_diff_max"} <= set(
            found[step]
        )
        differ = {n for n in expected[step] if found[step].get(n) != expected[step][n]}
        assert not differ, {n: (expected[step][n], found[step].get(n)) for n in differ}
        assert float(found[step]["jetrl/bit_equal_fraction"]) == 1.0
    ends = [shards(run / "global_step_4" / "actor") for run in (whole, tmp_path / "again")]
    assert len(ends[0]) > 100 and all(torch.equal(a, b) for a, b in zip(*map(plain, ends), strict=True))
    begun = plain(shards(saved / "actor"))
    assert not all(torch.equal(a, b) for a, b in zip(begun, plain(ends[0]), strict=True))

    # the bytes that the run would send next, computed from its checkpoint
    done = command(tmp_path / "again" / "global_step_4", tmp_path / "out", "fp8", None, None, Lines())
    content = torch.load(
        tmp_path / "again" / "global_step_4" / "actor" / "model_world_size_1_rank_0.pt", weights_only=False
    )
    after = tensors(tmp_path / "out")
    assert len(done.layers) == 21
    for layer in done.layers:
        q, s = quantize_weight(content[layer + ".weight"].to_local(), "pow2")
        assert torch.equal(after[layer + ".weight"].view(torch.uint8), q.view(torch.uint8))
        assert torch.equal(after[layer + ".weight_scale_inv"], s)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT)
def test_verl_refuses_the_checkpoint_of_another_precision(task, whole):
    saved = whole / "global_step_2"
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={saved}"]
    other = verl(task, *resume, JETRL_PRECISION="bf16")
    assert other.wait(TIMEOUT) != 0
    assert re.search(r"ConfigError: resuming .*precision='bf16', found precision='fp8-unified'", other.text)
    found = record.read(saved / "actor")
    assert found is not None and found.optimizer_states == "8bit"


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(3 * TIMEOUT)
def test_openrlhf_goes_on_from_its_checkpoint(tmp_path):
    """A run resumed with no steps left ends with the weights of the previous run, bit for bit."""
    folder = make_openrlhf_task(tmp_path)
    first = openrlhf(folder, "first", JETRL_PRECISION="fp8-unified")
    assert first.wait(TIMEOUT) == 0, first.failure
    saved = record.read(folder / "checkpoints" / "_actor" / "global_step2")
    assert saved is not None and (saved.precision, saved.optimizer_states) == ("fp8-unified", "8bit")
    again = openrlhf(folder, "again", "--ckpt.load_enable", JETRL_PRECISION="fp8-unified")
    assert again.wait(TIMEOUT) == 0, again.failure
    assert "Global step 2:" in first.text and "Global step" not in again.text
    ends = [tensors(folder / name) for name in ("first", "again")]
    begun = tensors(folder / "model")
    assert set(ends[0]) == set(ends[1]) and all(torch.equal(ends[0][n], ends[1][n]) for n in ends[0])
    assert not all(torch.equal(ends[0][n], begun[n].to(ends[0][n].dtype)) for n in begun)
    done = command(folder / "again", tmp_path / "fp8", "fp8", None, None, Lines())
    assert len(done.layers) == 21


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(3 * TIMEOUT)
def test_openrlhf_refuses_the_checkpoint_of_another_precision(tmp_path):
    folder = make_openrlhf_task(tmp_path)
    record.write(folder / "checkpoints" / "_actor" / "global_step2", Config(optimizer_states="8bit"))
    (folder / "checkpoints" / "_actor" / "latest").write_text("global_step2")
    other = openrlhf(folder, "other", "--ckpt.load_enable", JETRL_PRECISION="bf16")
    assert other.wait(TIMEOUT) != 0
    assert re.search(r"ConfigError: resuming .*precision='bf16', found precision='fp8-unified'", other.text)


def openrlhf(folder: Path, out: str, *extra: str, **environ: str) -> ProcessRun:
    """Run two steps and save a checkpoint; the model goes to ``out``."""
    paths = [
        "--ckpt.output_dir",
        str(folder / out),
        "--ckpt.path",
        str(folder / "checkpoints"),
        "--ckpt.save_steps",
        "2",
    ]
    words = arguments(folder, *paths, *extra, steps=2, checkpoints=True)
    program = [sys.executable, "-m", "jetrl_patch.cli.main", "openrlhf", *words]
    environ = {"JETRL_OPTIMIZER_STATES": "8bit", **environ}
    return ProcessRun(folder, lambda ray: (program, {"RAY_TMPDIR": ray, "VLLM_CPU_KVCACHE_SPACE": "1"}), environ)


def plain(found: list[torch.Tensor]) -> list[torch.Tensor]:
    """The plain tensors that make up a state."""
    parts: list[torch.Tensor] = []
    for tensor in found:
        names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else []
        parts += plain([getattr(tensor, name) for name in names]) if names else [tensor.reshape(-1).view(torch.uint8)]
    return parts
