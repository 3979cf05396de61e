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

from jetrl_patch.adapters.vllm.fixes import LEAVE_TRANSFORMERS_ALONE, model_fixes, process_fixes
from jetrl_patch.registry import Adapter, Config, Journal, Patch, Services


class VllmAdapter(Adapter):
    """Patches vLLM and fills its registries."""

    name = "vllm"
    requires = ("torch", "vllm")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._session: tuple[Config, Journal] | None = None
        self._filled = False

    def services(self) -> Services:
        """Offer the rollout engine."""
        from jetrl_patch.adapters.vllm import sample

        return Services(rollout=sample)

    def on_apply(self, config: Config, journal: Journal) -> None:
        """Keep the settings and the journal for ``install``, which fills the registries later."""
        self._session = (config, journal)

    def on_undo(self) -> None:
        """Drop them."""
        self._session, self._filled = None, False

    def install(self) -> None:
        """Fill vLLM's registries, unless they are filled or this process is not patched."""
        with self._lock:
            if self._session is None or self._filled:
                return
            from jetrl_patch.adapters.vllm.quant import fill

            fill(*self._session)
            self._filled = True

    def patches(self, config: Config) -> Sequence[Patch]:
        """The engine's settings, the worker's load and step, and fixes of vLLM's bugs."""
        return (
            Patch(
                "vllm.engine.arg_utils", "EngineArgs.create_engine_config",
                functools.partial(_create_engine_config, adapter=self, config=config),
                reason="without it vLLM builds an unquantized, compiled engine and ignores conflicting settings. Does not cover "
                "a VllmConfig built by hand, whose workers refuse to load",
                remove_when="vLLM's EngineArgs.create_engine_config calls general plugins (vllm.general_plugins) before and "
                "after it builds the VllmConfig",
            ),
            Patch(
                "vllm.v1.worker.gpu_worker", "Worker.load_model", functools.partial(_load_model, config=config),
                reason="without it a worker has no weight receiver and its model is not audited. Workers that do not derive "
                "from gpu_worker.Worker are not covered",
                remove_when="vLLM's Worker.load_model calls a hook of worker_extension_cls once the model is loaded",
            ),
            *([_PROVE_GRAPHS] if config.may_capture else []),
            Patch(
                "vllm.v1.worker.gpu_worker", "Worker.execute_model", _execute_model,
                always="a worker must not generate after a failed sync, even if its process is no longer patched",
                reason="without it an engine would generate from half-updated weights after a failed sync",
                remove_when="vLLM's WeightTransferEngine gets a method that Worker.execute_model calls before each step and "
                "that may raise",
            ),
            *model_fixes(),
            *process_fixes(),
            *([LEAVE_TRANSFORMERS_ALONE] if config.exact else []),
        )  # fmt: skip


def _compile_or_warm_up_model(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def compile_or_warm_up_model(self: Any) -> Any:
        from jetrl_patch.adapters.vllm.graphs import prove_graphs

        result = original(self)
        prove_graphs(self)
        return result

    return compile_or_warm_up_model


_PROVE_GRAPHS = Patch(
    "vllm.v1.worker.gpu_worker", "Worker.compile_or_warm_up_model", _compile_or_warm_up_model,
    reason="without it exact mode would replay captured decoding steps without proof that they have the bits of eager ones. "
    "Workers that override the method, as on a CPU, capture nothing",
    remove_when="vLLM's Worker.compile_or_warm_up_model calls a hook of worker_extension_cls once graphs are captured",
)  # fmt: skip


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
