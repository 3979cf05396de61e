"""Record the run's settings in OpenRLHF's DeepSpeed checkpoints, and compare them before a checkpoint is loaded."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

from jetrl_patch import runtime
from jetrl_patch.checkpoint import record
from jetrl_patch.config import Config
from jetrl_patch.errors import JetrlError
from jetrl_patch.gate import while_active
from jetrl_patch.trainer.rules import raised

__all__ = ["load_ckpt", "problems", "save_ckpt"]


def problems(select: Callable[[str], Any], config: Config) -> Iterator[JetrlError]:
    """Yield the error of the checkpoint that OpenRLHF would resume from, so that the driver has it before an actor starts.

    A folder that the driver does not see is left to the actors.
    """
    if select("ckpt.load_enable"):
        root = os.path.join(select("ckpt.path"), "_actor")
        folder = os.path.join(root, _latest(root) or "no checkpoint")
        if os.path.isdir(folder):
            yield from raised(lambda: record.check(folder, config, elsewhere="--ckpt.path"))


@while_active
def save_ckpt(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``DeepspeedStrategy.save_ckpt``: rank 0 writes ``jetrl.json`` into the tag's folder.

    After OpenRLHF has made room, which would remove a folder that is new and has no metric, and before DeepSpeed names the
    checkpoint as the latest: a run that is killed in between leaves no checkpoint without a record.
    """
    signature = inspect.signature(original)

    def save_ckpt(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        if not self.is_rank_0():
            return original(self, *args, **kwargs)
        model, save = given["model"], given["model"].save_checkpoint

        def save_checkpoint(save_dir: str, tag: str | None = None, **more: Any) -> Any:
            folder = os.path.join(save_dir, tag or f"global_step{model.global_steps}")  # DeepSpeed's own tag
            record.write(folder, runtime.active_config())
            return save(save_dir, tag=tag, **more)

        model.save_checkpoint = save_checkpoint
        try:
            return original(self, *args, **kwargs)
        finally:
            del model.save_checkpoint

    return save_ckpt


@while_active
def load_ckpt(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``DeepspeedStrategy.load_ckpt``: compare the recorded settings with those of the run."""
    signature = inspect.signature(original)

    def load_ckpt(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        tag = given["tag"] or _latest(given["load_dir"])
        folder = os.path.join(given["load_dir"], tag) if tag else ""
        if os.path.isdir(folder):
            with_states = given["load_optimizer_states"] and not given["load_module_only"]
            record.check(folder, runtime.active_config(), optimizer=with_states)
        return original(self, *args, **kwargs)

    return load_ckpt


def _latest(folder: str) -> str:
    """Return the tag that DeepSpeed loads by default."""
    file = os.path.join(folder, "latest")
    if not os.path.isfile(file):
        return ""
    with open(file) as text:
        return text.read().strip()
