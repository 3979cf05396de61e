"""The weights of the last sync, which verl's asynchronous trainers put back for a moment to compute old log-probs with them.

With several updates between two syncs (``parameter_sync_step``, ``trigger_parameter_sync_step``) old log-probs are those of the
weights that sampled, so the workers keep a copy, and one of the current weights while the old ones are in their place:

    save(0) · pass · update · save(1) · restore(0) · pass · restore(1) · update · save(2) · restore(0) · …

For FSDP2 and VeOmni verl copies with ``.detach().cpu()``, which does not copy what already lies on the CPU. With
``param_offload``, ``restore(0)`` then overwrites what ``save(1)`` kept, so that ``restore(1)`` leaves the old weights in place:
every update but the last before a sync is lost. With ``offload_policy``, and on a CPU, ``restore(0)`` restores nothing. verl says
in a comment that callers must load the parameters first; they do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from jetrl_patch.adapters.verl.state import WORKER
from jetrl_patch.errors import AuditError, explain
from jetrl_patch.patching.patch import NO_REPORT
from jetrl_patch.registry import Patch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PATCHES"]

_WORKER = "verl.experimental.separation.engine_workers"


def save_model_to_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``DetachActorWorker.save_model_to_cpu``: what is saved shares no memory with the parameters; note its digests."""

    def save_model_to_cpu(self: Any, n: Any) -> None:
        _arrived()
        original(self, n)
        saved = self.cpu_saved_models[n]
        if isinstance(saved, tuple):  # FSDP2 and VeOmni
            self.cpu_saved_models[n] = _own(saved[0], _local(self.actor.engine.module)), saved[1]
        WORKER.saved[n] = _digests(self.actor.engine.module)

    return save_model_to_cpu


def restore_model_from_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``DetachActorWorker.restore_model_from_cpu``: raise AuditError if the weights are not those that were saved."""

    def restore_model_from_cpu(self: Any, n: Any) -> None:
        _arrived()
        original(self, n)
        saved, found = WORKER.saved.get(n, {}), _digests(self.actor.engine.module)
        differing = [name for name, digest in found.items() if saved.get(name) != digest]
        if differing:
            what = f"{differing[0]}, restored for or after verl's pass for old log-probs"
            fix = "keep parameters on the GPU (param_offload=False, offload_policy=False)"
            raise AuditError(explain(what, required="the bytes that were saved", found="others; updates would be lost", fix=fix))

    return restore_model_from_cpu


def _own(saved: Mapping[str, tuple[Tensor, Any]], parameters: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Any]]:
    """Return saved shards with their specs, copied where the parameters lie on the CPU: there verl saved no copy."""
    return {
        name: (shard.clone() if parameters[name].device.type == "cpu" else shard, spec)
        for name, (shard, spec) in saved.items()
    }


def _local(module: Any) -> dict[str, Tensor]:
    """The parameters of an FSDP module as this rank holds them; none of Megatron's list of modules, whose copies verl owns."""
    from torch.distributed.tensor import DTensor

    named = () if isinstance(module, list) else module.named_parameters()
    return {name: (p._local_tensor if isinstance(p, DTensor) else p).detach() for name, p in named}


def _digests(module: Any) -> dict[str, int]:
    from jetrl_patch.fp8.gather import Fp8Shard
    from jetrl_patch.sync.digest import read, start

    local = _local(module)
    started = [start(shard.plain if isinstance(shard, Fp8Shard) else shard) for shard in local.values()]
    return dict(zip(local, (digest for digest, _ in read(started)), strict=True))


def _arrived() -> None:
    """Wait for what ``param_offload`` still copies from the GPU: both directions read or write it on the host."""
    from verl.utils.device import get_torch_device

    get_torch_device().synchronize()


_COPIES = (
    "verl's fsdp2_sharded_save_to_cpu clones parameters that are on the CPU, after pending copies from the GPU have finished"
)

PATCHES: tuple[Patch, ...] = (
    Patch(
        module=_WORKER,
        attr="DetachActorWorker.save_model_to_cpu",
        make=save_model_to_cpu,
        reason="verl's asynchronous trainers lose updates between two syncs, because they do not clone FSDP2 or VeOmni "
        "parameters that are on the CPU. FSDP1 and Megatron are not affected",
        remove_when=_COPIES,
        upstream=NO_REPORT,
    ),
    Patch(
        module=_WORKER,
        attr="DetachActorWorker.restore_model_from_cpu",
        make=restore_model_from_cpu,
        reason="verl does not notice lost updates, and overwrites parameters that param_offload may still be copying from the "
        "GPU. Megatron's are not compared",
        remove_when=_COPIES,
        upstream=NO_REPORT,
    ),
)
