"""Compute the trainer's log-probs as the rollout does, in exact mode and FP16.

vLLM's sampler casts logits to FP32, divides by the temperature, sets the tokens that verl bans to −inf and takes the
log-softmax, all in FP32. verl's trainer divides BF16 logits in BF16. It then uses a formula per dtype (log-probs rounded to
BF16 for BF16 logits, ``x − logsumexp`` for FP32) over the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jetrl_patch.adapters.verl.compat import wants_float_logits
from jetrl_patch.gate import while_config

#: value of a banned logit: its exp is 0 as for -inf, and 0 · logit in the entropy is 0 instead of NaN
BANNED = -1e30

_same_log_probs = while_config(lambda config: config.same_log_probs)


@_same_log_probs
def scale_logits(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``transformer_impl._scale_logits_by_temperature``: divide logits [..., V] in FP32.

    The dtype of the result does not depend on the temperatures: ranks that share sequences, and the micro-batches of one
    rank, put their entropies together.
    """

    def _scale_logits_by_temperature(logits: Any, temperature: Any, *, is_unit_temperature: bool) -> Any:
        if is_unit_temperature:
            return logits
        return logits.float() / temperature.clamp(min=1e-8).float()

    return _scale_logits_by_temperature


@_same_log_probs
def logprobs_from_logits(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``transformer_impl.logprobs_from_logits``: logits [..., V], labels [...] -> float32 [...]."""

    def logprobs_from_logits(logits: Any, labels: Any, inplace_backward: bool = True) -> Any:
        from jetrl_patch.exact.ops import token_log_probs

        return token_log_probs(logits, labels)

    return logprobs_from_logits


@_same_log_probs
def prepare_model_outputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``FSDPEngineWithLMHead.prepare_model_outputs``: ban the tokens that the rollout cannot sample.

    Where verl divides by the temperature in line, in the logits' dtype, it gets FP32 logits.
    """

    def prepare_model_outputs(self: Any, output: Any, output_args: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = getattr(self, "_jetrl", None)
        if getattr(output, "logits", None) is not None:
            if prepared is not None:
                output.logits = ban(output.logits, prepared.vocabulary, prepared.banned)
            if wants_float_logits() and not _is_unit(output_args):
                output.logits = output.logits.float()
        return original(self, output, output_args, *args, **kwargs)

    return prepare_model_outputs


def _is_unit(output_args: Any) -> bool:
    """Whether every sample's temperature is 1, by which a division in any dtype is exact."""
    found = output_args.get("temperature_rmpad", output_args.get("temperature"))
    return bool((found == 1.0).all())


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
