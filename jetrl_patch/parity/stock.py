"""Untouched installations to compare: vLLM samples and Hugging Face scores, each with its own kernels, and no patch is active."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jetrl_patch.config import Config
from jetrl_patch.config.modes import MODES
from jetrl_patch.errors import ConfigError, explain

__all__ = ["STOCK", "Stock", "chosen"]


@dataclass(frozen=True, kw_only=True)
class Stock:
    """One way in which people run both sides without the plugin.

    Attributes:
        dtype: torch's name of the dtype of both sides.
        engine: arguments of vLLM's ``LLM`` beyond those of every measurement.
        environment: variables of the process.
    """

    dtype: str = "bfloat16"
    engine: tuple[tuple[str, str], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    def config(self) -> Config:
        """Settings with this dtype, for the measurement. They are never enabled."""
        precision = next(name for name, mode in MODES.items() if mode.dtype == self.dtype and not mode.quantizes)
        return Config(precision=precision).resolved()  # type: ignore[arg-type]


#: name -> what it sets. Like verl's FP8 rollout, vLLM's online quantization scales each weight in blocks of 128.
STOCK: dict[str, Stock] = {
    **{mode.dtype: Stock(dtype=mode.dtype) for mode in MODES.values() if not mode.quantizes},
    "fp8-online": Stock(engine=(("quantization", "fp8_per_block"),)),
    "batch-invariant": Stock(environment=(("VLLM_BATCH_INVARIANT", "1"),)),
}


def chosen(names: Sequence[str] | None) -> tuple[str, ...]:
    """The ways that ``--stock`` selects: none without it, all if it names none. Raises ConfigError for an unknown name."""
    if names is None:
        return ()
    for name in names:
        if name not in STOCK:
            what, required = f"--stock {name}", f"one of {', '.join(STOCK)}"
            raise ConfigError(explain(what, required=required, found=repr(name), fix="choose one, or name none to measure all"))
    return tuple(dict.fromkeys(names)) or tuple(STOCK)
