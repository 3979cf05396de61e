"""What this adapter offers as ``jetrl_patch.registry.Rollout``."""

from jetrl_patch.adapters.vllm.arguments import argument_problems
from jetrl_patch.adapters.vllm.compat import routes_error
from jetrl_patch.adapters.vllm.engine import kv_cache_error
from jetrl_patch.adapters.vllm.exact import refuse_exact_on
from jetrl_patch.adapters.vllm.sample import sample

__all__ = ["argument_problems", "kv_cache_error", "refuse_exact_on", "routes_error", "sample"]
