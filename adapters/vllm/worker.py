"""Set up a vLLM worker whose model is loaded: finish exact mode, test its ops, compile kernels, attach a weight receiver."""

from __future__ import annotations

import functools
import os
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.platforms import current_platform

from jetrl_patch import session
from jetrl_patch.adapters.vllm.experts import check_eager, expert_modules, set_runners
from jetrl_patch.adapters.vllm.fixes import keep_live_experts
from jetrl_patch.adapters.vllm.formats import BLOCKS, logger
from jetrl_patch.adapters.vllm.graphs import mark_settings, run_eagerly
from jetrl_patch.adapters.vllm.install import VllmInstaller
from jetrl_patch.adapters.vllm.method import quantized_modules
from jetrl_patch.adapters.vllm.ops import ExactRMSNorm, fuse, keep_equal
from jetrl_patch.adapters.vllm.orders import Obeys
from jetrl_patch.adapters.vllm.postload import check_layers, follow_norms
from jetrl_patch.adapters.vllm.ranks import ExactGateLinear, ExactRowParallelLinear, choose_sum, gathered
from jetrl_patch.adapters.vllm.writes import refuse_other_writes
from jetrl_patch.backends import choose_backend
from jetrl_patch.config import Config
from jetrl_patch.errors import ModelError, NotPatchedError, SyncError, explain
from jetrl_patch.exact import trial
from jetrl_patch.exact.dispatch import chosen_attention
from jetrl_patch.exact.modules import ExactMLP, ExactRotary, ExactScores, swap
from jetrl_patch.fp8.mixture import WHOLE
from jetrl_patch.models.families import Family, family_of, record_of
from jetrl_patch.models.structure import expert_sizes, has_delta_nets, has_latent_attention
from jetrl_patch.sync.delta import Received
from jetrl_patch.sync.protocol import Terms
from jetrl_patch.sync.receive import Receiver

if TYPE_CHECKING:
    from vllm.config import VllmConfig


# ---- Make exact what vLLM's registries do not reach ----------------------------------------------
# vLLM's transformers backend replaces the linears, norms, MLPs and attention of transformers' model with vLLM's own. The table of
# out-of-tree ops makes most of them exact. These remain: the rotary embedding, which is still transformers' module and gets the
# trainer's swap, as does the MLP in vLLM 0.24, and the norms, whose subclass is not in the table.

def finish_transformers(model: nn.Module, family: Family) -> None:
    """Swap the remaining modules of a loaded model, in place. Raises ModelError if one has no exact counterpart."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind == family.rotary:
            swap(module, ExactRotary)
        elif isinstance(module, RMSNorm) and not isinstance(module, ExactRMSNorm):
            swap(module, ExactRMSNorm)
        elif kind == family.mlp and hasattr(module, "gate_proj"):
            swap(module, ExactMLP)
        elif kind == family.norm or isinstance(module, nn.Linear) or hasattr(module, "gate_proj"):
            what, fix = f"align='exact' of {name} in vLLM's transformers backend", "use align='linear'"
            required = "vLLM's own linears, norms and gated MLPs, which it puts into transformers' model"
            raise ModelError(explain(what, required=required, found=f"transformers' {kind}", fix=fix))


#: whether a module, on a GPU, computes by a kernel of vLLM's own: norms and rotary embedding of an attention with gated outputs,
#: and the first projection of latent attention in BF16 for up to 16 tokens
_OWN_KERNELS = ("use_fused_qk_norm_rope_gate", "_use_min_latency_gemm")


def finish_model(worker: Any) -> None:
    """Swap these modules of a loaded worker. Raises ModelError if one has no exact counterpart."""
    config, model = worker.vllm_config.model_config, worker.model_runner.get_model()
    family = family_of(config.hf_config)
    assert family is not None  # ``engine`` has checked it
    for module in model.modules():
        for name in _OWN_KERNELS:
            if getattr(module, name, False):
                setattr(module, name, False)
    if config.using_transformers_backend():
        finish_transformers(model, family)
    elif family.chooser:  # routers by a sigmoid: torch linears in FP32, or vLLM's own in BF16
        for module in model.modules():
            if isinstance(module, ExactGateLinear):
                module.jetrl_fp32 = True
            elif type(module) is nn.Linear:
                swap(module, ExactScores)


# ---- Test the exact ops of a loaded model before it serves ---------------------------------------

def rank_sizes(vllm_config: VllmConfig) -> Any:
    """Return the ``jetrl_patch.exact.trial.Sizes`` of one tensor-parallel rank."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    text: Any = model.hf_text_config
    _, width = expert_sizes(model.hf_config) or (0, 0)  # a mixture may have no dense MLP
    return trial.Sizes(
        hidden=model.get_hidden_size(),
        intermediate=getattr(text, "intermediate_size", width) // parallel.tensor_parallel_size,
        heads=model.get_num_attention_heads(parallel),
        kv_heads=model.get_num_kv_heads(parallel),
        head_dim=model.get_head_size(),
        vocab=model.get_vocab_size(),
        latent=text.kv_lora_rank if has_latent_attention(model.hf_config) else 0,
    )


def delta_net_sizes(vllm_config: VllmConfig) -> tuple[int, int, int, int]:
    """(KH, H, K, V) of one tensor-parallel rank's gated delta nets, as in ``exact.delta_net``."""
    text: Any = vllm_config.model_config.hf_text_config
    tp = vllm_config.parallel_config.tensor_parallel_size
    heads = text.linear_num_key_heads // tp, text.linear_num_value_heads // tp
    return *heads, text.linear_key_head_dim, text.linear_value_head_dim


def require_attention(worker: Any) -> None:
    """Raise ModelError if a layer of a loaded worker does not have the trainer's attention."""
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    impls = [impl for layer in layers if (impl := getattr(layer, "impl", None)) is not None]
    others = sorted({type(impl).__name__ for impl in impls if not getattr(impl, "jetrl_exact", False)})
    if others:
        required, fix = "the attention that the trainer computes", "leave the attention backend unset, or use align='linear'"
        raise ModelError(explain("align='exact' in a vLLM worker", required=required, found=", ".join(others), fix=fix))


def try_ops(worker: Any, config: Config) -> None:
    """Choose the attention and the sum over ranks of a loaded worker, and test the ops on its GPU. Does nothing on a CPU.

    Raises ConfigError as ``exact.trial.choose_attention``, ModelError if an op depends on its batch.
    """
    if not current_platform.is_cpu():
        sizes, page = rank_sizes(worker.vllm_config), worker.vllm_config.cache_config.block_size or trial.PAGE
        trial.choose_attention(config.resolved_attention, (sizes.heads, sizes.kv_heads), sizes.head_dim, worker.device, page)
        trial.require_exact_ops(sizes, worker.device, page, fp8_cache=config.kv_cache == "fp8")
        vision = getattr(worker.vllm_config.model_config.hf_config, "vision_config", None)
        if vision is not None:  # a text model has none
            trial.require_exact_tower(vision.hidden_size, vision.num_heads, worker.device)
        if has_delta_nets(worker.vllm_config.model_config.hf_config):
            trial.require_exact_delta_net(delta_net_sizes(worker.vllm_config), sizes, worker.device)
        choose_sum(worker.device)
        keep_equal(worker.model_runner.get_model())


# ---- Compile the FP8 kernels of a loaded model before it serves ----------------------------------
# DeepGEMM compiles a kernel for each [N, K] and each tile, which depends on the number of rows. That takes seconds per kernel,
# and would happen while the engine serves. vLLM's own warm-up (``vllm.model_executor.warmup``) finds only its own kernel classes.
# This one runs before vLLM measures its memory, and frees what it allocates. The ranks of a machine share the work
# (``backends.deep_gemm``).

@torch.inference_mode()
def warm_up(model: torch.nn.Module, most: int) -> int:
    """Multiply by one weight of each shape, for batches up to ``most`` rows, and log the progress. Returns how many products."""
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


# ---- The weight receiver and the report ----------------------------------------------------------
# These are attributes of vLLM's worker, because worker extensions and ``collective_rpc`` call workers by name.
# ``worker.jetrl_receiver`` takes weight syncs; ``collective_rpc("jetrl_report")`` reports the state of each worker, and
# ``collective_rpc("jetrl_order")`` lets a trainer that reaches the engine by HTTP alone sync its weights.

def attach(worker: Any, config: Config) -> None:
    """Audit the loaded model, register its quantized layers, and attach receiver, report and orders to the worker.

    Raises:
        NotPatchedError: the mode quantizes the rollout, but this engine was built without the plugin's quantization.
        ModelError: vLLM transforms a layer after loading; BF16 experts would run from captured graphs; or, in exact mode, the
            attention is not the trainer's or an op is not exact on this device.
        ConflictError: as ``graphs.mark_settings``.
    """
    model = worker.model_runner.get_model()
    installer = VllmInstaller(model)
    layers = installer.quantized_layers()
    backend = attention = ""
    if config.quantized_rollout:
        if not layers:
            raise NotPatchedError(
                f"precision={config.precision!r} quantizes the rollout's linears, but this vLLM worker (pid {os.getpid()}) has "
                "no quantized ones, because an unpatched process built its engine. Call jetrl_patch.enable() before that."
            )
        _finish_quantized(worker, model, config)
        own = config.format.own_product if config.format is not None else ""
        backend = own or choose_backend(config.backend, worker.device.type, config.scale_format)
        attention = chosen_attention(worker.device.type) if config.exact else ""
        session.register(backend=backend, attention=attention)
        mark_settings(worker.vllm_config, config, backend, attention)
        if not worker.vllm_config.model_config.enforce_eager:
            installer.stay_in_place()
    else:
        keep_live_experts(model)
    session.register(layers=layers)
    base = Received() if config.sync == "delta" else None
    splits = [method.split for _, method in expert_modules(model)] or [WHOLE]  # one for all blocks, if there are experts
    worker.jetrl_receiver = Receiver(installer, Terms.of(config, backend, splits[0], attention), gathered, base)
    worker.jetrl_report = functools.partial(jetrl_report, worker)
    worker.jetrl_order = Obeys(worker)
    if config.quantized_rollout:
        installer.seal()
        refuse_other_writes(worker.jetrl_receiver, installer)


def _finish_quantized(worker: Any, model: nn.Module, config: Config) -> None:
    """Check and finish a quantized model, and compile its kernels."""
    check_layers(model)
    settings = worker.vllm_config.model_config
    try:
        check_eager(model, settings.enforce_eager)
    except ModelError as error:
        if not (config.exact and config.decode_graphs == "auto"):
            raise
        run_eagerly(worker, str(error))
    set_runners(model)
    follow_norms(model, settings.hf_text_config)
    if config.exact:
        finish_model(worker)
        require_attention(worker)
    if not settings.using_transformers_backend():
        fuse(model, record_of(settings.hf_config))
    if config.exact:
        try_ops(worker, config)
    warm_up(model, worker.vllm_config.scheduler_config.max_num_batched_tokens)


def require_awake(worker: Any) -> None:
    """Raise SyncError if vLLM's sleep mode has taken the weights out of the GPU's memory: reading them would end the process."""
    pool: Any = CuMemAllocator.instance
    held = () if pool is None else pool.pointer_to_data.values()
    copied = any(data.tag == "weights" and data.cpu_backup_tensor is not None for data in held)  # level 1
    if copied or worker._sleep_saved_buffers:  # level 2 drops the weights, and saves only buffers
        what, fix = "digests of the engine's weights", 'call wake_up(tags=["weights"]) first, or report without digests'
        raise SyncError(explain(what, required="weights in the GPU's memory", found="an engine that sleeps", fix=fix))


def jetrl_report(worker: Any, digests: bool = True) -> dict[str, Any]:
    """Report the state of this worker in plain types: ``llm.collective_rpc("jetrl_report")``.

    Returns:
        ``pid``, ``tp_rank``, ``config`` (the ``JETRL_*`` variables), ``layers`` (Hugging Face names of the FP8 modules),
        ``guarded`` (those the precision guard moved to BF16), ``digests`` (``[tensor, row0, row1, col0, col1, digest]`` of each
        piece held here), ``patches`` (``[target, state]``), ``backend``, ``attention``, ``state`` of the weights, and ``held``:
        the identity of the last sync, if the next one may send only changes.

    Raises SyncError for ``digests`` of an engine that sleeps.
    """
    if digests:
        require_awake(worker)
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
