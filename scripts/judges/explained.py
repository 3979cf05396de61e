"""Why a test of others ends differently with the plugin than without it."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

__all__ = ["EXPLAINED", "reason"]


@dataclass(frozen=True)
class Explained:
    """Patterns of suites and tests, the arms, how the tests end there, and one sentence."""

    suite: str
    test: str
    arms: tuple[str, ...]
    to: str
    why: str


_EXACT = ("exact",)
_MODELS = "transformers, *"
#: why tests of transformers' models fail with converted ones -> parts of their names
_OF_MODELS = {
    "asks for a key/value cache: the trainer of exact mode computes whole sequences and refuses one by name": (
        "assisted_decoding", "use_cache", "generate_continue", "static_cache", "past_key_values_format",
        "generate_from_inputs_embeds", "generate_from_random_inputs_embeds",
    ),
    "changes the attention or the experts of a converted model, or asks which of transformers' it has": (
        "set_attention_dynamically", "sdpa_can_dispatch", "eager_matches_batched", "attn_implementation_composite",
    ),
    "builds a model that exact mode refuses by name": (
        "correct_missing_keys", "sliding_window_mask", "tied_weights_keys", "reverse_loading_mapping",
        "olmoe*batching_equivalence",
    ),
    "replaces embedding and head of a converted model by others, in FP32": ("resize",),
    "expects attention weights, which the shared kernel does not return": ("attention_outputs",),
    "passes a mask of queries and keys, which exact mode refuses by name": ("custom_4d_attention_mask",),
    "reads results with NumPy, which has no BF16": ("test_determinism",),
}  # fmt: skip
EXPLAINED = (
    *(Explained(_MODELS, f"*{part}*", _EXACT, "failed", why) for why, parts in _OF_MODELS.items() for part in parts),
    Explained(_MODELS, "*padding_matches_padding_free*", _EXACT, "passed", "passes: no bit of an exact model depends on padding"),
    Explained("vLLM determinism, qwen3_vl", "*video*", _EXACT, "failed", "sends videos, which exact mode refuses by name"),
    Explained(
        "vLLM determinism*", "*::test_logprobs_without_batch_invariance_should_fail*", _EXACT, "failed",
        "passes only if log-probs depend on the batch, which a stock engine's do and an exact engine's do not",
    ),
    Explained(
        "TRL, vLLM", "*", ("bf16", *_EXACT), "passed",
        "passes; without the plugin vLLM on a CPU with AVX-512 cannot load weights twice: parameters lose their `weight_loader`",
    ),
    Explained(
        "TRL, vLLM", "*_with_additional_generation_kwargs", ("bf16", *_EXACT), "failed",
        "samples with top-p and a penalty, which exact mode refuses, as every precision does with TRL's correction",
    ),
    Explained("TRL, vLLM", "*vllm_and_peft", _EXACT, "failed", "trains LoRA's `modules_to_save`, which exact mode refuses"),
    Explained(
        "verl on CPU", "*::test_build_kv_transfer_config_prefill_role_maps_to_kv_producer", ("bf16", *_EXACT), "failed",
        "expects the device cuda on a machine without a GPU; the plugin's platform for CPUs says cpu",
    ),
    Explained(
        "RL-Kernel operators", "*::test_native_swiglu_matches_fp32_reference*", _EXACT, "failed",
        "expects one rounding; SiLU(gate) is rounded to BF16 before the product with up, as in Hugging Face's models",
    ),
    Explained(
        "vLLM determinism*", "*", _EXACT, "passed", "passes with an exact engine; a stock engine's log-probs depend on the batch",
    ),
)  # fmt: skip


def reason(suite: str, arm: str, test: str, to: str) -> str | None:
    """The first explanation why a test ends like ``to`` in this arm, or None."""
    ended = (one for one in EXPLAINED if arm in one.arms and one.to == to)
    return next((one.why for one in ended if fnmatchcase(suite, one.suite) and fnmatchcase(test, one.test)), None)
