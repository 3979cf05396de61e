"""Keep vLLM from serving a graph that it compiled under other settings.

vLLM keeps compiled graphs on disk and finds them by a hash of its configuration, which leaves the quantization's own settings
out (``VllmConfig.compute_hash``) and knows nothing of this plugin's. The scale format, the backend and what is fused are
constants of the graph: without this, an engine would go on computing with those of an earlier run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jetrl_patch.errors import ConflictError, explain

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from jetrl_patch.config import Config

__all__ = ["mark_settings"]

#: our key in ``additional_config``, of which vLLM hashes all
KEY = "jetrl_patch"


def mark_settings(vllm_config: VllmConfig, config: Config, backend: str, attention: str) -> None:
    """Put every setting, and what a worker has chosen on its device, among what the names of compiled graphs depend on.

    Call it in the worker before its first step, which compiles.

    Raises:
        ConflictError: ``additional_config`` is no dict, so that nothing can be added to it.
    """
    given: Any = vllm_config.additional_config
    if not isinstance(given, dict):
        raise ConflictError(
            explain(
                "vLLM additional_config with a quantized rollout",
                required="a dict, to which the settings of jetrl_patch are added",
                found=type(given).__name__,
                fix="leave it unset, or give a dict",
            )
        )
    vllm_config.additional_config = {**given, KEY: {**config.to_env(), "backend": backend, "attention": attention}}
