"""Record the run's settings and ``invariant_scale`` in OpenRLHF's DeepSpeed checkpoints, and compare them on resuming."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

from jetrl_patch import session
from jetrl_patch.config import Config
from jetrl_patch.errors import JetrlError
from jetrl_patch.fp8.scaling import RECORD, take_over
from jetrl_patch.session import while_active
from jetrl_patch.trainer import record
from jetrl_patch.trainer.rules import raised

__all__ = ["compare_scales", "load_ckpt", "problems", "save_ckpt", "save_scales"]


# ---- ``invariant_scale`` -------------------------------------------------------------------------
# DeepSpeed's checkpoints hold no configuration, so the factor goes into the client state that OpenRLHF saves with them.

@while_active
def save_scales(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``DeepspeedStrategy.save_ckpt``: record the model's factor."""
    signature = inspect.signature(original)

    def save_ckpt(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        recorded = _recorded(bound.arguments["model"])
        if recorded is not None:
            states = bound.arguments.get("client_state") or {}
            bound.arguments["client_state"] = {**states, RECORD: recorded}
        return original(*bound.args, **bound.kwargs)

    return save_ckpt


@while_active
def compare_scales(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``DeepspeedStrategy.load_ckpt``: compare the factors. Critics are never scaled and have no record."""

    def load_ckpt(self: Any, model: Any, load_dir: Any, *args: Any, **kwargs: Any) -> Any:
        path, states = original(self, model, load_dir, *args, **kwargs)
        if path is not None:
            config = getattr(model.module, "config", None)
            if config is not None:
                take_over(config, states.pop(RECORD, None), str(load_dir))
        return path, states

    return load_ckpt


def _recorded(model: Any) -> Any:
    return getattr(getattr(model.module, "config", None), RECORD, None)


# ---- ``jetrl.json``: the run's settings ----------------------------------------------------------

def problems(select: Callable[[str], Any], config: Config) -> Iterator[JetrlError]:
    """Yield the error of the checkpoint that OpenRLHF would resume from, in the driver, before an actor starts.

    If the driver does not see the folder, the actors check it.
    """
    if select("ckpt.load_enable"):
        root = os.path.join(select("ckpt.path"), "_actor")
        folder = os.path.join(root, _latest(root) or "no checkpoint")
        if os.path.isdir(folder):
            yield from raised(lambda: record.check(folder, config, elsewhere="--ckpt.path"))


@while_active
def save_ckpt(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``DeepspeedStrategy.save_ckpt``: rank 0 writes ``jetrl.json`` into the tag's folder.

    It does so after OpenRLHF has deleted old checkpoints, which would include a new folder without a metric, and before DeepSpeed
    marks the checkpoint as the latest. So a run killed in between leaves no checkpoint without a record.
    """
    signature = inspect.signature(original)

    def save_ckpt(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        if not self.is_rank_0():
            return original(self, *args, **kwargs)
        model, save = given["model"], given["model"].save_checkpoint

        def save_checkpoint(save_dir: str, tag: str | None = None, **more: Any) -> Any:
            folder = os.path.join(save_dir, tag or f"global_step{model.global_steps}")  # DeepSpeed's own tag
            record.write(folder, session.active_config())
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
            record.check(folder, session.active_config(), optimizer=with_states)
        return original(self, *args, **kwargs)

    return load_ckpt


def _latest(folder: str) -> str:
    """Return the tag that DeepSpeed loads by default, or an empty string."""
    file = os.path.join(folder, "latest")
    if not os.path.isfile(file):
        return ""
    with open(file) as text:
        return text.read().strip()
