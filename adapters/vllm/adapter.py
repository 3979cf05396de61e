"""The vLLM adapter: its patches, and its entries in vLLM's registries.

It uses vLLM's extension points where they exist: the registries of quantizations, out-of-tree ops and attention backends. The
entries are subclasses of vLLM's own classes, so vLLM must be fully imported first. That is why ``install`` runs when vLLM loads
its plugins or builds an engine, and not on import.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from jetrl_patch.adapters.vllm.fixes import (
    create_mp_lock,
    decorate_for_torch_compile,
    finished_procs,
    in_two_dimensions,
    init_cpu_shm,
    keep_latent_weight,
    keep_live_weight,
    normalize_in_processor,
    wait_until_ready,
)
from jetrl_patch.adapters.vllm.shards import REGISTRIES
from jetrl_patch.patching.patch import NO_REPORT
from jetrl_patch.registry import Adapter, Config, Journal, Patch, Services

__all__ = ["ADAPTER", "VllmAdapter"]


_ON_CPU = "weight syncs on a CPU"


class VllmAdapter(Adapter):
    """Patches vLLM and fills its registries."""

    name = "vllm"
    requires = ("torch", "vllm")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._session: tuple[Config, Journal] | None = None

    def services(self) -> Services:
        """Offer the rollout engine."""
        from jetrl_patch.adapters.vllm import sample

        return Services(rollout=sample)

    def on_apply(self, config: Config, journal: Journal) -> None:
        """Keep the settings and the journal for ``install``, which fills the registries later."""
        self._session = (config, journal)

    def on_undo(self) -> None:
        """Drop them."""
        self._session = None
        REGISTRIES.filled = False

    def install(self) -> None:
        """Fill vLLM's registries, unless they are filled or this process is not patched."""
        with self._lock:
            if self._session is None or REGISTRIES.filled:
                return
            from jetrl_patch.adapters.vllm.quant import fill

            fill(*self._session)
            REGISTRIES.filled = True

    def patches(self, config: Config) -> Sequence[Patch]:
        """The engine's settings, the worker's load and step, and fixes of vLLM's bugs."""
        return (
            Patch(
                module="vllm.engine.arg_utils",
                attr="EngineArgs.create_engine_config",
                make=functools.partial(_create_engine_config, adapter=self, config=config),
                reason="without it vLLM builds an unquantized, compiled engine and ignores conflicting settings. Does not cover "
                "a VllmConfig built by hand, whose workers refuse to load",
                remove_when="vLLM's EngineArgs.create_engine_config calls general plugins (vllm.general_plugins) before and "
                "after it builds the VllmConfig",
            ),
            Patch(
                module="vllm.engine.arg_utils",
                attr="EngineArgs.create_engine_config",
                make=normalize_in_processor,
                reason="where vLLM's model normalizes images, load_format='dummy' fills mean and deviation with noise that no "
                "weight sync repairs; this normalizes in the image processor. Versions before 0.28 are not affected",
                upstream="https://github.com/vllm-project/vllm/pull/50411",
                remove_when="vLLM's initialize_dummy_weights skips buffers that are not in the checkpoint",
                fixes="vllm",
            ),
            Patch(
                module="vllm.v1.worker.gpu_worker",
                attr="Worker.load_model",
                make=functools.partial(_load_model, config=config),
                reason="without it a worker has no weight receiver and its model is not audited. Workers that do not derive "
                "from gpu_worker.Worker are not covered",
                remove_when="vLLM's Worker.load_model calls a hook of worker_extension_cls once the model is loaded",
            ),
            *([_PROVE_GRAPHS] if config.may_capture else []),
            Patch(
                module="vllm.v1.worker.gpu_worker",
                attr="Worker.execute_model",
                make=_execute_model,
                always="a worker whose sync failed must not generate, in whatever state its process is",
                reason="without it an engine would generate from half-updated weights after a failed sync",
                remove_when="vLLM's WeightTransferEngine gets a method that Worker.execute_model calls before each step and "
                "that may raise",
            ),
            Patch(
                module="vllm.model_executor.layers.utils",
                attr="dispatch_cpu_unquantized_gemm",
                make=keep_live_weight,
                reason="vLLM's CPU build packs BF16 weights after loading and frees the originals, so later weight updates "
                "fail or have no effect",
                upstream=NO_REPORT,
                remove_when="vLLM's dispatch_cpu_unquantized_gemm keeps the live weight, or packs it again after load_weights",
                fixes="vllm",
                needed_by=_ON_CPU,
            ),
            Patch(
                module="vllm.model_executor.layers.rotary_embedding.base",
                attr="RotaryEmbedding.forward_cpu",
                make=in_two_dimensions,
                always="vLLM compiles it into its graphs",
                reason="vLLM's CPU rotary kernel misreads 3D queries (latent attention without YaRN), so every log-prob of "
                "such a rollout is wrong",
                upstream=NO_REPORT,
                fixes="vllm",
                remove_when="vLLM's CPU op rotary_embedding honors the head stride of a 3D query, or latent attention passes "
                "it a 2D one",
            ),
            Patch(
                module="vllm.model_executor.layers.attention.mla_attention",
                attr="MLAAttention.process_weights_after_loading",
                make=keep_latent_weight,
                reason="on CPUs with AMX, vLLM packs kv_b_proj of latent attention after loading and frees the original, so a "
                "later weight update fails",
                upstream="https://github.com/vllm-project/vllm/pull/52616",
                remove_when="vLLM's MLAAttention.process_weights_after_loading keeps kv_b_proj.weight on AMX CPUs, or computes "
                "with a live copy",
                fixes="vllm",
                needed_by=_ON_CPU,
            ),
            Patch(
                module="vllm.distributed.device_communicators.shm_broadcast",
                attr="MessageQueue.wait_until_ready",
                make=wait_until_ready,
                reason="Ray kills engines with SIGKILL, which leaves the shared memory of their queues in /dev/shm",
                upstream="https://github.com/vllm-project/vllm/issues/8933",
                remove_when="vLLM's MessageQueue.wait_until_ready unlinks the shared memory once its readers have mapped it",
                fixes="vllm",
            ),
            Patch(
                module="vllm.distributed.device_communicators.cpu_communicator",
                attr="_CPUSHMDistributed._init_cpu_shm",
                make=init_cpu_shm,
                reason="Ray kills engines with SIGKILL, which leaves the shared memory of their CPU workers' all-reduce in "
                "/dev/shm",
                upstream=NO_REPORT,
                remove_when="vLLM's _CPUSHMDistributed unlinks that shared memory once its workers have mapped it",
                fixes="vllm",
            ),
            Patch(
                module="vllm.v1.engine.utils",
                attr="CoreEngineProcManager.finished_procs",
                make=finished_procs,
                reason="when an engine is killed during start-up, vLLM says only that start-up failed, not which signal killed "
                "it",
                upstream="https://github.com/vllm-project/vllm/issues/19002",
                remove_when="vLLM's CoreEngineProcManager.finished_procs waits for the exit code of a process whose sentinel "
                "fired, and reports the signal",
                fixes="vllm",
            ),
            Patch(
                module="tqdm.std",
                attr="TqdmDefaultWriteLock.create_mp_lock",
                make=create_mp_lock,
                reason="Ray kills engines with SIGKILL, which leaves the semaphore of their workers' tqdm bars in /dev/shm",
                upstream="https://github.com/tqdm/tqdm/pull/1677",
                remove_when="tqdm's TqdmDefaultWriteLock creates no multiprocessing lock in a spawned process",
                fixes="tqdm",
            ),
            *([_LEAVE_TRANSFORMERS_ALONE] if config.exact else []),
        )


_LEAVE_TRANSFORMERS_ALONE = Patch(
    module="vllm.model_executor.models.transformers.base",
    attr="Base._decorate_for_torch_compile",
    make=decorate_for_torch_compile,
    reason="vLLM's transformers backend changes transformers' own class for compilation even in eager mode, so a trainer in "
    "the same process can no longer build that model. Engines that compile are not covered",
    upstream=NO_REPORT,
    remove_when="vLLM's Base._decorate_for_torch_compile decorates a subclass, or does nothing in eager mode",
    fixes="vllm",
    needed_by="a trainer and an exact engine in one process, as in `jetrl parity`",
)


def _compile_or_warm_up_model(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def compile_or_warm_up_model(self: Any) -> Any:
        from jetrl_patch.adapters.vllm.graphs import prove_graphs

        result = original(self)
        prove_graphs(self)
        return result

    return compile_or_warm_up_model


_PROVE_GRAPHS = Patch(
    module="vllm.v1.worker.gpu_worker",
    attr="Worker.compile_or_warm_up_model",
    make=_compile_or_warm_up_model,
    reason="without it a captured decoding step would serve in exact mode without proof that it has the bits of the eager one. "
    "Workers that override the method, as on a CPU, capture nothing",
    remove_when="vLLM's Worker.compile_or_warm_up_model calls a hook of worker_extension_cls once graphs are captured",
)


def _create_engine_config(original: Callable[..., Any], *, adapter: VllmAdapter, config: Config) -> Callable[..., Any]:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        from jetrl_patch.adapters.vllm.engine import check_engine, prepare_arguments

        adapter.install()
        prepare_arguments(self, config)
        vllm_config = original(self, *args, **kwargs)
        check_engine(vllm_config, config)
        return vllm_config

    return create_engine_config


def _load_model(original: Callable[..., Any], *, config: Config) -> Callable[..., Any]:
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        from jetrl_patch.adapters.vllm.worker import attach

        result = original(self, *args, **kwargs)
        attach(self, config)
        return result

    return load_model


def _execute_model(original: Callable[..., Any]) -> Callable[..., Any]:
    def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        receiver = getattr(self, "jetrl_receiver", None)
        if receiver is not None:
            receiver.check_serving()
        return original(self, *args, **kwargs)

    return execute_model


ADAPTER = VllmAdapter()
