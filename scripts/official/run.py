"""Run one accepted script of each class for real, shrunk to a CPU: ``make official SCRIPTS=DIR RUN=1``.

A class is a folder of verl's examples, or one of OpenRLHF's scripts. The results go into ``runs.json`` and onto the page.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from examples.common.recipe import Arm, environment
from examples.common.recipe import Launch as Start
from examples.common.recipe import Recipe as CommonRecipe
from examples.common.runner import RunFailedError, run_arm
from examples.openrlhf import data as openrlhf_data
from examples.openrlhf.recipe import Follower as OpenrlhfFollower
from examples.openrlhf.recipe import switches
from examples.verl import data as verl_data
from examples.verl.recipe import Follower as VerlFollower
from examples.words import CHECKPOINT
from jetrl_patch import registry
from jetrl_patch.cli.doctor.launch import recognise
from jetrl_patch.cli.report import summarize
from scripts.official import shrink
from scripts.official.judge import Judged
from scripts.official.renamed import translated

__all__ = ["choose", "run"]

SIZES = shrink.Sizes()
_ADAPTER = "actor_rollout_ref.model.lora_adapter_path"
#: the last line of a traceback
_ERROR = re.compile(r"(\w+\.)*\w*(Error|Exception): ")


@dataclass(frozen=True, kw_only=True)
class Shrunk(CommonRecipe):
    """A recipe for ``examples.common.runner``: the shrunk launch of one script."""

    judged: Judged = field()
    steps: int = SIZES.steps

    @property
    def framework(self) -> str:  # type: ignore[override]
        return self.judged.framework

    def launch(self, arm: Arm, folder: Path, temporary: Path, log: Path) -> Start:
        arguments, _ = translated(self.framework, recognise(self.judged.launch.command).arguments)
        module = registry.programs()[self.framework]
        given = self.judged.set_keys
        exports = {name: value for name, value in self.judged.launch.environ.items() if "CUDA" not in name}
        if self.framework == "verl":
            files = verl_data.write(folder / "data", self.task, 64)
            metrics = temporary / "steps.jsonl"
            words = shrink.verl(arguments, given, CHECKPOINT, files, SIZES, temporary)
            env = exports | environment(self, temporary) | arm.config("cpu").to_env()
            env |= {"VERL_FILE_LOGGER_PATH": str(metrics), "HYDRA_FULL_ERROR": "1"}
            return Start([sys.executable, "-m", module, *words], env, VerlFollower(metrics))
        files = openrlhf_data.write(folder / "data", self.task, 64, arm.seed)
        words = shrink.openrlhf(arguments, given, CHECKPOINT, files, SIZES, temporary)
        env = exports | environment(self, temporary) | {"VLLM_CPU_KVCACHE_SPACE": "1"}
        command = [sys.executable, "-m", "jetrl_patch", "run", *switches(arm), "-m", module, *words]
        return Start(command, env, OpenrlhfFollower(log))


def choose(judged: Sequence[Judged]) -> Iterator[tuple[Judged, str]]:
    """One accepted launch of each class, with the strictest mode that accepts it.

    Without Megatron, which needs GPUs, and without saved adapters, which do not fit the small model.
    """
    seen = set()
    for mode in ("exact", "linear"):
        for one in judged:
            kind = _class(one)
            if one.kind and kind not in seen and one.accepted(mode) and not (_megatron(one) or _ADAPTER in one.set_keys):
                seen.add(kind)
                yield one, mode


def _class(one: Judged) -> str:
    path = PurePosixPath(one.launch.script)
    return path.stem if one.framework == "openrlhf" else str(path.parent)


def _megatron(one: Judged) -> bool:
    return "megatron" in one.launch.script or "megatron" in str(one.set_keys.get("model_engine", ""))


def covers(one: Judged) -> str:
    """The algorithm of the script, in a few of its settings."""
    given = one.set_keys
    if one.framework == "openrlhf":
        names = ("algo.advantage.estimator", "algo.kl.estimator", "algo.advantage.is_correction_level", "ds.zero_stage")
        return ", ".join(f"{name.rpartition('.')[2]} {given[name]}" for name in names if name in given)
    names = (
        "algorithm.adv_estimator",
        "actor_rollout_ref.actor.policy_loss.loss_mode",
        "actor_rollout_ref.actor.strategy",
    )
    return ", ".join(f"{name.rpartition('.')[2]} {given[name]}" for name in names if name in given)


def cause(said: str) -> str:
    """The last line that names an error; a progress bar may follow it."""
    lines = said.splitlines()
    return ([line for line in lines if _ERROR.match(line)] or lines)[-1][:200]


def run(one: Judged, mode: str, folder: Path) -> dict[str, Any]:
    """Run one launch and return its row of the page. A run that fails has ``failure`` and no steps."""
    arm = Arm(precision="fp8-unified", align=mode)
    row = {"script": one.launch.script, "framework": one.framework, "mode": mode, "covers": covers(one)}
    place = folder / one.launch.script.replace("/", "-").removesuffix(".sh")
    place.mkdir(parents=True, exist_ok=True)
    (place / "metrics.jsonl").write_text("")
    try:
        found = run_arm(Shrunk(judged=one), arm, place, lambda step, metrics: None, lambda: None)
    except RunFailedError as error:
        print(error, file=sys.stderr)
        nothing = {"steps": 0, "tokens": 0, "bit_equal_fraction_min": 0.0, "logp_abs_diff_max": 0.0}
        return {**row, **nothing, "failure": cause(str(error))}
    figures = ("steps", "tokens", "bit_equal_fraction_min", "logp_abs_diff_max")
    return {**row, **{name: value for name, value in summarize(found).items() if name in figures}, "failure": ""}
