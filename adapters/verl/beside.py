"""vLLM engines beside the policy's: verl's reward models and distillation teachers.

They are not fed by the weight sync and keep their own weights, so they must compute as if the plugin were not there. In a
process of theirs it therefore runs with ``precision="bf16"``, which changes no engine: no quantization, no exact ops, no eager
mode. On a machine without an accelerator the CPU platform stays. The engine's own processes inherit these settings.

verl starts each engine in a ``vLLMHttpServer`` actor, and only the replica in the trainer loop knows whose engine that is. So the
replica of a reward model or teacher starts a subclass of the server that changes the settings first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jetrl_patch import runtime
from jetrl_patch.adapters.verl.paths import named
from jetrl_patch.adapters.verl.precision import FP16
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, JetrlError, explain
from jetrl_patch.gate import while_config

__all__ = ["problems", "replica_init", "stand_aside", "wanted"]

_REWARD = "reward.reward_model"
_TEACHERS = "distillation.teacher_models"


@while_config(lambda config: not config.mode.only_measures)
def replica_init(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``vLLMReplica.__init__``: the engines of reward models and teachers start in servers that stand aside."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.is_reward_model or self.is_teacher_model:
            import ray

            self.server_class = ray.remote(beside_server())

    return __init__


def beside_server() -> type:
    """Return verl's server class, with the plugin set aside before anything else. Ray pickles it by value."""
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    class BesideHttpServer(vLLMHttpServer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            from jetrl_patch.adapters.verl.beside import stand_aside

            stand_aside()
            vLLMHttpServer.__init__(self, *args, **kwargs)

    return BesideHttpServer


def stand_aside() -> None:
    """Change this process, and what it passes on to the engine's processes, to settings that touch no engine."""
    if runtime.is_active():
        config = runtime.active_config()
        runtime.disable()
        runtime.enable(Config(precision="bf16", platform=config.platform, upstream_fixes=config.fixes_upstream))


def problems(select: Callable[[str], Any], config: Config) -> Iterator[JetrlError]:
    """Yield an error for each engine in FP16: with ``precision="bf16"`` an engine must not be."""
    for path, dtype in _dtypes(select, config).items():
        if str(dtype).removeprefix("torch.") in FP16:
            yield ConfigError(explain(named(path), required="bfloat16", found=repr(dtype), fix="set it to bfloat16"))


def wanted(select: Callable[[str], Any], config: Config) -> dict[str, Any]:
    """Return the dtypes of these engines, path -> value: a teacher's is otherwise the rollout's, which FP16 changes."""
    return _dtypes(select, config)


def _dtypes(select: Callable[[str], Any], config: Config) -> dict[str, Any]:
    if config.mode.only_measures:
        return {}
    rollouts = [f"{_REWARD}.rollout"] if select(f"{_REWARD}.enable") else []
    if select("distillation.enabled"):
        rollouts += [f"{_TEACHERS}.{name}.inference" for name in select(_TEACHERS) or {}]
    return {f"{path}.dtype": select(f"{path}.dtype") for path in rollouts}
