"""What a vLLM worker gets once its model is loaded: a weight receiver, a report, compiled kernels, and graphs of its own."""

from __future__ import annotations

import functools
import os
import time
from typing import Any

import torch

from jetrl_patch import session
from jetrl_patch.adapters.vllm.formats import BLOCKS, logger
from jetrl_patch.adapters.vllm.graphs import mark_settings, run_eagerly
from jetrl_patch.adapters.vllm.method import quantized_modules
from jetrl_patch.adapters.vllm.ranks import ExactRowParallelLinear
from jetrl_patch.config import Config
from jetrl_patch.errors import ModelError, NotPatchedError
from jetrl_patch.exact.dispatch import chosen_attention
from jetrl_patch.fp8.mixture import WHOLE
from jetrl_patch.models.families import LLAMA_LIKE, family_of
from jetrl_patch.sync.delta import Received
from jetrl_patch.sync.protocol import Terms
from jetrl_patch.sync.receive import Receiver

__all__ = ["attach", "jetrl_report", "warm_up"]


# ---- Compile the FP8 kernels of a loaded model before it serves ----------------------------------
# DeepGEMM compiles a kernel for each [N, K] and each tile that it takes for some number of rows. With nvcc that takes seconds,
# in the middle of serving if nothing asked before. vLLM's own warm-up (``vllm.model_executor.warmup``) looks for its own kernel
# classes, and these layers have none of them. Runs before vLLM measures its memory, so what it allocates is free again by then.

@torch.inference_mode()
def warm_up(model: torch.nn.Module, most: int) -> int:
    """Multiply with one weight of each shape, for batches up to ``most`` rows; say in the log how far it is.

    Returns:
        the number of products: 0 for a backend that compiles nothing.
    """
    kinds: dict[tuple[Any, ...], Any] = {}
    for layer, method in quantized_modules(model):
        partial = isinstance(layer, ExactRowParallelLinear) and layer.tp_size > 1 and layer.reduce_results
        kinds.setdefault((*layer.weight.shape, partial, hasattr(layer, BLOCKS)), (layer, method))
    done = 0
    for number, ((N, K, partial, _), (layer, method)) in enumerate(kinds.items(), 1):
        rows = method.format.compiled_rows(layer.weight.device, most)
        if not rows:
            continue
        start = time.monotonic()
        x_MK = torch.zeros(max(rows), K, dtype=torch.bfloat16, device=layer.weight.device)
        for M in rows:
            (method.partial_sum if partial else method.apply)(layer, x_MK[:M])
        done += len(rows)
        took = time.monotonic() - start
        logger.info("jetrl_patch: FP8 kernels for [%d, %d] are compiled, %d of %d, %.1f s", N, K, number, len(kinds), took)
    if done:
        torch.cuda.empty_cache()
    return done


# ---- What a vLLM worker gets once its model is loaded: a weight receiver and a report ------------
# ``worker.jetrl_receiver`` takes weight syncs; ``collective_rpc("jetrl_report")`` reports the state of each worker.

def attach(worker: Any, config: Config) -> None:
    """Audit the loaded model, register its quantized layers, and attach receiver and report to the worker.

    Raises:
        NotPatchedError: the mode quantizes the rollout, but this engine was built without the plugin's quantization.
        ModelError: vLLM transforms a layer after loading, experts in BF16 meet captured graphs, or in exact mode the attention is
            another one, or an op is not exact on this device.
        ConflictError: as ``graphs.mark_settings``.
    """
    from jetrl_patch.adapters.vllm.experts import check_eager, expert_modules, finish
    from jetrl_patch.adapters.vllm.fused import fuse
    from jetrl_patch.adapters.vllm.install import VllmInstaller
    from jetrl_patch.adapters.vllm.live import keep_live_experts
    from jetrl_patch.adapters.vllm.postload import check_layers, follow_norms
    from jetrl_patch.adapters.vllm.ranks import gathered

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
        try:
            check_eager(model, worker.vllm_config.model_config.enforce_eager)
        except ModelError as error:
            if not (config.exact and config.decode_graphs == "auto"):
                raise
            run_eagerly(worker, str(error))
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
    session.register_layers(layers)
    backend = _backend(config, worker) if config.quantized_rollout else ""
    attention = chosen_attention(worker.device.type) if config.exact else ""
    if backend:
        session.register_backend(backend, attention)
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
    from jetrl_patch.backends import choose_backend

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
    status = session.status()
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
