"""The entry point of group ``torch.backends``, which torch calls in every process at the end of ``import torch``.

It is for the programs that load no plugins, such as OpenRLHF: a ``JETRL_*`` variable in front of a command reaches all its
processes. torch made the group for device backends; it is its only hook for other packages, and a process without torch needs no
patch. torch turns an ``Exception`` into the advice to switch off the group, and the program would then go on unpatched, so a
failure raises ``PluginFailed``.
"""

from __future__ import annotations

import sys

__all__ = ["register"]


def register() -> None:
    """Patch this process if its environment opts in. Imports next to nothing if it has no ``JETRL_*`` variable.

    Raises PluginFailed with the real error as its cause.
    """
    from jetrl_patch.config import environment
    from jetrl_patch.errors import PluginFailed

    if not environment.mentioned():
        return
    if folder := environment.read_variable(environment.FOLLOW):
        from jetrl_patch.adapters.torch.followed import examine

        examine(folder)
    from jetrl_patch.patching.patch import importing, watch

    def activate(_: object) -> None:
        from jetrl_patch import session

        with PluginFailed.instead():
            session.activate_from_env()

    # a module of ours that imports torch is not complete yet, nor are those that import it; the first to begin ends last
    ours = (name for name, module in list(sys.modules.items()) if name.startswith("jetrl_patch.") and importing(module))
    unfinished = next(ours, None)
    if unfinished is None:
        activate(None)
    else:
        watch(unfinished, activate)
