"""The adapters by name, and the services each one offers. No other module imports an adapter.

>>> registry.models().prepare_model(model, config)
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, TypeVar

from jetrl_patch.errors import PatchError, VersionError, explain
from jetrl_patch.patching.guards import is_installed

if TYPE_CHECKING:
    from jetrl_patch.adapters.base import Adapter
    from jetrl_patch.services import Merger, Models, Platform, Rollout
    from jetrl_patch.trainer.interface import Trainer

T = TypeVar("T")

__all__ = ["ADAPTERS", "installed", "merger", "models", "platform", "resolve", "rollout", "trainer"]

#: adapter -> import names of its frameworks, at least one of which must be installed; in the order of application
ADAPTERS: dict[str, tuple[str, ...]] = {
    "transformers": ("transformers",),
    "vllm": ("vllm",),
    "cpu": ("vllm", "verl", "openrlhf"),
    "ray": ("ray",),
    "verl": ("verl",),
    "openrlhf": ("openrlhf",),
}


def installed() -> list[Adapter]:
    """The adapters whose framework is installed, in the order of application. Raises VersionError if there are none."""
    found = [resolve(name) for name, needs in ADAPTERS.items() if any(map(is_installed, needs))]
    if not found:
        frameworks = dict.fromkeys(need for needs in ADAPTERS.values() for need in needs)
        raise VersionError(
            explain(
                "enable()",
                required=f"one of {', '.join(frameworks)}",
                found="none of them installed",
                fix="install one, for instance with `pip install -e '.[verl]'` in the clone",
            )
        )
    return found


def resolve(name: str) -> Adapter:
    """The adapter of this name; its framework need not be installed. Raises PatchError if the adapter is missing."""
    try:
        importlib.import_module("jetrl_patch.adapters")
    except ModuleNotFoundError as error:
        if error.name != "jetrl_patch.adapters":
            raise
        raise PatchError(
            explain(
                "jetrl_patch.adapters",
                required="an installed jetrl_patch",
                found=f"the source folder {os.path.dirname(__file__)}, which holds no adapters",
                fix="install the clone with `pip install -e .`, or start Python from another folder",
            )
        ) from error
    path = f"jetrl_patch.adapters.{name}.adapter"
    try:
        adapter: Adapter = importlib.import_module(path).ADAPTER
    except (ModuleNotFoundError, AttributeError) as error:
        missing = getattr(error, "name", None)
        if missing not in (path, path.rpartition(".")[0], "ADAPTER"):
            raise
        raise PatchError(f"{path}:ADAPTER is missing. Reinstall jetrl_patch.") from error
    return adapter


def models() -> Models:
    """The service that computes Hugging Face models as the trainer does."""
    return _filled(resolve("transformers").services().models, "transformers")


def rollout() -> Rollout:
    """The rollout engine."""
    return _filled(resolve("vllm").services().rollout, "vllm")


def platform() -> Platform:
    """The service that tells a CPU run from others."""
    return _filled(resolve("cpu").services().platform, "cpu")


def trainer(framework: str) -> Trainer:
    """The training framework of this name: "verl" or "openrlhf"."""
    return _filled(resolve(framework).services().trainer, framework)


def merger() -> Merger:
    """The service that merges the shards of a training checkpoint (verl's)."""
    return _filled(resolve("verl").services().merger, "verl")


def _filled(service: T | None, adapter: str) -> T:
    assert service is not None, f"the adapter {adapter!r} offers no such service"
    return service
