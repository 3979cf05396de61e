"""Add the plugin's figures to the trainer's log, and its settings to checkpoints."""

from __future__ import annotations

import os
from typing import Any

from jetrl_patch import session
from jetrl_patch.adapters.trl.state import RUNS, mode_of, run_of
from jetrl_patch.adapters.trl.support import select_of
from jetrl_patch.measure.mismatch import Applied, merge
from jetrl_patch.patching.patch import replacement
from jetrl_patch.trainer import record
from jetrl_patch.trainer.audit import step_metrics, sync_metrics
from jetrl_patch.trainer.support import marks


@replacement
def log(original: Any, self: Any, logs: dict[str, float], start_time: float | None = None) -> None:
    """Wrap a trainer's ``log``, which all ranks call: the figures since the last line go where TRL's own do."""
    from accelerate.utils import gather_object

    run, config = run_of(self), session.active_config()
    reports = gather_object([{"audit": run.audit.report(), "synced": run.synced, "corrected": run.corrected}])
    run.synced, run.corrected = [], []
    metrics: dict[str, float] = {}
    if (found := run.audit.merged(reports)) is not None:
        metrics |= step_metrics(found[0], found[1] if config.skips_old_pass else {})
        metrics |= marks(select_of(self.args), config)
    if corrected := [applied for report in reports for applied in report["corrected"]]:
        metrics |= merge(Applied, corrected).as_metrics()
    if synced := [of_sync for report in reports for of_sync in report["synced"]]:
        metrics |= sync_metrics(synced)
    metrics |= {f"jetrl/{name}": value for name, value in run.loss_scale.figures().items()}
    for name, value in metrics.items():
        self._metrics[mode_of(self)][name].append(float(value))
    original(self, logs, start_time)


@replacement
def save_checkpoint(original: Any, self: Any, model: Any, trial: Any) -> None:
    """Wrap a trainer's ``_save_checkpoint``: the settings are in the folder before the first weight is."""
    if self.args.should_save:
        folder = os.path.join(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
        record.write(folder, session.active_config())
    original(self, model, trial)


@replacement
def prepare_for_training(original: Any, self: Any, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
    """Wrap ``Trainer._prepare_for_training``: a checkpoint with other settings is an error before it is loaded."""
    if self in RUNS and resume_from_checkpoint is not None:
        config = session.active_config()
        record.check(resume_from_checkpoint, config, elsewhere="output_dir")
        saved = record.read_adapters(os.path.join(resume_from_checkpoint, "adapter_config.json"))
        record.check_adapters(str(resume_from_checkpoint), self.model, saved, config)
    return original(self, max_steps, train_dataloader, resume_from_checkpoint)
