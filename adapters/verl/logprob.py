"""Exact mode and FP16: the trainer's log-prob of a token is computed as the rollout computes it.

vLLM's sampler: logits to FP32, divided by the temperature in FP32, log-softmax in FP32, tokens that verl bans at −inf.
verl's trainer divides BF16 logits in BF16 and then takes another formula per dtype (BF16-rounded log-probs for BF16
logits, ``x − logsumexp`` for FP32 ones), over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jetrl_patch.gate import while_config

#: what banned logits become: exp of it is 0 like that of -inf, and entropy's 0 · logit stays 0 instead of NaN
BANNED = -1e30

_same_log_probs = while_config(lambda config: config.same_log_probs)


@_same_log_probs
def scale_logits(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces ``transformer_impl._scale_logits_by_temperature``: logits [..., V] divided in FP32."""

    def _scale_logits_by_temperature(logits: Any, temperature: Any, *, is_unit_temperature: bool) -> Any:
        if is_unit_temperature or bool((temperature == 1.0).all()):
            return logits
        return logits.float() / temperature.clamp(min=1e-8).float()

    return _scale_logits_by_temperature


@_same_log_probs
def logprobs_from_logits(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces ``transformer_impl.logprobs_from_logits``: logits [..., V], labels [...] -> float32 [...]."""

    def logprobs_from_logits(logits: Any, labels: Any, inplace_backward: bool = True) -> Any:
        from jetrl_patch.exact.ops import token_log_probs

        return token_log_probs(logits, labels)

    return logprobs_from_logits


@_same_log_probs
def prepare_model_outputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``FSDPEngineWithLMHead.prepare_model_outputs``: bans the tokens that the rollout cannot sample."""

    def prepare_model_outputs(self: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = getattr(self, "_jetrl", None)
        if prepared is not None and getattr(output, "logits", None) is not None:
            output.logits = ban(output.logits, prepared.vocabulary, prepared.banned)
        return original(self, output, *args, **kwargs)

    return prepare_model_outputs


def ban(logits: Any, vocabulary: int | None, banned: list[int]) -> Any:
    """Logits [..., V] with what lies beyond the tokenizer, and the banned tokens, out of the distribution.

    verl masks the same ones in vLLM (``monkey_patch_compute_logits``). Returns the same tensor when there are none.
    """
    import torch

    width = logits.shape[-1]
    tail = width if vocabulary is None else min(vocabulary, width)
    if tail == width and not banned:
        return logits
    out = torch.zeros(width, dtype=torch.bool, device=logits.device)
    out[tail:] = True
    if banned:
        out[torch.tensor(banned, device=logits.device)] = True
    if logits.dtype == torch.float16:  # which cannot hold the number
        logits = logits.float()
    return logits.masked_fill(out, BANNED)
