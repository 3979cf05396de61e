"""Compute the trainer's log-probs as the rollout does, in exact mode and FP16.

vLLM's sampler casts logits to FP32, divides by the temperature, sets the tokens that verl bans to −inf and takes the
log-softmax, all in FP32. verl's trainer divides BF16 logits in BF16. It then uses a formula per dtype (log-probs rounded to
BF16 for BF16 logits, ``x − logsumexp`` for FP32) over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jetrl_patch.gate import while_config

#: value of a banned logit: its exp is 0 as for -inf, and 0 · logit in the entropy is 0 instead of NaN
BANNED = -1e30

#: marks a ``make`` that acts only in modes whose log-probs follow the rollout's formula
same_log_probs = while_config(lambda config: config.same_log_probs)


@same_log_probs
def scale_logits(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``transformer_impl._scale_logits_by_temperature``: divide logits [..., V] in FP32."""

    def _scale_logits_by_temperature(logits: Any, temperature: Any, *, is_unit_temperature: bool) -> Any:
        if is_unit_temperature or bool((temperature == 1.0).all()):
            return logits
        return logits.float() / temperature.clamp(min=1e-8).float()

    return _scale_logits_by_temperature


@same_log_probs
def logprobs_from_logits(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``transformer_impl.logprobs_from_logits``: logits [..., V], labels [...] -> float32 [...]."""

    def logprobs_from_logits(logits: Any, labels: Any, inplace_backward: bool = True) -> Any:
        from jetrl_patch.exact.ops import token_log_probs

        return token_log_probs(logits, labels)

    return logprobs_from_logits


@same_log_probs
def prepare_model_outputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``FSDPEngineWithLMHead.prepare_model_outputs``: ban the tokens that the rollout cannot sample."""

    def prepare_model_outputs(self: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = getattr(self, "_jetrl", None)
        if prepared is not None and getattr(output, "logits", None) is not None:
            output.logits = ban(output.logits, prepared.vocabulary, prepared.banned)
        return original(self, output, *args, **kwargs)

    return prepare_model_outputs


def ban(logits: Any, vocabulary: int | None, banned: list[int]) -> Any:
    """Remove the banned tokens, and those beyond the tokenizer, from the distribution of logits [..., V].

    verl masks the same tokens in vLLM (``monkey_patch_compute_logits``). Returns the same tensor if there are none.
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
    if logits.dtype == torch.float16:  # cannot represent BANNED
        logits = logits.float()
    return logits.masked_fill(out, BANNED)
