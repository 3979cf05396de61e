"""The vLLM adapter: what goes in where, and how it comes out again.

Wherever vLLM has an extension point, that is used: the quantization registry, the tables of out-of-tree ops and of
attention backends. Their entries are classes that inherit from vLLM's own, so they can be made only when vLLM's
modules are fully imported: ``install`` runs when vLLM loads its plugins or builds an engine, not at import.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from jetrl_patch.adapters.base import Adapter, Config, Journal, Patch, Services
from jetrl_patch.adapters.vllm.filled import REGISTRIES
from jetrl_patch.adapters.vllm.live import keep_live_weight

__all__ = ["ADAPTER", "VllmAdapter"]


class VllmAdapter(Adapter):
    """See the module's docstring."""

    name = "vllm"
    requires = ("torch", "vllm")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._session: tuple[Config, Journal] | None = None

    def services(self) -> Services:
        """The rollout engine."""
        from jetrl_patch.adapters.vllm import services

        return Services(rollout=services)

    def on_apply(self, config: Config, journal: Journal) -> None:
        """Remember the session; the registries follow in ``install``."""
        self._session = (config, journal)

    def on_undo(self) -> None:
        """Forget the session."""
        self._session = None
        REGISTRIES.filled = False

    def install(self) -> None:
        """Fill vLLM's registries. Does nothing the second time, or when the process is not enabled."""
        with self._lock:
            if self._session is None or REGISTRIES.filled:
                return
            from jetrl_patch.adapters.vllm.registries import fill

            fill(*self._session)
            REGISTRIES.filled = True

    def patches(self, config: Config) -> Sequence[Patch]:
        """The engine's settings, the worker's load and step, the CPU's BF16 linears, and classes of transformers left alone."""
        return (
            Patch(
                module="vllm.engine.arg_utils",
                attr="EngineArgs.create_engine_config",
                make=functools.partial(_create_engine_config, adapter=self, config=config),
                reason="choose quantization='jetrl_fp8' and eager mode, refuse what cannot be combined; "
                "an engine built from a VllmConfig by hand is not covered, its workers refuse to load instead",
                remove_when="vLLM plugins may set or check engine arguments",
            ),
            Patch(
                module="vllm.v1.worker.gpu_worker",
                attr="Worker.load_model",
                make=functools.partial(_load_model, config=config),
                reason="audit the loaded model and give the worker its weight receiver and its report; "
                "workers that do not derive from gpu_worker.Worker are not covered",
                remove_when="vLLM calls plugins after a model is loaded",
            ),
            Patch(
                module="vllm.v1.worker.gpu_worker",
                attr="Worker.execute_model",
                make=_execute_model,
                reason="an engine whose weights are half updated must not generate",
                remove_when="vLLM lets a weight transfer engine veto steps",
            ),
            Patch(
                module="vllm.model_executor.layers.utils",
                attr="dispatch_cpu_unquantized_gemm",
                make=keep_live_weight,
                reason="vLLM on CPU repacks BF16 weights after loading and empties them: later weight updates would "
                "fail or go unseen; only CPU builds call it",
                remove_when="vLLM's CPU linears read the live weight, or repack on load_weights",
            ),
            *([_LEAVE_TRANSFORMERS_ALONE] if config.exact else []),
        )


def _decorate_for_torch_compile(original: Callable[[Any], None]) -> Callable[[Any], None]:
    def decorate_for_torch_compile(self: Any) -> None:
        if not self.model_config.enforce_eager:
            original(self)

    return decorate_for_torch_compile


_LEAVE_TRANSFORMERS_ALONE = Patch(
    module="vllm.model_executor.models.transformers.base",
    attr="Base._decorate_for_torch_compile",
    make=_decorate_for_torch_compile,
    reason="an engine that runs transformers' code changes transformers' own class for compilation, eager or not: a trainer "
    "in the same process could build no such model any more; engines that compile are not covered",
    remove_when="vLLM compiles a subclass, or leaves the class alone in eager mode",
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
