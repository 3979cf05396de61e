"""The vLLM engine arguments that a quantized mode accepts from the user, in one table, grouped by meaning.

Training frameworks pass arguments to vLLM unread. Only reviewed arguments are accepted; all others are refused, including those
that a later vLLM adds. Names are those of ``EngineArgs`` and ``vllm serve``. Importing this file does not import vLLM, because a
driver and the doctor use it too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, JetrlError, explain

#: reason -> arguments that are accepted in every mode: they affect neither the computation nor the loading of weights
FREE: dict[str, str] = {
    "how much memory the KV cache gets": "gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks_override watermark",
    "when a token is computed and in which batch: an exact op gives a row the same bits in every batch": (
        "max_num_seqs max_num_batched_tokens max_num_scheduled_tokens long_prefill_token_threshold enable_chunked_prefill "
        "enable_prefix_caching prefix_caching_hash_algo scheduling_policy async_scheduling scheduler_reserve_full_isl "
        "prefill_schedule_interval stream_interval max_num_queued_reqs max_num_queued_tokens"
    ),
    "length of sequences, number of log-probs per request, random seed": "max_model_len max_logprobs seed",
    "CUDA graphs and sleep mode: exact mode turns compilation off by itself": (
        "enforce_eager cudagraph_capture_sizes max_cudagraph_capture_size enable_sleep_mode"
    ),
    "what is logged and measured": (
        "disable_log_stats aggregate_engine_logging enable_log_requests enable_log_outputs enable_log_deltas max_log_len "
        "log_config_file log_error_stack show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces "
        "kv_cache_metrics kv_cache_metrics_sample cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics "
        "enable_logging_iteration_details enable_server_load_tracking jit_monitor_mode jit_monitor_verbose profiler_config "
        "ray_workers_use_nsight served_model_name use_tqdm_on_load uvicorn_log_level disable_uvicorn_access_log "
        "disable_access_log_for_endpoints"
    ),
    "the HTTP server and its text; trainers call the engine directly, with token ids": (
        "host port root_path api_key allowed_origins allowed_methods allowed_headers allow_credentials ssl_keyfile ssl_certfile "
        "ssl_ca_certs ssl_cert_reqs ssl_ciphers enable_ssl_refresh disable_fastapi_docs h11_max_incomplete_event_size "
        "h11_max_header_count enable_request_id_headers chat_template chat_template_content_format response_role "
        "default_chat_template_kwargs trust_request_chat_template return_tokens_as_token_ids enable_auto_tool_choice "
        "exclude_tools_when_tool_choice_none tool_call_parser tool_parser_plugin reasoning_parser reasoning_parser_plugin "
        "enable_prompt_tokens_details enable_force_include_usage enable_tokenizer_info_endpoint renderer_num_workers"
    ),
    "how many images, and where they are kept; what makes other pixels of them is refused, as the trainer would not know it": (
        "limit_mm_per_prompt mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb "
        "mm_encoder_tp_mode skip_mm_profiling disable_chunked_mm_input"
    ),
    "file locations, timeouts between processes, and CPU affinity": (
        "download_dir distributed_timeout_seconds cpu_distributed_timeout_seconds shutdown_timeout fail_on_environ_validation "
        "numa_bind numa_bind_nodes numa_bind_cpus"
    ),
}

#: the same, for modes in which trainer and rollout need not be bit-equal
KERNELS: dict[str, str] = {
    "which kernel of the same formula runs outside the linears": (
        "attention_backend block_size disable_custom_all_reduce disable_cascade_attn"
    ),
    "which tokens may be sampled; a mismatch shows in the metrics": "logits_processors structured_outputs_config",
}

#: fields of ``compilation_config`` that control graph capture and do not change results
_CAPTURE = frozenset({"cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size", "cudagraph_num_of_warmups"})


class _Value(NamedTuple):
    """An argument that is accepted with some values; ``required`` and ``fix`` are for the message about the others.

    ``bad``: (value, settings, tensor-parallel size of the rollout) -> whether the value is refused.
    """

    bad: Callable[[Any, Config, int], bool]
    required: str
    fix: str = "remove it"


#: what a user may set of n-gram drafts. Other methods draft with weights that no sync carries
_DRAFTS = {"method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"}


def drafts_problem(value: Any) -> bool:
    """Whether a ``speculative_config`` asks for anything but drafts from n-grams."""
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return True
    return not (isinstance(value, Mapping) and value.get("method") == "ngram" and set(value) <= _DRAFTS)


DRAFTS_REQUIRED = f"method 'ngram', with {', '.join(sorted(_DRAFTS - {'method'}))} (other methods draft with unsynced weights)"

_VALUES: dict[str, _Value] = {
    "speculative_config": _Value(lambda value, *_: drafts_problem(value), DRAFTS_REQUIRED),
    "tensor_parallel_size": _Value(
        lambda value, _, tp: value != tp,
        "the framework's own tensor-parallel size, which also splits the trainer's sums",
        "remove it and set the framework's",
    ),
    "enable_expert_parallel": _Value(
        lambda value, *_: bool(value),
        "the framework's own expert-parallel size, which also groups the trainer's sums",
        "remove it and set the framework's",
    ),
    "dtype": _Value(
        lambda value, config, _: str(value).removeprefix("torch.") not in ("auto", config.compute_dtype), "auto or bfloat16"
    ),
    "kv_cache_dtype": _Value(
        lambda value, config, _: value not in ("auto", "bfloat16") and config.kv_cache == "auto",
        "auto or bfloat16",
        "remove it; kv_cache='fp8' (JETRL_KV_CACHE=fp8) sets it",
    ),
    "load_format": _Value(
        lambda value, *_: value not in ("auto", "dummy", "safetensors", "hf"),
        "auto, dummy, hf or safetensors (the first weight sync overwrites what is loaded)",
    ),
    "model_impl": _Value(lambda value, *_: value not in ("auto", "vllm"), "auto or vllm"),
    "hf_overrides": _Value(
        lambda value, *_: bool(value),
        "the configuration in the model's folder, which the trainer reads too",
        "remove it and change config.json, for both sides",
    ),
    "compilation_config": _Value(
        lambda value, *_: not (isinstance(value, Mapping) and set(value) <= _CAPTURE),
        f"nothing but {', '.join(sorted(_CAPTURE))}, which compute nothing",
        "remove the rest",
    ),
}


def argument_problems(
    given: Mapping[str, Any], config: Config, rollout_tp: int, name: Callable[[str], str]
) -> Iterator[JetrlError]:
    """Yield an error for each engine argument that the mode does not support. Without a quantized rollout nothing is refused.

    ``given`` holds the user's arguments for vLLM (None leaves vLLM's default), ``rollout_tp`` is the tensor-parallel size that
    the framework sets, and ``name`` returns the user's name for an argument.
    """
    if not config.quantized_rollout:
        return
    groups = FREE if config.exact else FREE | KERNELS
    accepted = {argument for names in groups.values() for argument in names.split()}
    mode = f"precision={config.precision!r}, align={config.resolved_align!r}"
    for argument, value in given.items():
        plain = argument.replace("-", "_")
        if value in (None, [], {}) or plain in accepted:
            continue
        what = f"{name(argument)} with {mode}"
        rule = _VALUES.get(plain)
        if rule is None:
            required = "an engine argument known to change neither results nor weights"
            yield ConfigError(explain(what, required=required, found=_short(value), fix="remove it"))
        elif rule.bad(value, config, rollout_tp):
            yield ConfigError(explain(what, required=rule.required, found=_short(value), fix=rule.fix))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."


# ---- Whether this machine has an FP8 KV cache; these functions import vLLM -----------------------

def check_kv_cache(exact: bool) -> None:
    """Raise ConfigError on a machine without an FP8 KV cache, in exact mode or outside."""
    if problem := kv_cache_problem(exact):
        required, fix = "a device with an FP8 KV cache", "drop kv_cache"
        raise ConfigError(explain("kv_cache='fp8'", required=required, found=problem, fix=fix))


def kv_cache_problem(exact: bool) -> str:
    """Return why this machine has no FP8 KV cache; empty if it has one, or if this process sees no device."""
    from vllm.platforms import current_platform

    if current_platform.is_unspecified():
        return ""  # in a driver without a device; the engine's process checks again
    if current_platform.is_cpu() and exact:
        return ""  # the plugin's own attention
    if current_platform.is_cpu():
        import torch
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        if "fp8" not in CPUAttentionBackend.supported_kv_cache_dtypes:
            return "vLLM's CPU attention, which has none in this version"
        return "" if torch.cpu._is_avx512_supported() else "a CPU without AVX-512"
    if current_platform.is_cuda():
        return "" if current_platform.has_device_capability(89) else "a GPU below compute capability 8.9"
    return f"the platform {current_platform.device_type!r}, which is untested"
