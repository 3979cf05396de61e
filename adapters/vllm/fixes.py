"""Wrappers that fix bugs of vLLM. The patch of each is in ``adapter.py``, with its reason and the change that ends it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

from jetrl_patch.patching.attached import Attached

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

__all__ = [
    "create_mp_lock", "decorate_for_torch_compile", "finished_procs", "in_two_dimensions", "init_cpu_shm", "keep_latent_weight",
    "keep_live_experts", "keep_live_weight", "normalize_in_processor", "unpacked", "wait_until_ready",
]  # fmt: skip


# ---- How an engine's process ended, in words -----------------------------------------------------
# vLLM notices the end of a process by a pipe, which closes a moment before the exit status is available. It then reports
# ``Failed core proc(s): {}``.

_PATIENCE = 10.0  # seconds that a process may take to end after its pipe is closed


def finished_procs(original: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """Wrap ``CoreEngineProcManager.finished_procs``: wait for processes that are ending, and name the signal that ended one."""

    def finished_procs(self: Any) -> dict[str, Any]:
        for process in self.processes:
            if process.pid is not None and connection.wait([process.sentinel], timeout=0):
                process.join(_PATIENCE)
        return {name: _in_words(status) for name, status in original(self).items()}

    return finished_procs


def _in_words(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:  # a signal without a name
        return f"killed by signal {-status}"


# ---- Shared memory that a killed process leaves behind -------------------------------------------
# A queue between an engine and its workers has a name in ``/dev/shm``. Its writer removes the name at its end, but a killed
# process cannot. The name is needed only until every reader has mapped the memory, so it is removed then. The same holds for the
# memory that tensor-parallel workers on a CPU reduce over (4 MB per worker).
#
# A worker that loads a checkpoint draws a progress bar, for which tqdm creates a multiprocessing lock. In a spawned process this
# is a named semaphore (32 bytes) that no other process can use, so none is created there.

def wait_until_ready(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap ``MessageQueue.wait_until_ready``: when it returns in the writer, all readers on this machine have the memory."""

    def wait_until_ready(self: Any) -> None:
        original(self)
        if self._is_writer and self.buffer is not None and self.buffer.is_creator:
            self.buffer.shared_memory.unlink()
            self.buffer.is_creator = False  # so that the name is not removed again

    return wait_until_ready


def init_cpu_shm(original: Callable[[Any], int]) -> Callable[[Any], int]:
    """Wrap ``_CPUSHMDistributed._init_cpu_shm``, which ends with a barrier: by then every rank has mapped the memory of all."""

    def init_cpu_shm(self: Any) -> int:
        handle = original(self)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"/dev/shm/{self.group_name}_{self.communicator.rank}")
        return handle

    return init_cpu_shm


def create_mp_lock(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap ``TqdmDefaultWriteLock.create_mp_lock``: in a spawned process bars use the lock between threads only."""

    def create_mp_lock(cls: Any) -> None:
        if multiprocessing.get_start_method(allow_none=True) != "spawn":
            original(cls)
        elif not hasattr(cls, "mp_lock"):
            cls.mp_lock = None

    return create_mp_lock


# ---- The rotary embedding on a CPU, for 3D queries as in latent attention ------------------------
# For a query [T, heads, width] the kernel takes the stride of a row to be that of one head, and rotates the wrong numbers without
# an error (seen in 0.30). In two dimensions, [T, heads * width], it is right.

def in_two_dimensions(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``RotaryEmbedding.forward_cpu``. Use what it returns: it rotates a copy of a query that is not contiguous."""

    def forward_cpu(self: Any, positions: Any, query: Any, key: Any = None) -> tuple[Any, Any]:
        flat = [None if x is None else x.reshape(positions.numel(), -1) for x in (query, key)]
        rotated = original(self, positions, *flat)
        query_out, key_out = (x if x is None else x.view(old.shape) for x, old in zip(rotated, (query, key), strict=True))
        return query_out, key_out

    return forward_cpu


# ---- BF16 weights on a CPU stay open to updates --------------------------------------------------
# vLLM's CPU build packs weights after loading, in four ways that break a later update:
#
# - Linear layers: vLLM packs the weight into its kernel's layout and, except for ``lm_head``, frees the original. A later update
#   fails or has no effect. Here the weight is kept, and a write through its loader makes the layer pack again at its next use:
#   same kernel, same bits.
# - Experts keep their weight but are packed once. When vLLM processes the weights of a later load, as verl has it do after each
#   sync, it leaves them unpacked, and the kernel reads them as packed (seen in 0.30: every log-prob is wrong, without an error).
# - Convolutions of gated delta nets are packed in place. A later update would write plain values where the kernel reads packed
#   ones. Here the plain weight is kept as well; a write through its loader updates the plain one, which is then packed.
# - Latent attention, with AMX, packs ``kv_b_proj`` and removes the weight. Here the layer gets it back, and ``postload.absorb``
#   has it packed again.

_CONVOLUTION: Attached[tuple[Any, Any]] = Attached(
    "_jetrl_convolution", "vLLM passes a layer to its packing function, and the digests of a sync reach the same layer"
)  # the parameter, which is packed, and the weight as it was loaded
_WATCHED: Attached[Any] = Attached("_jetrl_watched", "vLLM packs a layer anew after each load, and its loader is wrapped once")


def keep_live_weight(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``dispatch_cpu_unquantized_gemm``. The packed copy takes memory in addition to the weight.

    Does not cover writes that bypass the parameter's ``weight_loader``.
    """

    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
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

    return dispatch_cpu_unquantized_gemm


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
    """The plain weight of a convolution that is packed; None for any other layer."""
    held, loaded = _CONVOLUTION.get(layer) or (None, None)
    return loaded if held is not None and held is getattr(layer, "weight", None) else None


def keep_latent_weight(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``MLAAttention.process_weights_after_loading``. Without AMX, vLLM keeps the weight by itself."""

    def process_weights_after_loading(self: Any, act_dtype: Any) -> None:
        weight = self.kv_b_proj.weight
        original(self, act_dtype)
        self.kv_b_proj.weight = weight

    return process_weights_after_loading


def keep_live_experts(model: Any) -> None:
    """Have the BF16 experts of a loaded model packed again whenever vLLM processes new weights. Does nothing off the CPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        kernel = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        if hasattr(kernel, "process_weights_after_loading") and hasattr(method, "_setup_kernel"):
            method._setup_kernel = _packing(method._setup_kernel, kernel)


def _packing(original: Callable[..., None], kernel: Any) -> Callable[..., None]:
    def _setup_kernel(layer: Any, w13: Any, w2: Any) -> None:
        original(layer, w13, w2)
        kernel.process_weights_after_loading(layer)

    return _setup_kernel


# ---- What vLLM changes outside of an engine, and images -----------------------------------------

def decorate_for_torch_compile(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap ``Base._decorate_for_torch_compile``: an eager engine leaves transformers' class alone."""

    def decorate_for_torch_compile(self: Any) -> None:
        if not self.model_config.enforce_eager and self.compilation_config.mode:  # 0: CompilationMode.NONE
            original(self)

    return decorate_for_torch_compile


def normalize_in_processor(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``EngineArgs.create_engine_config``: the image processor normalizes pixels, as in the trainer, and not the model.

    A model that normalizes holds mean and deviation in buffers that are not in the checkpoint. ``load_format="dummy"``, verl's
    default, fills them with noise, and no weight sync repairs them. Some vLLM releases normalize in the model by default.
    """

    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "mm_device_do_normalize", False) is not False:
            self.mm_device_do_normalize = False
        return original(self, *args, **kwargs)

    return create_engine_config
