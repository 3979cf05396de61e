"""Compute the trainer's log-probs as the rollout does, in exact mode and FP16.

vLLM's sampler casts logits to FP32, divides by the temperature, sets the tokens that verl bans to −inf and takes the
log-softmax, all in FP32. verl's trainer divides BF16 logits in BF16. It then uses a formula per dtype (log-probs rounded to
BF16 for BF16 logits, ``x − logsumexp`` for FP32) over the whole vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from jetrl_patch.adapters.verl.compat import wants_float_logits
from jetrl_patch.gate import while_config

#: value of a banned logit: its exp is 0 as for -inf, and 0 · logit in the entropy is 0 instead of NaN
BANNED = -1e30

#: marks a ``make`` that acts only in modes whose log-probs follow the rollout's formula
same_log_probs = while_config(lambda config: config.same_log_probs)


#: keys of a micro-batch that make verl read the logits for something other than log-probs
_OTHER_READERS = ("calculate_entropy", "calculate_sum_pi_squared", "distillation_use_topk")


class _Current(threading.local):
    """The micro-batch in this thread's ``prepare_model_outputs``, if it reads the logits for log-probs alone.

    Its logits then stay as the model returned them: banning and dividing happen in blocks of tokens, without a copy of all.
    """

    alone = False
    edit: Any = None
    temperature: Any = 1.0


_current = _Current()


@same_log_probs
def scale_logits(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``transformer_impl._scale_logits_by_temperature``: divide logits [..., V] in FP32.

    The dtype of the result does not depend on the temperatures: ranks that share sequences, and the micro-batches of one
    rank, put their entropies together.
    """

    def _scale_logits_by_temperature(logits: Any, temperature: Any, *, is_unit_temperature: bool) -> Any:
        if is_unit_temperature:
            return logits
        temperature = temperature.clamp(min=1e-8).float()
        if _current.alone:
            _current.temperature = temperature
            return logits
        return logits.float() / temperature

    return _scale_logits_by_temperature


@same_log_probs
def logprobs_from_logits(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``transformer_impl.logprobs_from_logits``: logits [..., V], labels [...] -> float32 [...]."""

    def logprobs_from_logits(logits: Any, labels: Any, inplace_backward: bool = True) -> Any:
        from jetrl_patch.exact.ops import token_log_probs

        if not _current.alone:  # others hold the logits too
            return token_log_probs(logits, labels)
        return token_log_probs(logits, labels, _current.temperature, edit=_current.edit, reuse=inplace_backward)

    return logprobs_from_logits


@while_config(lambda config: config.exact)
def prepare_model_inputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``FSDPEngineWithLMHead.prepare_model_inputs``: note how many sequences a packed row holds at most.

    They are the micro-batch's, the padding's, of which every token may count as one, and the one that a rank's slice cuts.
    """

    def prepare_model_inputs(self: Any, micro_batch: Any) -> Any:
        from jetrl_patch.exact import packed

        inputs, arguments = original(self, micro_batch)
        positions = inputs.get("position_ids")
        if "pad_size" in arguments and positions is not None:  # verl pads packed rows only
            packed.mark(positions, micro_batch.batch_size[0] + int(arguments["pad_size"]) + 1)
        return inputs, arguments

    return prepare_model_inputs


@same_log_probs
def prepare_model_outputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``FSDPEngineWithLMHead.prepare_model_outputs``: ban the tokens that the rollout cannot sample.

    Where verl divides by the temperature in line, in the logits' dtype, it gets FP32 logits.
    """

    def prepare_model_outputs(self: Any, output: Any, output_args: Any, micro_batch: Any, *args: Any, **kwargs: Any) -> Any:
        prepared, logits = getattr(self, "_jetrl", None), getattr(output, "logits", None)
        if logits is None:
            return original(self, output, output_args, micro_batch, *args, **kwargs)
        outside = None if prepared is None else banned_columns(logits, prepared.vocabulary, prepared.banned)
        in_line = wants_float_logits()
        if prepared is None or in_line or not log_probs_alone(micro_batch, logits):
            output.logits = ban(logits, outside)
            if in_line and not _is_unit(output_args):
                output.logits = output.logits.float()
            return original(self, output, output_args, micro_batch, *args, **kwargs)
        _current.alone, _current.edit, _current.temperature = True, None, 1.0
        if outside is not None:
            _current.edit = lambda block, rows: ban(block, outside)
        try:
            return original(self, output, output_args, micro_batch, *args, **kwargs)
        finally:
            _current.alone, _current.edit, _current.temperature = False, None, 1.0

    return prepare_model_outputs


def _is_unit(output_args: Any) -> bool:
    """Whether every sample's temperature is 1, by which a division in any dtype is exact."""
    found = output_args.get("temperature_rmpad", output_args.get("temperature"))
    return bool((found == 1.0).all())


def log_probs_alone(micro_batch: Any, logits: Any) -> bool:
    """Whether verl computes log-probs from these logits and nothing else, in one packed row of tokens.

    In a padded batch verl copies the logits of all tokens before it computes log-probs. A DTensor is gathered first.
    """
    from torch.distributed.tensor import DTensor
    from verl.utils import tensordict_utils as tu

    def setting(key: str, default: bool) -> bool:
        return bool(tu.get_non_tensor_data(data=micro_batch, key=key, default=default))

    packed = setting("use_remove_padding", True) and not setting("use_fused_kernels", False)
    return packed and not isinstance(logits, DTensor) and not any(setting(key, False) for key in _OTHER_READERS)


def banned_columns(logits: Any, vocabulary: int | None, banned: list[int]) -> Any:
    """Return a bool [V] of the banned tokens and those beyond the tokenizer, or None if there are none.

    verl masks the same tokens in vLLM (``monkey_patch_compute_logits``).
    """
    import torch

    width = logits.shape[-1]
    tail = width if vocabulary is None else min(vocabulary, width)
    if tail == width and not banned:
        return None
    key = (width, tail, tuple(banned), logits.device)
    if key not in _columns:
        out = torch.zeros(width, dtype=torch.bool)
        out[tail:] = True
        out[banned] = True
        _columns[key] = out.to(logits.device)
    return _columns[key]


#: masks on their device: copying one there at each micro-batch makes the host wait
_columns: dict[Any, Any] = {}


def ban(logits: Any, outside: Any) -> Any:
    """Remove tokens (``banned_columns``) from the distribution of logits [..., V]. Returns the same tensor if there are none."""
    import torch

    if outside is None:
        return logits
    if logits.dtype == torch.float16:  # cannot represent BANNED
        logits = logits.float()
    return logits.masked_fill(outside, BANNED)
