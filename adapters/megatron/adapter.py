"""The adapter of Megatron-Core. It patches nothing: Megatron takes the layers of a model from its caller."""

from __future__ import annotations

from typing import ClassVar

from jetrl_patch.registry import Adapter, Parallel


class MegatronAdapter(Adapter):
    """Builds layers for the frameworks that train with Megatron-Core."""

    name: ClassVar[str] = "megatron"
    frameworks: ClassVar[tuple[str, ...]] = ("verl",)  # Megatron alone trains nothing
    order: ClassVar[int] = 3

    def parallel(self) -> Parallel:
        from jetrl_patch.adapters.megatron import spec

        return spec


ADAPTER = MegatronAdapter()
