"""Fixes for bugs of vLLM: a wrapper for each, and at the end the patches, with their reasons."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

from jetrl_patch.patching.attached import Attached
from jetrl_patch.patching.patch import NO_REPORT, Patch, replacement

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs


# ---- How an engine's process ended ---------------------------------------------------------------
# vLLM notices that a process has ended when its pipe closes, which is a moment before the exit status is available. It then
# reports ``Failed core proc(s): {}``.

_PATIENCE = 10.0  # seconds that a process may take to end after its pipe is closed


@replacement
def finished_procs(original: Any, self: Any) -> dict[str, Any]:
    """Wait for processes that are ending, and name the signal that killed one."""
    for process in self.processes:
        if process.pid is not None and connection.wait([process.sentinel], timeout=0):
            process.join(_PATIENCE)
    return {name: _in_words(status) for name, status in original(self).items()}


def _in_words(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:  # a signal without a name
        return f"killed by signal {-status}"


# ---- Calls that an engine can no longer answer ---------------------------------------------------
# A call into an engine's process (pause, sleep, a call to its workers) waits for its answer. If the process ends first, vLLM ends
# the task that reads the answers, but not the wait.

@replacement
def ensure_output_queue_task(original: Any, self: Any) -> None:
    """Start the task that reads an engine's answers. When it ends, fail the calls that still wait for one."""
    running = self.resources.output_queue_task
    original(self)
    task = self.resources.output_queue_task
    if task is not running:
        task.add_done_callback(functools.partial(_fail, self.utility_results))


def _fail(waiting: dict[int, asyncio.Future[Any]], _: object) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    for future in waiting.values():
        if not future.done():
            future.set_exception(EngineDeadError())
    waiting.clear()


# ---- Shared memory that a killed process leaves behind -------------------------------------------
# The queues between an engine and its workers are named files in ``/dev/shm``, and so is the memory through which tensor-parallel
# workers on a CPU reduce (4 MB per worker). The owner removes the name when it ends, but a killed process cannot. The name is
# needed only until every process has mapped the memory, so it is removed right then.
#
# tqdm creates a multiprocessing lock for the progress bar of a loading worker. In a spawned process this is a named semaphore (32
# bytes) that no other process can use, so none is created there.

@replacement
def wait_until_ready(original: Any, self: Any) -> None:
    """Unlink a queue's memory once all readers on this machine have mapped it."""
    original(self)
    if self._is_writer and self.buffer is not None and self.buffer.is_creator:
        self.buffer.shared_memory.unlink()
        self.buffer.is_creator = False  # do not unlink it again


@replacement
def init_cpu_shm(original: Any, self: Any) -> Any:
    """Unlink this rank's memory. ``original`` ends with a barrier, so every rank has mapped it."""
    handle = original(self)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"/dev/shm/{self.group_name}_{self.communicator.rank}")
    return handle


@replacement
def create_mp_lock(original: Any, cls: Any) -> None:
    """In a spawned process, let progress bars use only their lock between threads."""
    if multiprocessing.get_start_method(allow_none=True) != "spawn":
        original(cls)
    elif not hasattr(cls, "mp_lock"):
        cls.mp_lock = None


# ---- The rotary embedding on a CPU, for 3D queries as in latent attention ------------------------
# For a query [T, heads, width] the kernel uses the stride of one head as the stride of a token, and silently rotates the wrong
# numbers (seen in 0.30). Queries [T, heads * width] are rotated correctly.

@replacement
def in_two_dimensions(original: Any, self: Any, positions: Any, query: Any, key: Any = None) -> tuple[Any, Any]:
    """Flatten query and key for the kernel. Use the returned tensors: a query that is not contiguous is rotated in a copy."""
    flat = [None if x is None else x.reshape(positions.numel(), -1) for x in (query, key)]
    rotated = original(self, positions, *flat)
    query_out, key_out = (x if x is None else x.view(old.shape) for x, old in zip(rotated, (query, key), strict=True))
    return query_out, key_out


# ---- Keep BF16 weights updatable on a CPU --------------------------------------------------------
# vLLM's CPU build packs weights after loading, in four ways that break a later update:
#
# - Linear layers: vLLM packs the weight into its kernel's layout and, except for ``lm_head``, frees the original. A later update
#   fails or has no effect. Here the weight is kept, and a write through its loader makes the layer pack again at its next use:
#   same kernel, same bits.
# - Experts keep their weight but are packed once. When vLLM processes the weights of a later load, as verl makes it do after each
#   sync, it leaves them unpacked, and the kernel reads them as packed (seen in 0.30: every log-prob is wrong, without an error).
# - Convolutions of gated delta nets are packed in place. A later update would write plain values where the kernel reads packed
#   ones. Here the plain weight is kept as well; its loader writes to the plain weight and packs it again.
# - Latent attention, with AMX, packs ``kv_b_proj`` and removes the weight. Here the layer gets it back, and ``postload.absorb``
#   packs it again.

_CONVOLUTION: Attached[tuple[Any, Any]] = Attached(
    "_jetrl_convolution", "vLLM passes a layer to its packing function, and the digests of a sync reach the same layer"
)  # the parameter, which is packed, and the weight as it was loaded
_WATCHED: Attached[Any] = Attached("_jetrl_watched", "vLLM packs a layer anew after each load, and its loader is wrapped once")


@replacement
def keep_live_weight(original: Any, layer: Any, remove_weight: bool) -> None:
    """Keep the weight next to its packed copy, which takes extra memory, and pack again after a write.

    Does not cover writes that bypass the parameter's ``weight_loader``.
    """
    weight = layer.weight
    if _loaded_convolution(layer) is not None:
        return  # its loader has packed it
    if weight.ndim == 3 and hasattr(weight, "weight_loader") and not weight.is_meta:
        loaded, place = weight.data.clone(), weight.data_ptr()
        original(layer, remove_weight)
        if layer.weight.data_ptr() != place:
            _watch_convolution(layer, weight, loaded, original)
        return
    if weight.ndim != 2 or weight.is_meta:
        original(layer, remove_weight)
        return
    original(layer, False)
    if _WATCHED.get(layer) is not weight:
        _WATCHED.set(layer, weight)
        _watch(layer, weight, original)


def _watch(layer: Any, weight: Any, pack: Callable[..., None]) -> None:
    load = weight.weight_loader

    def load_and_mark(*args: Any, **kwargs: Any) -> Any:
        result = load(*args, **kwargs)
        layer.cpu_linear = pack_first
        return result

    def pack_first(x: Any, live: Any, bias: Any) -> Any:
        pack(layer, False)
        return layer.cpu_linear(x, live, bias)

    weight.weight_loader = load_and_mark


def _watch_convolution(layer: Any, weight: Any, loaded: Any, pack: Callable[..., None]) -> None:
    load = weight.weight_loader

    def load_and_pack(param: Any, *args: Any, **kwargs: Any) -> Any:
        param.data = loaded.clone()  # vLLM may keep what it packs
        result = load(param, *args, **kwargs)
        loaded.copy_(param.data)
        pack(layer, False)
        return result

    weight.weight_loader = load_and_pack
    _CONVOLUTION.set(layer, (weight, loaded))


def unpacked(layer: Any) -> Any:
    """The weight of one of vLLM's linear layers as it was loaded: the plain weight of a packed convolution."""
    loaded = _loaded_convolution(layer)
    return getattr(layer, "weight", None) if loaded is None else loaded


def _loaded_convolution(layer: Any) -> Any:
    """The plain weight of a packed convolution; None for any other layer."""
    held, loaded = _CONVOLUTION.get(layer) or (None, None)
    return loaded if held is not None and held is getattr(layer, "weight", None) else None


@replacement
def keep_latent_weight(original: Any, self: Any, act_dtype: Any) -> None:
    """Give ``kv_b_proj`` its weight back. Without AMX, vLLM keeps it anyway."""
    weight = self.kv_b_proj.weight
    original(self, act_dtype)
    self.kv_b_proj.weight = weight


def keep_live_experts(model: Any) -> None:
    """Pack the BF16 experts of a loaded model again whenever vLLM processes new weights. Does nothing off the CPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        kernel = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        if hasattr(kernel, "process_weights_after_loading") and hasattr(method, "_setup_kernel"):
            method._setup_kernel = functools.partial(_set_up_and_pack, method._setup_kernel, kernel)


def _set_up_and_pack(original: Callable[..., None], kernel: Any, layer: Any, w13: Any, w2: Any) -> None:
    original(layer, w13, w2)
    kernel.process_weights_after_loading(layer)


# ---- Transformers' classes, and images -----------------------------------------------------------

@replacement
def decorate_for_torch_compile(original: Any, self: Any, **kwargs: Any) -> None:
    """Leave transformers' class alone in an eager engine."""
    if not self.model_config.enforce_eager and self.compilation_config.mode:  # 0: CompilationMode.NONE
        original(self, **kwargs)


@replacement
def normalize_in_processor(original: Any, self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
    """Normalize pixels in the image processor, as the trainer does, and not in the model.

    A model that normalizes keeps mean and deviation in buffers that are not in the checkpoint. ``load_format="dummy"``, verl's
    default, fills them with noise, and no weight sync repairs them. Some vLLM releases normalize in the model by default.
    """
    if getattr(self, "mm_device_do_normalize", False) is not False:
        self.mm_device_do_normalize = False
    return original(self, *args, **kwargs)


# ---- The patches ---------------------------------------------------------------------------------

_ON_CPU = "weight syncs on a CPU"

FIXES: tuple[Patch, ...] = (
    # what an engine computes, and updates to its weights
    Patch(
        "vllm.engine.arg_utils", "EngineArgs.create_engine_config", normalize_in_processor, fixes="vllm",
        reason="where vLLM's model normalizes images, load_format='dummy' fills mean and deviation with noise that no weight "
        "sync repairs; this normalizes in the image processor. Versions before 0.28 are not affected",
        upstream="https://github.com/vllm-project/vllm/pull/50411",
        remove_when="vLLM's initialize_dummy_weights skips buffers that are not in the checkpoint",
    ),
    Patch(
        "vllm.model_executor.layers.utils", "dispatch_cpu_unquantized_gemm", keep_live_weight, fixes="vllm",
        reason="vLLM's CPU build packs BF16 weights after loading and frees the originals, so later updates fail or do nothing",
        upstream=NO_REPORT,
        remove_when="vLLM's dispatch_cpu_unquantized_gemm keeps the live weight, or packs it again after load_weights",
        needed_by=_ON_CPU,
    ),
    Patch(
        "vllm.model_executor.layers.rotary_embedding.base", "RotaryEmbedding.forward_cpu", in_two_dimensions, fixes="vllm",
        always="vLLM compiles it into its graphs",
        reason="vLLM's CPU rotary kernel misreads 3D queries (latent attention without YaRN), so all log-probs there are wrong",
        upstream=NO_REPORT,
        remove_when="vLLM's CPU op rotary_embedding honors the head stride of a 3D query, or latent attention passes it a 2D one",
    ),
    Patch(
        "vllm.model_executor.layers.attention.mla_attention", "MLAAttention.process_weights_after_loading", keep_latent_weight,
        reason="on CPUs with AMX, vLLM packs latent attention's kv_b_proj after loading and frees it, so a later update fails",
        upstream="https://github.com/vllm-project/vllm/pull/52616",
        remove_when="vLLM's MLAAttention.process_weights_after_loading keeps kv_b_proj.weight on AMX CPUs, or uses a live copy",
        fixes="vllm",
        needed_by=_ON_CPU,
    ),
    # what a killed process leaves behind or does not report
    Patch(
        "vllm.distributed.device_communicators.shm_broadcast", "MessageQueue.wait_until_ready", wait_until_ready, fixes="vllm",
        reason="Ray kills engines with SIGKILL, which leaves the shared memory of their queues in /dev/shm",
        upstream="https://github.com/vllm-project/vllm/issues/8933",
        remove_when="vLLM's MessageQueue.wait_until_ready unlinks the shared memory once its readers have mapped it",
    ),
    Patch(
        "vllm.distributed.device_communicators.cpu_communicator", "_CPUSHMDistributed._init_cpu_shm", init_cpu_shm, fixes="vllm",
        reason="Ray kills engines with SIGKILL, which leaves the shared memory of their CPU workers' all-reduce in /dev/shm",
        upstream=NO_REPORT,
        remove_when="vLLM's _CPUSHMDistributed unlinks that shared memory once its workers have mapped it",
    ),
    Patch(
        "vllm.v1.engine.utils", "CoreEngineProcManager.finished_procs", finished_procs, fixes="vllm",
        reason="when an engine is killed during start-up, vLLM says only that start-up failed, not which signal killed it",
        upstream="https://github.com/vllm-project/vllm/issues/19002",
        remove_when="vLLM's CoreEngineProcManager.finished_procs waits for the exit code of a process, and reports the signal",
    ),
    Patch(
        "vllm.v1.engine.core_client", "AsyncMPClient._ensure_output_queue_task", ensure_output_queue_task, fixes="vllm",
        reason="when an engine is killed during a call (pause_generation, collective_rpc), the caller waits forever",
        upstream="https://github.com/vllm-project/vllm/pull/56416",
        remove_when="vLLM's AsyncMPClient fails the calls in utility_results when its output task ends",
    ),
    Patch(
        "tqdm.std", "TqdmDefaultWriteLock.create_mp_lock", create_mp_lock, fixes="tqdm",
        reason="Ray kills engines with SIGKILL, which leaves the semaphore of their workers' tqdm bars in /dev/shm",
        upstream="https://github.com/tqdm/tqdm/pull/1677",
        remove_when="tqdm's TqdmDefaultWriteLock creates no multiprocessing lock in a spawned process",
    ),
    Patch(
        "vllm.model_executor.models.transformers.base", "Base._decorate_for_torch_compile", decorate_for_torch_compile,
        reason="vLLM's transformers backend changes transformers' own class for compilation even in eager mode, so a trainer in "
        "the same process can no longer build that model. Engines that compile are not covered",
        upstream=NO_REPORT,
        remove_when="vLLM's Base._decorate_for_torch_compile decorates a subclass, or does nothing in eager mode",
        fixes="vllm",
        needed_by="a trainer and an eager engine in one process, as in `jetrl parity`",
    ),
)
