"""Compare the ``invariant_scale`` of a checkpoint with that of the model before a run resumes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from jetrl_patch.gate import while_active
from jetrl_patch.scaling.invariant import RECORD, take_over

__all__ = ["load_checkpoint", "recorded_in"]


@while_active
def load_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``FSDPEngine.load_checkpoint``; verl writes the model's config.json beside its shards.

    Does not cover a checkpoint that verl fetches from HDFS during the load.
    """

    def load_checkpoint(self: Any, local_path: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "_jetrl", None) is not None:
            found, recorded = recorded_in(local_path)
            if found:
                take_over(self.module.config, recorded, str(local_path))
        return original(self, local_path, *args, **kwargs)

    return load_checkpoint


def recorded_in(local_path: Any) -> tuple[bool, float | None]:
    """Return whether the checkpoint has a config.json, and the factor recorded there."""
    file = os.path.join(str(local_path or ""), "huggingface", "config.json")
    if not os.path.isfile(file):
        return False, None
    with open(file) as text:
        return True, json.load(text).get(RECORD)
