"""The vLLM adapter: its patches, and its entries in vLLM's registries.

It uses vLLM's extension points where they exist: the registries of quantizations, out-of-tree ops and attention backends. The
entries are subclasses of vLLM's own classes, so vLLM must be fully imported first. That is why ``install`` runs when vLLM loads
its plugins or builds an engine, and not on import.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from jetrl_patch import session
from jetrl_patch.adapters.vllm import carried, compat, speculation, support
from jetrl_patch.adapters.vllm.fixes import FIXES
from jetrl_patch.patching.patch import needed, replacement
from jetrl_patch.registry import Adapter, Config, Journal, Patch, Rollout


@replacement
def _create_engine_config(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    from jetrl_patch.adapters.vllm.engine import check_engine, generates, prepare_arguments

    if not generates(self):
        return original(self, *args, **kwargs)
    ADAPTER.install()
    prepare_arguments(self, session.active_config())
    vllm_config = original(self, *args, **kwargs)
    check_engine(vllm_config, session.active_config())
    return vllm_config


@replacement
def _load_model(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    from jetrl_patch.adapters.vllm.worker import attach

    if self.vllm_config.model_config.runner_type == "pooling":
        return original(self, *args, **kwargs)
    ADAPTER.prepare_worker(self)
    result = original(self, *args, **kwargs)
    attach(self, session.active_config())
    return result


@replacement
def _execute_model(original: Any, self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
    from jetrl_patch.adapters.vllm.writes import check_serving

    check_serving(self, scheduler_output)
    return original(self, scheduler_output, *args, **kwargs)


@replacement
def _reload_weights(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    from jetrl_patch.adapters.vllm.writes import refused

    receiver = getattr(self, "jetrl_receiver", None)
    if receiver is None:  # an engine that scores or embeds
        return original(self, *args, **kwargs)
    raise refused(receiver, "a call of the worker's reload_weights")


@replacement
def _compile_or_warm_up_model(original: Any, self: Any) -> Any:
    from jetrl_patch.adapters.vllm.graphs import prove_graphs

    result = original(self)
    prove_graphs(self)
    return result


@replacement
def _initialize_model(original: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    from jetrl_patch.adapters.vllm.tower import share

    model = original(vllm_config, *args, **kwargs)
    share(model, vllm_config.model_config.hf_config)
    return model


# ---- The sampler of vLLM's V2 model runner -------------------------------------------------------
# Its Triton kernels divide and sum in other ways than torch, which the V1 runner and the trainer use. Everything else on the way
# to a log-prob is shared with V1, or only masks tokens.

@replacement
def _compute_token_logprobs(original: Any, logits: Any, token_ids: Any) -> Any:
    import torch

    from jetrl_patch.exact.logprob import blocks, log_softmax

    found = logits.new_empty(token_ids.shape, dtype=torch.float32)
    for part in blocks(logits):  # V2 does not reserve memory for a copy of all rows
        found[part] = log_softmax(logits[part].float(), 1.0).gather(-1, token_ids[part].long())
    return found


@replacement
def _apply_temperature(original: Any, logits: Any, expanded_idx_mapping: Any, temperature: Any) -> None:
    by_row = temperature[expanded_idx_mapping]
    logits.div_(by_row.masked_fill(by_row == 0, 1.0).unsqueeze(1))  # 0 is greedy


PATCHES: tuple[Patch, ...] = (
    Patch(
        "vllm.engine.arg_utils", "EngineArgs.create_engine_config", _create_engine_config,
        reason="without it vLLM builds an unquantized, compiled engine and ignores conflicting settings. Does not cover a "
        "VllmConfig built by hand, whose workers refuse to load",
        remove_when="vLLM's EngineArgs.create_engine_config calls its plugins (vllm.general_plugins) before and after its work",
    ),
    Patch(
        "vllm.v1.worker.gpu_worker", "Worker.load_model", _load_model,
        reason="without it a worker has no weight receiver and its model is not audited. Workers that do not derive from "
        "gpu_worker.Worker are not covered",
        remove_when="vLLM's Worker.load_model calls a hook of worker_extension_cls once the model is loaded",
    ),
    Patch(
        "vllm.v1.worker.gpu_worker", "Worker.compile_or_warm_up_model", _compile_or_warm_up_model,
        when=lambda config: config.may_capture,
        reason="without it exact mode would replay captured decoding steps without proof that they have the bits of eager ones. "
        "Workers that override the method, as on a CPU, capture nothing",
        remove_when="vLLM's Worker.compile_or_warm_up_model calls a hook of worker_extension_cls once graphs are captured",
    ),
    Patch(
        "vllm.v1.worker.gpu_worker", "Worker.execute_model", _execute_model,
        always="a worker must not generate after a failed sync, even if its process is no longer patched",
        reason="without it an engine would generate from half-updated weights after a failed sync",
        remove_when="vLLM's WeightTransferEngine gets a method that Worker.execute_model calls before each step, and may raise",
    ),
    Patch(
        "vllm.v1.worker.gpu_worker", "Worker.reload_weights", _reload_weights,
        when=lambda config: config.quantized_rollout,
        reason="without it a trainer that the plugin does not know would write BF16 over quantized weights, past the receiver",
        remove_when="vLLM's Worker.reload_weights asks the model's quantization before it touches a parameter",
    ),
    Patch(
        "vllm.model_executor.model_loader.base_loader", "initialize_model", _initialize_model,
        when=lambda config: config.exact,
        reason="vLLM's vision towers round differently from transformers', and its DeepStack adds before the residual. Does not "
        "cover loaders that build a model themselves (tensorizer)",
        remove_when="vLLM's registry of out-of-tree layers (CustomOp, PluggableLayer) has its vision towers and decoder layers",
    ),
    Patch(
        "vllm.v1.worker.gpu.sample.logprob", "compute_token_logprobs", _compute_token_logprobs,
        when=lambda config: config.exact,
        reason="the V2 model runner computes log-probs in a Triton kernel, whose sums differ from those of torch's log-softmax",
        remove_when="vLLM's V2 model runner computes log-probs with torch.log_softmax in FP32, or its Sampler can be replaced",
    ),
    Patch(
        "vllm.v1.worker.gpu.sample.states", "apply_temperature", _apply_temperature,
        when=lambda config: config.exact,
        reason="the V2 model runner divides by the temperature in a Triton kernel, which on a GPU may not round to nearest",
        remove_when="vLLM's apply_temperature of the V2 model runner divides with tl.div_rn",
    ),
)

_MASKS = "vLLM returns sampling masks from each model runner, for requests without a top_k beside others too"
#: in every mode
RECORDING: tuple[Patch, ...] = (
    Patch(
        "vllm.v1.sample.sampler", "Sampler.sample", support.sampler_sample,
        reason="the V1 model runner does not say which tokens top_k, top_p and min_p left, which the trainer must leave too",
        remove_when=_MASKS,
    ),
    Patch(
        "vllm.v1.worker.gpu_model_runner", "GPUModelRunner.sample_tokens", support.sample_tokens,
        reason="the V1 model runner applies a grammar's bans to the logits before the sampler, which is not told",
        remove_when=_MASKS,
    ),
)
#: of releases with sampling masks
MASKING: tuple[Patch, ...] = (
    Patch(
        "vllm.v1.worker.gpu_model_runner", "GPUModelRunner.sample_tokens", support.sample_tokens_with_masks,
        reason="the output of the V1 model runner has a field for these tokens, which the runner leaves empty",
        remove_when=_MASKS,
    ),
    Patch(
        "vllm.v1.worker.gpu.sample.sampler", "Sampler.__call__", support.v2_sampler_call,
        reason="return_sampling_mask=True would refuse requests without a top_k, and record the whole vocabulary of some",
        remove_when=_MASKS,
    ),
    Patch(
        "vllm.v1.core.sched.scheduler", "Scheduler.__init__", support.scheduler_init,
        reason="return_sampling_mask=True would refuse the V1 model runner, and requests without a top_k",
        remove_when=_MASKS,
    ),
)


class VllmAdapter(Adapter):
    """Patches vLLM and fills its registries."""

    name = "vllm"
    order = 1
    requires = ("torch", "vllm")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._session: tuple[Config, Journal] | None = None
        self._filled = False  # whether ``install`` has filled its registries

    def rollout(self) -> Rollout:
        from jetrl_patch.adapters.vllm import sample

        return sample

    def on_apply(self, config: Config, journal: Journal) -> None:
        """Keep the settings and the journal for ``install``, which fills the registries later."""
        self._session, self._filled = (config, journal), False

    def on_undo(self) -> None:
        self._session = None

    def install(self) -> None:
        """Fill vLLM's registries, unless they are filled or this process is not patched."""
        with self._lock:
            if self._session is not None and not self._filled:
                from jetrl_patch.adapters.vllm.quant import fill

                fill(*self._session)
                self._filled = True

    def prepare_worker(self, worker: Any) -> None:
        """Do what exact mode needs before a worker loads its model."""
        with self._lock:
            if self._session is not None and self._session[0].exact:
                from jetrl_patch.adapters.vllm.quant import prepare_worker

                prepare_worker(worker, *self._session)

    def patches(self, config: Config) -> Sequence[Patch]:
        recording = (*RECORDING, *(MASKING if compat.returns_masks() else carried.PATCHES))
        drafts = speculation.ON_CPU if compat.drafts_on_cpu() else ()
        return needed((*PATCHES, *recording, *speculation.PATCHES, *drafts, *FIXES), config)


ADAPTER = VllmAdapter()
