"""What the plugin and TRL say of combinations before anything is loaded: a process of its own, because of TRL.

Standard input is a JSON list of [plugin's settings, what the script takes]; the output is a list of [who, error]. "plugin" or
"trl" refuses it; if nobody does, both are empty. "unstable" are settings of the plugin that are others once they are completed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from jetrl_patch.adapters.trl import settings
from jetrl_patch.config import Config
from jetrl_patch.errors import JetrlError

from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer  # isort: skip

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.campaigns.combinations.draw import SCRIPTS_OWN
from tests.models import config_of
from tests.trl import CHECKPOINT

BASE: dict[str, Any] = {"use_cpu": True, "use_vllm": True, "report_to": "none", "output_dir": "out", "vllm_max_model_length": 64}


def judge(plugin: dict[str, Any], given: dict[str, Any]) -> tuple[str, str]:
    rloo = bool(given.get("rloo"))
    try:
        config = Config(**plugin)
        completed = Config(**dataclasses.asdict(config))
    except JetrlError as error:
        return "plugin", f"{type(error).__name__}: {error}"
    if completed != config:
        return "unstable", f"{config} becomes {completed}"
    options = {name: value for name, value in given.items() if name not in SCRIPTS_OWN}
    try:
        args = (RLOOConfig if rloo else GRPOConfig)(**{**BASE, **options})
    except (TypeError, ValueError) as error:
        return "trl", f"{type(error).__name__}: {error}"
    arguments = {
        "self": object.__new__(RLOOTrainer if rloo else GRPOTrainer), "args": args, "model": model(given.get("family")),
        "peft_config": given.get("lora"), "tools": [1] if given.get("tools") else None,
    }  # fmt: skip
    found = [f"{type(error).__name__}: {error}" for error in settings.problems(arguments, config)]
    return ("plugin", found[0]) if found else ("", "")


def model(family: str | None) -> str:
    """A folder with a configuration of the family; the words example's without one."""
    if family is None:
        return str(CHECKPOINT)
    if not Path(family).is_dir():
        config_of(family).save_pretrained(family)
    return str(Path(family).resolve())


if __name__ == "__main__":
    cases = json.loads(sys.stdin.read())
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        print(json.dumps([judge(*case) for case in cases]))
