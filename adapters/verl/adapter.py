"""verl's adapter. Importing it is cheap: the modules behind it wait until they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from jetrl_patch.registry import Adapter, Config, Journal, Launch, Merger, OnImport, Patch


class VerlAdapter(Adapter):
    """verl 0.9: trainers V0 and V1, FSDP1, FSDP2, Megatron and VeOmni, asynchronous vLLM servers."""

    name: ClassVar[str] = "verl"
    trainers: ClassVar[str] = "verl"
    order: ClassVar[int] = 4
    packages: ClassVar[tuple[str, ...]] = ("verl", "ray")
    has_section: ClassVar[bool] = True
    requires: ClassVar[tuple[str, ...]] = ("torch", "transformers", "vllm", "verl", "ray")

    def patches(self, config: Config) -> Sequence[Patch]:
        from jetrl_patch.adapters.verl import patches

        return patches.patches(config)

    def hooks(self, config: Config) -> Sequence[OnImport]:
        from jetrl_patch.adapters.verl import patches

        return patches.hooks(config)

    def launches(self) -> Launch:
        from jetrl_patch.adapters.verl import launch

        return launch

    def merger(self) -> Merger:
        from jetrl_patch.adapters.verl import launch

        return launch

    def check(self, config: Config) -> None:
        """Raise for a program of verl that is not supported, or a scale format that TransformerEngine would not use."""
        from jetrl_patch.adapters.verl import megatron, settings

        problem = settings.program_problem(settings.own_program())
        if problem is not None:
            raise problem
        megatron.check_scales(config)

    def on_apply(self, config: Config, journal: Journal) -> None:
        """Set TransformerEngine's scale format for this process and its children."""
        from jetrl_patch.adapters.verl import megatron

        megatron.export_scales(config, journal)

    def on_undo(self) -> None:
        from jetrl_patch.adapters.verl import state

        state.reset()


ADAPTER = VerlAdapter()
