"""The ``vllm.general_plugins`` entry point, which vLLM calls in the API process, in EngineCore and in every worker.

vLLM logs and skips a plugin whose *import* fails, so importing this file does nothing that can fail. But vLLM propagates errors
from *calling* the plugin, so ``register`` does all the work.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Patch this process if its environment opts in (``JETRL_*``). Calling it again is a no-op."""
    from jetrl_patch import session

    if session.activate_from_env() and session.is_active():
        from jetrl_patch.adapters.vllm.adapter import ADAPTER

        ADAPTER.install()
