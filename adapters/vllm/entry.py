"""What vLLM's entry point ``vllm.general_plugins`` calls, in the API process, in EngineCore and in every worker.

vLLM logs and skips a plugin whose *import* fails, so importing this file does nothing that can fail. It passes on
what *calling* the plugin raises, so everything that can go wrong is said from inside ``register``.
"""

__all__ = ["register"]


def register() -> None:
    """Patch this process if its environment opts in (``JETRL_*``), else do nothing. May be called many times."""
    from jetrl_patch import runtime

    if runtime.activate_from_env() and runtime.is_active():
        from jetrl_patch.adapters.vllm.adapter import ADAPTER

        ADAPTER.install()
