"""What this adapter offers as ``jetrl_patch.registry.Rollout``."""

from jetrl_patch.adapters.vllm.arguments import argument_problems, kv_cache_error
from jetrl_patch.adapters.vllm.compat import routes_error
from jetrl_patch.adapters.vllm.sample import sample

__all__ = ["argument_problems", "kv_cache_error", "routes_error", "sample"]
