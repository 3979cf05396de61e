"""OpenRLHF's adapter. Importing it is cheap: the modules behind it wait until they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from jetrl_patch.registry import Adapter, Config, Launch, OnImport, Patch


class OpenRLHFAdapter(Adapter):
    """OpenRLHF 0.11: ``train_ppo_ray``, ZeRO-0 to 3, synchronous, asynchronous and colocated."""

    name: ClassVar[str] = "openrlhf"
    trainers: ClassVar[str] = "openrlhf"
    order: ClassVar[int] = 5
    packages: ClassVar[tuple[str, ...]] = ("openrlhf", "ray", "deepspeed")
    requires: ClassVar[tuple[str, ...]] = ("torch", "transformers", "vllm", "openrlhf", "ray")

    def patches(self, config: Config) -> Sequence[Patch]:
        from jetrl_patch.adapters.openrlhf import patches

        return patches.patches(config)

    def hooks(self, config: Config) -> Sequence[OnImport]:
        from jetrl_patch.adapters.openrlhf import patches

        return patches.HOOKS

    def launches(self) -> Launch:
        from jetrl_patch.adapters.openrlhf import launch

        return launch

    def on_undo(self) -> None:
        """Drop metrics that wait for a log line."""
        from jetrl_patch.adapters.openrlhf import state

        state.reset()


ADAPTER = OpenRLHFAdapter()
