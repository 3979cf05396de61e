"""TRL's adapter. Importing it is cheap: the modules behind it wait until they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from jetrl_patch._versions import SUPPORTED
from jetrl_patch.registry import Adapter, Config, Patch


class TrlAdapter(Adapter):
    """TRL 1.11 to 1.16: ``GRPOTrainer`` and ``RLOOTrainer`` with both ``vllm_mode``, one or several processes."""

    name: ClassVar[str] = "trl"
    order: ClassVar[int] = 6
    packages: ClassVar[tuple[str, ...]] = ("trl",)
    trainers: ClassVar[str] = f"GRPOTrainer and RLOOTrainer of trl{SUPPORTED['trl'][0]}"
    requires: ClassVar[tuple[str, ...]] = ("torch", "transformers", "vllm")  # not trl: others import it, whatever its version

    def patches(self, config: Config) -> Sequence[Patch]:
        from jetrl_patch.adapters.trl import patches

        return patches.patches(config)

    def trains(self, trainer: Any) -> bool:
        from jetrl_patch.adapters.trl.state import kind_of, run_of

        return bool(kind_of(trainer)) and bool(run_of(trainer))

    def on_undo(self) -> None:
        """Drop the converted models' records."""
        from jetrl_patch.adapters.trl import state

        state.reset()


ADAPTER = TrlAdapter()
