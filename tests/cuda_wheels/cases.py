"""What is asked of the plugin and of vLLM in each case of the matrix. Imports neither."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Case:
    """An engine's settings.

    Attributes:
        plugin: settings of the plugin; None starts vLLM without it.
        engine: engine arguments of vLLM, as JSON.
        environment: variables that the user has set.
        model: family of the checkpoint.
    """

    plugin: dict[str, Any] | None
    engine: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    model: str = "qwen3"

    @property
    def exact(self) -> bool:
        """Whether both sides are bit-equal: ``fp8-unified`` unless it says otherwise."""
        return self.plugin is not None and self.plugin.get("align", self.plugin["precision"]) in ("exact", "fp8-unified")


STOCK = Case(None)
_EXACT = {"precision": "fp8-unified"}
_LINEAR = {**_EXACT, "align": "linear"}
_FP8_CACHE = {"kv_cache": "fp8"}
_EAGER = {"enforce_eager": True}
_NO_GRAPHS = {"compilation_config": {"cudagraph_mode": "NONE"}}
#: what verl 0.9.1 passes
_VERL = {
    "compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"},
    "enable_sleep_mode": True,
    "max_num_batched_tokens": 8192,
    "logprobs_mode": "processed_logprobs",
    "load_format": "dummy",
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
}

_ONE_GPU: dict[str, Case] = {
    "bf16": Case({"precision": "bf16"}),
    "fp16": Case({"precision": "fp16"}),
    "int8-rollout": Case({"precision": "int8-rollout"}),
    "fp8-rollout": Case({"precision": "fp8-rollout"}),
    "fp8-rollout, channel": Case({"precision": "fp8-rollout", "rollout_granularity": "channel"}),
    "fp8-rollout, FP8 cache": Case({"precision": "fp8-rollout", **_FP8_CACHE}),
    "linear": Case(_LINEAR),
    "linear, FP8 cache": Case({**_LINEAR, **_FP8_CACHE}),
    "linear, verl": Case(_LINEAR, _VERL),
    "exact": Case(_EXACT),
    "exact, FP8 cache": Case({**_EXACT, **_FP8_CACHE}),
    "exact, FP32 head": Case({**_EXACT, "head_dtype": "float32"}),
    "exact, verl": Case(_EXACT, _VERL),
    "exact, eager engine": Case(_EXACT, _EAGER),
    "exact, engine without graphs": Case(_EXACT, _NO_GRAPHS),
    "exact, decode_graphs=False": Case({**_EXACT, "decode_graphs": False}),
    "exact, decode_graphs=True": Case({**_EXACT, "decode_graphs": True}),
    "exact, decode_graphs=True, eager engine": Case({**_EXACT, "decode_graphs": True}, _EAGER),
    "exact, guard": Case({**_EXACT, "guard_sqnr": 20.0}),
}
_MIXTURE = ("bf16", "fp8-rollout", "linear", "exact", "exact, FP8 cache", "exact, decode_graphs=False")
_TWO_GPUS = ("bf16", "fp16", "int8-rollout", "fp8-rollout", "linear", "exact", "exact, FP8 cache", "exact, verl")

#: name -> case; on more than one GPU only the configuration is resolved, and no layers are built
CASES: dict[str, Case] = {
    **_ONE_GPU,
    **{f"mixture, {name}": replace(_ONE_GPU[name], model="qwen3_moe") for name in _MIXTURE},
    **{
        f"{family}TP 2, {name}": replace(case, engine={**case.engine, "tensor_parallel_size": 2})
        for family, names in (("", _TWO_GPUS), ("mixture, ", ("bf16", "linear", "exact")))
        for name in names
        for case in [replace(_ONE_GPU[name], model="qwen3_moe" if family else "qwen3")]
    },
}

#: exact engines with other attention than a cache of keys and values
OTHERS = {
    "delta nets": Case(_EXACT, model="qwen3_next"),
    "delta nets, eager": Case({**_EXACT, "decode_graphs": False}, model="qwen3_next"),
    "delta nets, FP8 cache": Case({**_EXACT, **_FP8_CACHE}, model="qwen3_next"),
    "latent attention": Case(_EXACT, model="deepseek_v3"),
}

#: name -> case, the error's class, and words of its text
REFUSED: dict[str, tuple[Case, str, str]] = {
    "FlashInfer's sampler": (
        Case(_EXACT, environment={"VLLM_USE_FLASHINFER_SAMPLER": "1"}), "ModelError", "VLLM_USE_FLASHINFER_SAMPLER=0",
    ),
    "another attention": (Case(_EXACT, {"attention_backend": "FLASH_ATTN"}), "ConflictError", "found FLASH_ATTN"),
    "another KV cache": (Case(_EXACT, {"kv_cache_dtype": "fp8"}), "ConflictError", "kv_cache_dtype=fp8"),
    "a compiler beside graphs": (
        Case({**_EXACT, "decode_graphs": True}, {"compilation_config": {"mode": 3}}), "ConflictError", "found VLLM_COMPILE",
    ),
    "drafts of a model": (
        Case(_EXACT, {"speculative_config": {"method": "eagle", "model": "somewhere", "num_speculative_tokens": 2}}),
        "ConfigError", "required method 'ngram'",
    ),
    "latent attention with an FP8 cache": (
        Case({**_EXACT, **_FP8_CACHE}, model="deepseek_v3"), "ModelError", "required a BF16 cache",
    ),
    "LoRA": (Case(_LINEAR, {"enable_lora": True}), "ConflictError", "enable_lora"),
    "INT8 experts": (Case({"precision": "int8-rollout"}, model="qwen3_moe"), "ModelError", "does not quantize experts"),
}  # fmt: skip

#: the user turns it on; exact mode then decodes without graphs
V2_RUNNER = Case(_EXACT, environment={"VLLM_USE_V2_MODEL_RUNNER": "1"})
