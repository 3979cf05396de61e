"""vLLM engines beside the policy's: verl's reward models and distillation teachers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

from jetrl_patch import session
from jetrl_patch.adapters.verl.precision import FP16
from jetrl_patch.adapters.verl.yaml_settings import named
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, JetrlError, explain

__all__ = ["meet", "own", "problems", "replica_init", "run_id", "stand_aside", "sync_id", "wanted"]


# ---- vLLM engines beside the policy's: verl's reward models and distillation teachers ------------
# They are not fed by the weight sync and keep their own weights, so they must compute as if the plugin were not there. In a
# process of theirs it therefore runs with ``precision="bf16"``, which changes no engine: no quantization, no exact ops, no eager
# mode. On a machine without an accelerator the CPU platform stays. The engine's own processes inherit these settings.
#
# verl starts each engine in a ``vLLMHttpServer`` actor, and only the replica in the trainer loop knows whose engine that is. So
# the replica of a reward model or teacher starts a subclass of the server that changes the settings first.

_REWARD = "reward.reward_model"
_TEACHERS = "distillation.teacher_models"


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

            stand_aside()
            vLLMHttpServer.__init__(self, *args, **kwargs)

    return BesideHttpServer


def stand_aside() -> None:
    """Change this process, and what it passes on to the engine's processes, to settings that touch no engine."""
    if session.is_active():
        config = session.active_config()
        session.disable()
        session.enable(Config(precision="bf16", platform=config.platform, upstream_fixes=config.fixes_upstream))


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


# ---- Where a trainer and a vLLM worker on one machine meet for a weight sync: a socket of this sync alone
# verl names the socket in /tmp by the number of Ray's job, of the replica and of the rank. That keeps runs apart that share a Ray
# (https://github.com/verl-project/verl/issues/6233). But each run that starts a Ray of its own has job 1: of two on one machine
# the second takes the first one's socket, one waits for weights that never come, and the other's worker may load them.
#
# Within a run verl takes the same name again and again. A worker that was frozen, or given up, may still have a reply for the
# sender of an earlier sync: ZeroMQ delivers it, even of a closed socket, to whoever listens at that name now. The new sender
# takes this for its worker, its first message is lost, and both wait until their time-out.

_ATTRIBUTE = "_jetrl_synced"


def run_id() -> str:
    """Return what tells this process's Ray cluster from all others that are alive; empty outside a cluster."""
    import ray

    if not ray.is_initialized():
        return ""
    return hashlib.sha256(ray.get_runtime_context().gcs_address.encode()).hexdigest()[:12]


def sync_id(adapter: Any, step: int | None) -> str:
    """Return what tells the sync that begins from all others: the run, the step, and how often it was synced before.

    The training ranks of a rollout come to the same, because all of them take part in each sync.
    """
    last, times = getattr(adapter, _ATTRIBUTE, ("", 0))
    times = times + 1 if step == last else 0
    setattr(adapter, _ATTRIBUTE, (step, times))
    return f"{run_id()}.{step}.{times}"


def own(handle: str, sync: str) -> str:
    """Return the sync's own address in the place of verl's ``ipc:///tmp/….sock``."""
    return f"{handle.removesuffix('.sock')}-{sync}.sock" if sync else handle


def meet(worker: Any, sync: str) -> None:
    """Have verl's worker extension listen to this sync."""
    handle = own(type(worker)._get_zmq_handle(worker), sync)
    worker._get_zmq_handle = lambda: handle
