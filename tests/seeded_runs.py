"""Whole runs of verl and OpenRLHF with the same samples each time: an interrupted run can end like an undisturbed one."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.checkpoint.test_resume import plain
from tests.openrlhf import run_openrlhf
from tests.openrlhf.test_old_log_probs_runs import HOOK as SEEDED_OPENRLHF
from tests.verl import run_verl
from tests.verl.seeded import SEEDS

#: OpenRLHF shuffles a step's samples by torch's generator, which its checkpoints do not hold
SHUFFLED_OPENRLHF = """
@wrapt.when_imported("openrlhf.trainer.ray.ppo_actor")
def _(module):
    original = module.ActorPPOTrainer.ppo_train
    def ppo_train(self, *args, **kwargs):
        import torch
        torch.manual_seed(0)
        return original(self, *args, **kwargs)
    module.ActorPPOTrainer.ppo_train = ppo_train
"""
SETTINGS = {"JETRL_PRECISION": "fp8-unified", "CUDA_VISIBLE_DEVICES": ""}


class SeededRuns:
    """A framework's task in a folder, of so many steps, with a checkpoint after every ``save_every``.

    ``hook`` is a script that each process of a run loads at its start, after what seeds the samples.
    """

    def __init__(self, framework: str, folder: Path, steps: int, save_every: int, hook: str = "") -> None:
        self.framework, self.folder, self.steps, self.save_every = framework, folder, steps, save_every
        folder.mkdir(parents=True, exist_ok=True)
        # one epoch: verl that resumes from the last step of one goes on with an empty epoch (meta-pytorch/data#1437)
        {"verl": run_verl, "openrlhf": run_openrlhf}[framework].make_task(folder, prompts=4 * steps)
        seeds = {"verl": SEEDS, "openrlhf": SEEDED_OPENRLHF + SHUFFLED_OPENRLHF}[framework]
        (folder / "hook").mkdir()
        (folder / "hook" / "sitecustomize.py").write_text(seeds + hook)

    def run(self, out: Path, *extra: str, **environ: str) -> Any:
        """Start a run, or resume the one whose checkpoints are in ``out``."""
        environ = {**SETTINGS, "PYTHONPATH": f"{self.folder / 'hook'}:{os.getcwd()}", "TESTED_RUN": str(out), **environ}
        if self.framework == "verl":
            save = [f"trainer.default_local_dir={out}", f"trainer.save_freq={self.save_every}", "trainer.use_v1=False"]
            long = ["trainer.resume_mode=auto", f"trainer.total_epochs={self.steps}"]
            return run_verl.Run(self.folder, *save, *long, *extra, environ=environ, steps=self.steps)
        save = ["--ckpt.output_dir", str(out / "model"), "--ckpt.path", str(out), "--ckpt.save_steps", str(self.save_every)]
        save += ["--ckpt.max_num", str(self.steps)]
        return run_openrlhf.Run(
            self.folder, *save, "--ckpt.load_enable", *extra, environ=environ, steps=self.steps, checkpoints=True
        )

    def completed(self, out: Path) -> int:
        """The last step whose checkpoint the framework calls complete; 0 without one."""
        name = "latest_checkpointed_iteration.txt" if self.framework == "verl" else "_actor/latest"
        try:
            return int(re.sub(r"\D", "", (out / name).read_text()))
        except OSError:
            return 0

    def rewind(self, whole: Path, out: Path, step: int) -> None:
        """Copy the checkpoints of a run, as they were when it had completed ``step``."""
        verl = self.framework == "verl"
        checkpoints, names = (out, "global_step_{}") if verl else (out / "_actor", "global_step{}")
        shutil.copytree(whole, out)
        for later in range(step + 1, self.steps + 1):
            shutil.rmtree(checkpoints / names.format(later), ignore_errors=True)
        pointer = checkpoints / ("latest_checkpointed_iteration.txt" if verl else "latest")
        pointer.write_text(str(step) if verl else names.format(step))
        assert self.completed(out) == step and self.checkpoint(out, step)

    def checkpoint(self, out: Path, step: int) -> list[torch.Tensor]:
        """Weights and optimizer states after a step."""
        folder = out / (f"global_step_{step}/actor" if self.framework == "verl" else f"_actor/global_step{step}")
        found = [torch.load(file, weights_only=False) for file in sorted(folder.glob("*.pt")) if "extra" not in file.name]
        leaves = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]
        return plain([leaf.to_local() if hasattr(leaf, "to_local") else leaf for leaf in leaves])
