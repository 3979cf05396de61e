"""What the adapter of a training framework provides: the counterpart of ``Installer`` in ``sync/receive.py``.

A module with these functions is a ``Trainer``; the adapter offers it in ``Services``, where mypy compares signatures.
What is the same in every framework stands in this package, and the adapter calls it:

1. settings: ``problems`` and ``complete`` judge and complete the framework's own by a table of ``rules.Rule``;
2. the driver leaves ``Config.to_env()`` in the framework's settings, every other process calls ``marks.check``;
3. model: ``prepare`` converts it before it is wrapped, through ``sync.source.convert``;
4. sync: ``guard.begin_sync``, then ``Source.stream`` over full weights, then ``report.sync_report``;
5. log: ``report.sync_metrics`` and ``mismatch.step_metrics`` into ``state.Driver``, which goes with a step's line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from jetrl_patch.config import Config
from jetrl_patch.errors import JetrlError

if TYPE_CHECKING:
    from jetrl_patch.sync.source import Source

__all__ = ["Trainer"]


class Trainer(Protocol):
    """A training framework. ``settings`` is the framework's own object, as its main function gets it."""

    def read(self, arguments: Sequence[str], /) -> Any:
        """What the framework makes of its command line. Raises ConfigError with the framework's message."""

    def asked_for(self, settings: Any, environ: Mapping[str, str], /) -> Config | None:
        """Our settings where they stand among the framework's; None where they do not."""

    def problems(self, settings: Any, config: Config, /) -> Iterator[JetrlError]:
        """Everything that cannot be kept, as the errors to raise."""

    def complete(self, settings: Any, config: Config, /) -> list[str]:
        """Write into the settings what the mode needs; gives the changes in words."""

    def model_path(self, settings: Any, /) -> tuple[str, str]:
        """Where the model is, and how the setting is called that says so."""

    def needs_flash_attn(self, settings: Any, /) -> str:
        """Which setting needs flash-attn on a GPU; empty if none does."""

    def prepare(self, model: Any, config: Config, engine: Any, /) -> Source:
        """Convert a loaded model in place, before it is wrapped, and note what a weight sync sends.

        Args:
            engine: the framework's object that holds the model.
        """
