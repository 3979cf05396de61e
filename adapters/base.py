"""The lifecycle of an adapter, the code that knows one framework.

For each adapter whose framework is installed, ``enable()`` guards the versions in ``requires``, then calls ``check``,
``patches`` and ``hooks`` (it looks for their modules but does not import them). Only when all adapters have passed does
it call ``on_apply``. ``disable()`` rolls back the journal and calls ``on_undo``.
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
        """Raise a JetrlError, such as a ConfigError, for what is sure to fail. Change nothing."""

    def patches(self, config: Config) -> Sequence[Patch]:
        """Return the attributes to replace, each when its module is imported, or at once if it is already."""
        return ()

    def hooks(self, config: Config) -> Sequence[OnImport]:
        """Return changes to a module other than replaced attributes, such as a registry entry."""
        return ()

    def services(self) -> Services:
        """Return what the adapter offers other adapters and the core. Imports the adapter's modules, not its framework."""
        return Services()

    def on_apply(self, config: Config, journal: Journal) -> None:
        """Make, through the journal, the changes that do not wait for an import."""

    def on_undo(self) -> None:
        """Drop the adapter's own state. Called after the journal is rolled back."""
