"""The rollout's FP16 dtype, KV cache and head dtype: set before vLLM resolves its arguments, checked after.

All three use vLLM's own settings: ``dtype``, ``kv_cache_dtype``, and ``head_dtype`` in ``hf_overrides``. In exact mode the
head is ``head.ExactHeadMethod`` instead, because rows of vLLM's FP32 head may depend on the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, ConflictError, ModelError, explain

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

__all__ = ["check_resolved", "kv_cache_error", "set_arguments"]

logger = logging.getLogger(__name__)

_HALF = ("float16", "half", "torch.float16")


def set_arguments(args: EngineArgs, config: Config) -> None:
    """Write dtype, KV cache and head dtype into the engine's arguments.

    Raises:
        ConflictError: another KV cache or head dtype is set.
        ConfigError: the device does not support an FP8 KV cache.
    """
    if config.mode.scales_loss and str(args.dtype) not in _HALF:
        logger.warning(
            "jetrl_patch: set dtype='float16' instead of %r, because precision='fp16' is FP16 on both sides",
            str(args.dtype),
        )
        args.dtype = config.compute_dtype
    if config.kv_cache == "fp8":
        if args.kv_cache_dtype not in ("auto", "fp8", "fp8_e4m3"):
            raise _conflict("KV cache", args.kv_cache_dtype, "kv_cache='fp8'", "kv_cache_dtype")
        error = kv_cache_error()
        if error is not None:
            raise error
        args.kv_cache_dtype = "fp8"
    if config.fp32_head and not config.exact:
        _set_head(args)


def _set_head(args: EngineArgs) -> None:
    overrides = args.hf_overrides
    if not isinstance(overrides, Mapping):
        raise ConflictError(
            explain(
                "vLLM hf_overrides", required="a mapping, for head_dtype", found=repr(overrides), fix="pass a mapping"
            )
        )
    asked = overrides.get("head_dtype", "float32")
    if str(asked).removeprefix("torch.") != "float32":
        raise _conflict("head dtype", asked, "head_dtype='float32'", "hf_overrides['head_dtype']")
    args.hf_overrides = {**overrides, "head_dtype": "float32"}


def _conflict(what: str, asked: object, ours: str, name: str) -> ConflictError:
    return ConflictError(explain(f"vLLM {what}", required=ours, found=repr(asked), fix=f"leave {name} unset"))


def kv_cache_error() -> ConfigError | None:
    """Return the error for a machine without an FP8 KV cache, or None if vLLM has one."""
    problem = kv_cache_problem()
    if not problem:
        return None
    return ConfigError(
        explain("kv_cache='fp8'", required="a device with an FP8 KV cache", found=problem, fix="drop kv_cache")
    )


def kv_cache_problem() -> str:
    """Return why vLLM has no FP8 KV cache on this machine. Empty if it has one, or if this process sees no device."""
    from vllm.platforms import current_platform

    if current_platform.is_unspecified():
        return ""  # a driver without a device: the engine's process checks again
    if current_platform.is_cpu():
        import torch
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        if "fp8" not in CPUAttentionBackend.supported_kv_cache_dtypes:
            return "vLLM's CPU attention, which has none in this version"
        able = torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()
        return "" if able else "a CPU without AVX-512 and AMX"
    if current_platform.is_cuda():
        return "" if current_platform.has_device_capability(89) else "a GPU below compute capability 8.9"
    return f"the platform {current_platform.device_type!r}, which is untested"


def check_resolved(vllm_config: VllmConfig, config: Config) -> None:
    """Check the configuration that vLLM has resolved.

    Raises:
        ConfigError: FP16 on one side only.
        ModelError: the model or platform does not support the head dtype or the KV cache.
    """
    model = vllm_config.model_config
    half = str(model.dtype) == "torch.float16"
    if not config.quantized_rollout and half != config.mode.scales_loss:
        raise ConfigError(
            explain(
                f"vLLM dtype with precision={config.precision!r}",
                required=config.compute_dtype,
                found=str(model.dtype),
                fix="FP16 on one side alone is worse than none: use precision='fp16', which sets both sides"
                if half
                else "set dtype='float16'",
            )
        )
    if config.fp32_head and not config.exact and str(model.head_dtype) != "torch.float32":
        found, fix = str(model.head_dtype), "leave head_dtype at 'auto'"
        raise ModelError(explain("head_dtype='float32' in vLLM", required="float32", found=found, fix=fix))
    if config.kv_cache == "fp8" and _on_cpu() and model.get_head_size() % 32:
        heads, found = "heads of a multiple of 32", str(model.get_head_size())
        raise ModelError(explain("kv_cache='fp8' on a CPU", required=heads, found=found, fix="drop kv_cache"))


def _on_cpu() -> Any:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()
