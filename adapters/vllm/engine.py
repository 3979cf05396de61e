"""Engine settings: set what a mode needs, and refuse by name what it does not support.

This runs in the process that builds the engine, before a worker starts, so users see the errors.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jetrl_patch.adapters.vllm.arguments import check_kv_cache
from jetrl_patch.adapters.vllm.compat import (
    backends_per_kind,
    delta_net_problems,
    routes_error,
    sampling_switches,
    sequence_parallel,
)
from jetrl_patch.adapters.vllm.graphs import asks_for_graphs, capture_decoding
from jetrl_patch.adapters.vllm.quant import quantization_name
from jetrl_patch.adapters.vllm.speculation import check_drafts
from jetrl_patch.backends import choose_backend
from jetrl_patch.backends.capability import refuse_exact_on
from jetrl_patch.config import Config
from jetrl_patch.errors import UNQUANTIZED, ConfigError, ConflictError, ModelError, explain
from jetrl_patch.exact.kv_cache import VLLM_DTYPE
from jetrl_patch.fp8.mixture import ExpertSplit
from jetrl_patch.models.families import DENSE_BLOCKS, Family, record_of
from jetrl_patch.models.layers import cut_error, is_cut, is_quantized
from jetrl_patch.models.structure import check_device, check_structure, expert_sizes, has_latent_attention
from jetrl_patch.trainer.foreign import calling_package, unknown_trainer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs


# ---- FP16, KV cache and head dtype: set before vLLM resolves its arguments, checked afterwards ----
# All three are vLLM's own settings: ``dtype``, ``kv_cache_dtype``, and ``head_dtype`` in ``hf_overrides``. In exact mode the head
# is ``ExactHeadMethod`` instead, because a row of vLLM's FP32 head may depend on the batch.

logger = logging.getLogger(__name__)

_HALF = ("float16", "half", "torch.float16")


def set_arguments(args: EngineArgs, config: Config) -> None:
    """Write dtype, KV cache and head dtype into the engine's arguments.

    Raises ConflictError if another KV cache or head dtype is set, ConfigError if the device does not support an FP8 KV cache.
    """
    if config.mode.scales_loss and str(args.dtype) not in _HALF:
        words = "jetrl_patch: set dtype='float16' instead of %r, because precision='fp16' is FP16 on both sides"
        logger.warning(words, str(args.dtype))
        args.dtype = config.compute_dtype
    if config.kv_cache == "fp8":
        if args.kv_cache_dtype not in ("auto", "fp8", "fp8_e4m3"):
            raise _conflict("KV cache", args.kv_cache_dtype, "kv_cache='fp8'", "kv_cache_dtype")
        check_kv_cache(config.exact)
        if not config.exact:
            args.kv_cache_dtype = "fp8"
        else:  # on a CPU the cache stays BF16 and holds rounded values
            args.kv_cache_dtype = "auto" if _on_cpu() else VLLM_DTYPE
    if config.fp32_head and not config.exact:
        overrides = args.hf_overrides
        if not isinstance(overrides, Mapping):
            required, fix = "a mapping, for head_dtype", "pass a mapping"
            raise ConflictError(explain("vLLM hf_overrides", required=required, found=repr(overrides), fix=fix))
        asked = overrides.get("head_dtype", "float32")
        if str(asked).removeprefix("torch.") != "float32":
            raise _conflict("head dtype", asked, "head_dtype='float32'", "hf_overrides['head_dtype']")
        args.hf_overrides = {**overrides, "head_dtype": "float32"}


def _conflict(what: str, asked: object, ours: str, name: str) -> ConflictError:
    return ConflictError(explain(f"vLLM {what}", required=ours, found=repr(asked), fix=f"leave {name} unset"))


def check_resolved(vllm_config: VllmConfig, config: Config) -> None:
    """Check the configuration that vLLM has resolved.

    Raises ConfigError for FP16 on one side only, ModelError if model or platform do not support the head dtype or the KV cache.
    """
    model = vllm_config.model_config
    half = str(model.dtype) == "torch.float16"
    if not config.quantized_rollout and half != config.mode.scales_loss:
        both = "FP16 on one side alone is worse than none: use precision='fp16', which sets both sides"
        what, fix = f"vLLM dtype with precision={config.precision!r}", both if half else "set dtype='float16'"
        raise ConfigError(explain(what, required=config.compute_dtype, found=str(model.dtype), fix=fix))
    if config.fp32_head and not config.exact and str(model.head_dtype) != "torch.float32":
        found, fix = str(model.head_dtype), "leave head_dtype at 'auto'"
        raise ModelError(explain("head_dtype='float32' in vLLM", required="float32", found=found, fix=fix))
    if config.kv_cache == "fp8" and not config.exact and _on_cpu() and model.get_head_size() % 32:
        heads, found = "heads of a multiple of 32", str(model.get_head_size())
        raise ModelError(explain("kv_cache='fp8' on a CPU", required=heads, found=found, fix="drop kv_cache"))


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


# ---- The arguments, and the configuration that vLLM makes of them --------------------------------

def generates(args: EngineArgs) -> bool:
    """Whether an engine generates text. One that scores or embeds is no rollout, and stays as the user built it."""
    return args.runner != "pooling" and (args.runner != "auto" or args.create_model_config().runner_type != "pooling")


def prepare_arguments(args: EngineArgs, config: Config) -> None:
    """Set the quantization, the attention, and CUDA graphs or eager mode, before vLLM resolves the arguments.

    Raises:
        ConflictError: another quantization or attention backend, LoRA or the like is set.
        ConfigError: a dtype other than BF16 or unsupported drafts are set, or this version does not patch the trainer.
        VersionError: the engine shall return the chosen experts, and this vLLM cannot return those of the plugin's router; or it
            shall verify drafts on a CPU, and this vLLM cannot.
    """
    if config.changes_rollout and (package := calling_package()):
        raise unknown_trainer(package, config)
    set_arguments(args, config)
    if not config.quantized_rollout:
        return
    if args.enable_return_routed_experts and (error := routes_error()) is not None:
        raise error
    ours = quantization_name(config)
    if args.quantization not in (None, ours) or args.quantization_config is not None:
        required, found = f"{ours!r}, for precision={config.precision!r}", repr(args.quantization or args.quantization_config)
        fix = f"leave quantization unset, or use {UNQUANTIZED}"
        raise ConflictError(explain("vLLM quantization", required=required, found=found, fix=fix))
    if str(args.dtype).removeprefix("torch.") not in ("auto", "bfloat16"):
        required, fix = "bfloat16, for quantized linears", "leave dtype at 'auto' or set it to 'bfloat16'"
        raise ConfigError(explain("vLLM dtype", required=required, found=str(args.dtype), fix=fix))
    refused = {"enable_lora": bool(args.enable_lora), "weight_transfer_config": args.weight_transfer_config is not None}
    if config.exact:
        refused |= {
            "pipeline_parallel_size": args.pipeline_parallel_size > 1,
            "decode_context_parallel_size": args.decode_context_parallel_size > 1,
            "prefill_context_parallel_size": args.prefill_context_parallel_size > 1,
            f"kv_cache_dtype={args.kv_cache_dtype}": (
                config.kv_cache == "auto" and args.kv_cache_dtype not in ("auto", "bfloat16")
            ),
            "limit_mm_per_prompt for videos": bool((args.limit_mm_per_prompt or {}).get("video")),
        }
    if unsupported := _present(refused):
        both = args.enable_lora or args.weight_transfer_config is not None
        fix = "Turn it off, or use align='linear'." if config.exact and not both else "Turn it off."
        mode = f"precision={config.precision!r} with align={config.resolved_align!r}"
        raise ConflictError(f"{mode} does not support vLLM's {', '.join(unsupported)}. {fix}")
    if config.exact:
        check_drafts(args.speculative_config, _on_cpu())
        choose_attention(args)
        # vLLM then refuses videos, which have not been tried
        args.limit_mm_per_prompt = {**(args.limit_mm_per_prompt or {}), "video": 0}
        # a window that is accepted holds every context; vLLM then refuses a longer one
        args.disable_sliding_window = True
        if args.mamba_ssm_cache_dtype == "auto":  # of gated delta nets; rounding a state would give it other bits
            args.mamba_ssm_cache_dtype = "float32"
    args.quantization = ours
    if config.exact and not _on_cpu() and asks_for_graphs(args, config):
        capture_decoding(args, config)
    elif not args.enforce_eager and (config.exact or _on_cpu()):
        fusing, untraced = "a compiled graph fuses ops and changes their rounding", "the quantized CPU kernels cannot be traced"
        logger.warning("jetrl_patch: set enforce_eager=True, because %s", fusing if config.exact else untraced)
        args.enforce_eager = True


def _present(problems: Mapping[str, bool]) -> list[str]:
    return [what for what, there in problems.items() if there]


def choose_attention(args: EngineArgs) -> None:
    """Select the exact attention on CUDA, registered as CUSTOM. On a CPU it has replaced vLLM's only backend.

    Raises ConflictError if another attention backend is set.
    """
    from vllm.config import AttentionConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if _on_cpu():
        return
    ours = AttentionBackendEnum.CUSTOM
    settings: Any = args.attention_config
    asked = [AttentionConfig.validate_backend_before(args.attention_backend), settings.backend]
    for other in (*asked, *backends_per_kind(settings)):
        if other not in (None, ours):
            required, found = "the exact attention, for align='exact'", getattr(other, "name", other)
            fix = "leave the attention backend unset, or use align='linear'"
            raise ConflictError(explain("vLLM attention backend", required=required, found=found, fix=fix))
    if settings.backend is None:
        args.attention_backend = ours


def check_engine(vllm_config: VllmConfig, config: Config) -> None:
    """Check the configuration that vLLM has resolved.

    Raises:
        ModelError: the structure, the family, the attention or the tensor-parallel split is not supported.
        ConflictError: vLLM's batch-invariant kernels are on.
        ConfigError: the device lacks the ops of exact mode.
    """
    from vllm import envs
    from vllm.platforms import current_platform

    check_resolved(vllm_config, config)
    if not config.quantized_rollout:
        return
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    check_structure(model.hf_config, config)
    _check_rotary(model)
    if envs.VLLM_BATCH_INVARIANT:
        what, required = "VLLM_BATCH_INVARIANT with a quantized rollout", "the kernels that the trainer shares"
        found, fix = "'1', which replaces torch's operators only in the engine", "unset it; align='exact' does not need it"
        raise ConflictError(explain(what, required=required, found=found, fix=fix))
    family = record_of(model.hf_config)
    if family.mixture:
        _check_experts(vllm_config, family)
        check_device(model.hf_config, str(current_platform.device_type))
    if config.exact:
        _check_exact(vllm_config, model.hf_config, config)
    if config.channelwise:
        return  # one scale per row: no split cuts a block
    tp = parallel.tensor_parallel_size
    if tp > 1 and config.on_cut == "refuse":
        # row-parallel layers whose share of K is not a multiple of the block; ``method`` checks the others as it loads
        split = family.split_layers(model.hf_text_config)
        quantized = {name: k for name, k in split.items() if is_quantized(name, config.exclude)}
        if cut := [name for name, k in quantized.items() if k % tp == 0 and is_cut(name, k, tp, config.scales)]:
            raise cut_error(cut, tp, config.scales)


def _check_rotary(model: Any) -> None:
    """Raise ModelError if angles would depend on the engine's limit here, but on a batch's longest sequence in the trainer."""
    text = model.hf_text_config
    rope = getattr(text, "rope_parameters", None) or {}
    kind = rope.get("rope_type")
    if kind not in ("longrope", "dynamic"):
        return
    original = rope.get("original_max_position_embeddings") or text.max_position_embeddings
    if model.max_model_len > original:
        required = f"max_model_len of at most {original} (above it vLLM uses one set of angles for every sequence; "
        required += "in transformers they depend on the longest sequence of the batch)"
        fix = "shorten prompts and responses, or use another model"
        what = f"rope type {kind!r} with a quantized rollout"
        raise ModelError(explain(what, required=required, found=str(model.max_model_len), fix=fix))


def _check_experts(vllm_config: VllmConfig, family: Family) -> None:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    dense = [s.key for s in family.settings if s.key in DENSE_BLOCKS and s.problem(model.hf_text_config)]
    placement = parallel.expert_placement_strategy
    problems = {
        f"data_parallel_size={parallel.data_parallel_size}": parallel.data_parallel_size > 1,
        "enable_eplb": parallel.enable_eplb,
        "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": bool(os.environ.get("VLLM_MOE_ROUTING_SIMULATION_STRATEGY")),
        f"expert_placement_strategy={placement!r}": placement != "linear",
        f"dense blocks ({', '.join(dense)})": bool(dense),
    }
    if found := ", ".join(_present(problems)):
        required = "the model's routes, and experts in order over tensor- or expert-parallel ranks"
        required += ", in every block" if dense else ""
        fix = f"turn it off, use a dense model, or {UNQUANTIZED}"
        raise ModelError(explain("experts in FP8 in vLLM", required=required, found=found, fix=fix))
    tp = parallel.tensor_parallel_size
    split = ExpertSplit.of(tp, tp if parallel.enable_expert_parallel else 1)
    sizes = expert_sizes(model.hf_config)
    if sizes is not None:
        split.check(f"the experts of {family.causal_lm}", *sizes)


def _check_exact(vllm_config: VllmConfig, hf_config: Any, config: Config) -> None:
    from vllm.platforms import current_platform

    from jetrl_patch.exact.modules import check_family, check_kernels

    model = vllm_config.model_config
    check_kernels(hf_config, config, str(current_platform.device_type))
    device_problems(vllm_config, config)
    family = check_family(hf_config)
    problems = {
        "model_impl='transformers'": model.using_transformers_backend() and family.rollout == "vllm",
        "speculative decoding of gated delta nets": family.delta_net and vllm_config.speculative_config is not None,
        "VLLM_MLA_DISABLE": has_latent_attention(hf_config) and not model.use_mla,
        "head_dtype other than bfloat16": str(model.head_dtype) != "torch.bfloat16",
        "CUDA graphs of the V2 model runner (set enforce_eager=True)": (
            vllm_config.use_v2_model_runner and bool(vllm_config.compilation_config.cudagraph_mode)
        ),
        **(_mm_problems(vllm_config) if family.tower else {}),
        "FlashInfer's sampler, whose log-probs vary with the batch (set VLLM_USE_FLASHINFER_SAMPLER=0)": (
            not _on_cpu() and os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0") != "0"
        ),
    }
    split = [f"sequence parallelism ({name})" for name in sequence_parallel(vllm_config)]
    states = delta_net_problems(vllm_config) if family.delta_net else []
    if found := _present(problems) + sampling_switches(vllm_config) + split + states:
        why = "trainer and rollout would differ. Turn it off, or use align='linear'."
        raise ModelError(f"align='exact' does not support {', '.join(found)}: {why}")


def _mm_problems(vllm_config: VllmConfig) -> dict[str, bool]:
    """What would bypass or change the trainer's vision tower."""
    mm = vllm_config.model_config.multimodal_config
    return {
        "CUDA graphs of the vision tower (cudagraph_mm_encoder)": bool(
            getattr(vllm_config.compilation_config, "cudagraph_mm_encoder", False)
        ),
        "mm_device_do_normalize": bool(getattr(mm, "mm_device_do_normalize", False)),
        "enable_mm_embeds": bool(getattr(mm, "enable_mm_embeds", False)),
    }


def device_problems(vllm_config: VllmConfig, config: Config) -> None:
    """Check what the device can run, and choose the backend of latent attention on a GPU.

    The capability is what the driver tells vLLM's platform. Asking torch, or importing DeepGEMM, would initialize CUDA, which
    takes memory of the first GPU, and this process could then not be forked. So a worker chooses the GEMM backend.

    Raises ConfigError if the device lacks the exact ops or the backend, ModelError if no attention kernel fits the head width.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        choose_backend(config.backend, "cpu", config.scale_format)
        return
    device = "cuda" if current_platform.is_cuda() else current_platform.device_type
    found = current_platform.get_device_capability()
    sm = None if found is None else (found.major, found.minor)
    refuse_exact_on(device, sm)
    choose_backend(config.backend, device, config.scale_format, sm)
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from jetrl_patch.kernels.attention import check_head_dim

    if has_latent_attention(vllm_config.model_config.hf_config):  # under the name of vLLM's backend, as CUSTOM has none for it
        settings: Any = vllm_config.attention_config
        settings.backend = AttentionBackendEnum.TRITON_MLA
    else:
        check_head_dim(vllm_config.model_config.get_head_size())
