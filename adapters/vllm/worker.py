"""What a vLLM worker carries once its model is loaded: the weight receiver and a report that can be asked for.

``worker.jetrl_receiver`` takes weight syncs, ``collective_rpc("jetrl_report")`` says what stands in each worker.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

from jetrl_patch import runtime
from jetrl_patch.config import Config
from jetrl_patch.errors import NotPatchedError
from jetrl_patch.sync.manifest import Terms
from jetrl_patch.sync.receive import Receiver

__all__ = ["attach", "jetrl_report"]


def attach(worker: Any, config: Config) -> None:
    """Audit the loaded model, register its FP8 layers, and hang receiver and report on the worker.

    Raises:
        NotPatchedError: FP8 rollout was asked for, but this engine was built without our quantization.
        ModelError: exact mode's ops do not keep their promise on this device.
    """
    from jetrl_patch.adapters.vllm.install import VllmInstaller

    installer = VllmInstaller(worker.model_runner.get_model())
    layers = installer.quantized_layers()
    if config.quantized_rollout and not layers:
        raise NotPatchedError(
            f"precision={config.precision!r} asks for quantized linears in the rollout, but this vLLM worker "
            f"(pid {os.getpid()}) has none: its engine was not built by EngineArgs.create_engine_config in a patched process; "
            f"call jetrl_patch.enable() before the engine is built"
        )
    if config.exact:
        from jetrl_patch.adapters.vllm.exact import finish_model, try_ops

        finish_model(worker)
        try_ops(worker)
    runtime.register_layers(layers)
    backend = _backend(config, worker) if config.quantized_rollout else ""
    if backend:
        runtime.register_backend(backend)
    worker.jetrl_receiver = Receiver(installer, Terms.of(config, backend), _gather)
    worker.jetrl_report = functools.partial(jetrl_report, worker)


def _backend(config: Config, worker: Any) -> str:
    if config.format is not None and config.format.own_product:
        return config.format.own_product
    from jetrl_patch.fp8.backends import choose_backend

    return choose_backend(config.backend, worker.device.type)


def _gather(mine: Any) -> Sequence[Any]:
    """Everybody's object, in tensor-parallel rank order."""
    import torch
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return [mine]
    everybody: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(everybody, mine, group=group.cpu_group)
    return everybody


def jetrl_report(worker: Any, digests: bool = True) -> dict[str, Any]:
    """What stands in this worker, in plain types: usable as ``llm.collective_rpc("jetrl_report")``.

    Returns:
        ``pid``, ``tp_rank``, ``config`` (the ``JETRL_*`` variables), ``layers`` (Hugging Face names of the FP8
        modules), ``guarded`` (of those that the precision guard took out of FP8), ``digests`` (``[tensor, row0, row1,
        col0, col1, digest]`` of each piece held here), ``patches`` (``[target, state]``), ``backend`` and ``state`` of
        the weights.
    """
    from vllm.distributed import get_tensor_model_parallel_rank

    receiver = worker.jetrl_receiver
    status = runtime.status()
    return {
        "pid": os.getpid(),
        "tp_rank": get_tensor_model_parallel_rank(),
        "config": status.config.to_env() if status.config else {},
        "layers": list(receiver.installer.quantized_layers()),
        "guarded": sorted(receiver.guarded),
        "digests": [list(rect) for rect in receiver.installer.installed()] if digests else [],
        "patches": [[patch.target, patch.state] for patch in status.patches],
        "backend": status.backend,
        "state": receiver.state.value,
    }
