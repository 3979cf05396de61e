"""What TRL's real classes say: JSON of the settings' names, the errors of given cases, refusals, and what ``disable()`` leaves.

Standard input is a JSON list of cases: the plugin's settings, those of ``GRPOConfig``, and arguments of ``GRPOTrainer``. An
argument "rloo" takes that trainer and its configuration instead.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import jetrl_patch
from jetrl_patch.adapters.trl import patches, settings
from jetrl_patch.config import Config
from jetrl_patch.patching.journal import raw_entry
from jetrl_patch.patching.patch import find_target

from datasets import Dataset  # isort: skip
from trl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer  # isort: skip
from trl.scripts.grpo import make_parser  # isort: skip

CHECKPOINT = str(Path(__file__).parents[2] / "examples" / "words" / "checkpoint")
BASE: dict[str, Any] = {"use_cpu": True, "use_vllm": True, "report_to": "none", "output_dir": "out"}


class Theirs(GRPOTrainer):  # type: ignore[misc]
    """A trainer that some package builds on TRL's."""


def errors(plugin: dict[str, Any], given: dict[str, Any], arguments: dict[str, Any]) -> list[str]:
    rloo = arguments.pop("rloo", False)
    args = (RLOOConfig if rloo else GRPOConfig)(**BASE)
    for name, value in given.items():
        setattr(args, name, value)  # also what only a GPU may have
    own = object.__new__(RLOOTrainer if rloo else GRPOTrainer)
    found = settings.problems({"self": own, "model": CHECKPOINT, "args": args, **arguments}, Config(**plugin))
    return [f"{type(error).__name__}: {error}" for error in found]


def recipe() -> dict[str, Any]:
    """The configuration for eight GPUs, as TRL's command line reads it: what nobody knows, and what the plugin says."""
    path = Path(__file__).parents[2] / "examples" / "trl" / "h100" / "qwen3_8b.yaml"
    here = ["--config", str(path), "--use_cpu", "true", "--bf16", "false"]
    _, args, *_, unknown = make_parser().parse_args_and_config(here, return_remaining_strings=True)
    args.bf16 = True
    given = {"self": object.__new__(GRPOTrainer), "model": CHECKPOINT, "args": args}
    found = [str(error) for error in settings.problems(given, Config(precision="fp8-unified"))]
    return {"unknown": unknown, "problems": found}


def refused(make: Any) -> str:
    try:
        make()
    except jetrl_patch.JetrlError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def entries() -> dict[str, int]:
    found = {}
    for patch in patches.of_version():
        owner, name, _ = find_target(importlib.import_module(patch.module), patch.attr)
        found[patch.target] = id(raw_entry(owner, name))
    return found


before = entries()
jetrl_patch.enable(precision="fp8-unified")
during = entries()
rewards = [lambda completions, **_: [0.0] * len(completions)]
prompts = Dataset.from_dict({"prompt": ["a"] * 8})
refusals = {
    "distillation": refused(
        lambda: DistillationTrainer(CHECKPOINT, CHECKPOINT, args=DistillationConfig(**BASE), train_dataset=prompts)
    ),
    "no config": refused(lambda: GRPOTrainer(CHECKPOINT, rewards)),
    "before": refused(lambda: object.__new__(GRPOTrainer).train()),
}
Theirs.__module__ = "swift.trainers"
refusals["swift"] = refused(lambda: Theirs(CHECKPOINT, rewards, GRPOConfig(**BASE)))
jetrl_patch.disable()
print(
    json.dumps(
        {
            "names": sorted({field.name for kind in (GRPOConfig, RLOOConfig) for field in dataclasses.fields(kind)}),
            "errors": [errors(*case) for case in json.loads(sys.stdin.read())],
            "recipe": recipe(),
            "refusals": refusals,
            "patched": sorted(target for target in before if during[target] != before[target]),
            "left": sorted(target for target, entry in entries().items() if entry != before[target]),
        }
    )
)
