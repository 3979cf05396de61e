"""What a vLLM worker gets once its model is loaded: a weight receiver and a report.

``worker.jetrl_receiver`` takes weight syncs; ``collective_rpc("jetrl_report")`` reports the state of each worker.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from jetrl_patch import runtime
from jetrl_patch.config import Config
from jetrl_patch.errors import NotPatchedError
from jetrl_patch.exact.dispatch import chosen_attention
from jetrl_patch.families import LLAMA_LIKE, family_of
from jetrl_patch.fp8.ranks import WHOLE
from jetrl_patch.sync.base import Received
from jetrl_patch.sync.manifest import Terms
from jetrl_patch.sync.receive import Receiver

__all__ = ["attach", "jetrl_report"]


def attach(worker: Any, config: Config) -> None:
    """Audit the loaded model, register its quantized layers, and attach receiver and report to the worker.

    Raises:
        NotPatchedError: the mode quantizes the rollout, but this engine was built without the plugin's quantization.
        ModelError: vLLM transforms a layer after loading, experts in BF16 meet captured graphs, or in exact mode the attention is
            another one, or an op is not exact on this device.
        ConflictError: as ``graphs.mark_settings``.
    """
    from jetrl_patch.adapters.vllm.experts import check_eager, expert_modules
    from jetrl_patch.adapters.vllm.fused import fuse
    from jetrl_patch.adapters.vllm.graphs import mark_settings
    from jetrl_patch.adapters.vllm.install import VllmInstaller
    from jetrl_patch.adapters.vllm.latent import follow_norms
    from jetrl_patch.adapters.vllm.live import keep_live_experts
    from jetrl_patch.adapters.vllm.postload import check_layers
    from jetrl_patch.adapters.vllm.ranks import gathered
    from jetrl_patch.adapters.vllm.runner import finish
    from jetrl_patch.adapters.vllm.warm import warm_up

    model = worker.model_runner.get_model()
    installer = VllmInstaller(model)
    layers = installer.quantized_layers()
    if config.quantized_rollout and not layers:
        raise NotPatchedError(
            f"precision={config.precision!r} quantizes the rollout's linears, but this vLLM worker (pid {os.getpid()}) has "
            f"none: no patched process built its engine with EngineArgs.create_engine_config; "
            f"call jetrl_patch.enable() before the engine is built"
        )
    if config.quantized_rollout:
        check_layers(model)
        check_eager(model, worker.vllm_config.model_config.enforce_eager)
        finish(model)
        follow_norms(model, worker.vllm_config.model_config.hf_text_config)
    else:
        keep_live_experts(model)
    if config.exact:
        from jetrl_patch.adapters.vllm.exact import finish_model, require_attention

        finish_model(worker)
        require_attention(worker)
    if config.quantized_rollout and not worker.vllm_config.model_config.using_transformers_backend():
        fuse(model, family_of(worker.vllm_config.model_config.hf_config) or LLAMA_LIKE)
    if config.exact:
        from jetrl_patch.adapters.vllm.exact import try_ops

        try_ops(worker, config)
    if config.quantized_rollout:
        warm_up(model, worker.vllm_config.scheduler_config.max_num_batched_tokens)
    runtime.register_layers(layers)
    backend = _backend(config, worker) if config.quantized_rollout else ""
    attention = chosen_attention(worker.device.type) if config.exact else ""
    if backend:
        runtime.register_backend(backend, attention)
    if config.quantized_rollout:
        mark_settings(worker.vllm_config, config, backend, attention)
    if config.quantized_rollout and not worker.vllm_config.model_config.enforce_eager:
        installer.stay_in_place()
    base = Received() if config.sync == "delta" else None
    splits = [method.split for _, method in expert_modules(model)] or [WHOLE]  # one for all blocks, if there are experts
    worker.jetrl_receiver = Receiver(installer, Terms.of(config, backend, splits[0], attention), gathered, base)
    worker.jetrl_report = functools.partial(jetrl_report, worker)


def _backend(config: Config, worker: Any) -> str:
    if config.format is not None and config.format.own_product:
        return config.format.own_product
    from jetrl_patch.fp8.backends import choose_backend

    return choose_backend(config.backend, worker.device.type)


def jetrl_report(worker: Any, digests: bool = True) -> dict[str, Any]:
    """Report the state of this worker in plain types: ``llm.collective_rpc("jetrl_report")``.

    Returns:
        ``pid``, ``tp_rank``, ``config`` (the ``JETRL_*`` variables), ``layers`` (Hugging Face names of the FP8
        modules), ``guarded`` (those the precision guard moved to BF16), ``digests`` (``[tensor, row0, row1,
        col0, col1, digest]`` of each piece held here), ``patches`` (``[target, state]``), ``backend``, ``attention``,
        ``state`` of the weights and ``held``, the identity of the last sync where the next may send changes only.
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
        "attention": status.attention,
        "state": receiver.state.value,
        "held": receiver.held(),
    }
