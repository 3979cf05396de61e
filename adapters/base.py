"""The adapter's lifecycle: what the runtime asks of the code that knows one framework.

``enable()`` calls, for each adapter whose framework is installed: version guard on ``requires``, ``check``, then
``patches`` and ``hooks`` (whose modules are looked for, not imported), and only when all adapters have passed,
``on_apply``. ``disable()`` rolls the journal back and calls ``on_undo``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from jetrl_patch.config import Config
from jetrl_patch.patching.journal import Journal
from jetrl_patch.patching.patch import OnImport, Patch
from jetrl_patch.services import Services

__all__ = ["Adapter", "Config", "Journal", "OnImport", "Patch", "Services"]


class Adapter:
    """One framework. ``jetrl_patch.adapters.<name>.adapter:ADAPTER`` is an instance of a subclass."""

    #: the name of the folder; `registry.ADAPTERS` says which frameworks the adapter is used for
    name: ClassVar[str] = ""
    #: distributions that must be in their supported range (keys of ``_versions.SUPPORTED``)
    requires: ClassVar[tuple[str, ...]] = ()

    def check(self, config: Config) -> None:
        """Raise (ConfigError, ModelError, VersionError) what can be known to go wrong; change nothing."""

    def patches(self, config: Config) -> Sequence[Patch]:
        """The attributes to replace, each when its module is imported (at once if it already is)."""
        return ()

    def hooks(self, config: Config) -> Sequence[OnImport]:
        """What is to be done with a module beyond replaced attributes, such as an entry in a registry."""
        return ()

    def services(self) -> Services:
        """What it offers other adapters and the core; its modules are imported here, its framework is not."""
        return Services()

    def on_apply(self, config: Config, journal: Journal) -> None:
        """Changes at extension points that do not wait for an import, through the journal."""

    def on_undo(self) -> None:
        """Called after the journal was rolled back: drop what the adapter itself remembers."""
