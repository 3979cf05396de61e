"""Log-probs of verl's Megatron engine in exact mode, where the ranks of a tensor-parallel group split the vocabulary.

By default verl's engine computes them from logits, ``[1, T, V / ranks]`` in Megatron's layout. With ``use_fused_kernels`` it
computes them from hidden states and the head's weight, a few rows at a time, so that all logits never exist at once.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from jetrl_patch import session
from jetrl_patch.adapters.verl import support
from jetrl_patch.adapters.verl.logprob import ban, banned_columns, product_of
from jetrl_patch.adapters.verl.state import RECORD
from jetrl_patch.patching.patch import replacement

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from jetrl_patch.exact.logprob import Edit


def _vocabulary(engine: Any) -> int:
    """V, without the columns by which Megatron makes it divisible."""
    return int(engine.model_config.hf_config.vocab_size)


def _whole(engine: Any, like: Tensor, dtype: torch.dtype) -> Edit:
    """An edit of logits [rows, V / ranks] of ``dtype``: gather the whole vocabulary, and leave out what verl bans in vLLM."""
    from megatron.core import parallel_state

    from jetrl_patch.exact.logprob import chained
    from jetrl_patch.exact.vocabulary import whole_vocabulary

    prepared, width = RECORD.get(engine), _vocabulary(engine)
    assert prepared is not None, "the engine's model was built"
    outside = banned_columns(like.new_empty(width), prepared.vocabulary, prepared.banned)
    group = parallel_state.get_tensor_model_parallel_group()
    return chained(whole_vocabulary(group, width, dtype), lambda block, rows: ban(block, outside))


def _order(tokens: Tensor) -> Tensor:
    """The token of the nested [B, T] that each of this rank's rows is for; −1 for padding.

    verl pads each sample for the tensor-parallel ranks, and splits it among the context-parallel ones.
    """
    import torch
    from verl.models.mcore.util import preprocess_thd_engine

    numbers = torch.arange(1, len(tokens.values()) + 1, device=tokens.device)
    numbered = torch.nested.nested_tensor_from_jagged(numbers, tokens.offsets())
    return preprocess_thd_engine(numbered)[0].flatten() - 1


@replacement
def logits_processor(
    original: Any, self: Any, logits: Tensor, label: Tensor, temperature: Tensor, *, batch: Any, calculate_sum_pi_squared: bool,
    calculate_entropy: bool, **kwargs: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """Wrap ``MegatronEngineWithLMHead._lm_head_logits_processor``: logits [1, T, V / ranks], labels and temperatures [1, T].

    Log-probs, entropies and sums of squares are those of the distributions that were sampled from, from blocks of rows with the
    whole vocabulary. Distillation is refused in the driver.
    """
    from jetrl_patch.exact.logprob import chained, entropy, token_log_probs
    from jetrl_patch.exact.vocabulary import collision, summed

    if RECORD.get(self) is None:
        sums = {"calculate_sum_pi_squared": calculate_sum_pi_squared, "calculate_entropy": calculate_entropy}
        return original(self, logits, label, temperature, batch=batch, **sums, **kwargs)
    temperature = temperature.float().clamp(min=1e-8).unsqueeze(-1)
    edit, tokens = _whole(self, label, logits.dtype), batch["input_ids"]
    drawn = support.of_rows(batch, (len(tokens.values()), _vocabulary(self)))
    if drawn is not None:
        edit = chained(edit, drawn.take(_order(tokens)).edit)
    found = {"log_probs": token_log_probs(logits, label, temperature, edit=edit)}
    if calculate_sum_pi_squared:
        found["sum_pi_squared"] = summed(logits, temperature, edit, collision)
    if calculate_entropy:
        found["entropy"] = summed(logits, temperature, edit, entropy)
    return found


# ---- verl's fused kernels ------------------------------------------------------------------------

#: the engine whose forward pass runs, because verl passes ``linear_cross_entropy`` nothing but tensors
_running: ContextVar[Any] = ContextVar("jetrl_megatron_engine", default=None)


@replacement
def forward_step(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``MegatronEngineWithLMHead.forward_step``: note whose log-probs ``linear_cross_entropy`` computes."""
    token = _running.set(None if RECORD.get(self) is None else self)
    try:
        return original(self, *args, **kwargs)
    finally:
        _running.reset(token)


@replacement
def linear_cross_entropy(
    original: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0, *args: Any
) -> tuple[Tensor, Tensor]:
    """Replace the fused forward's ``linear_cross_entropy``: FP32 log-probs and entropies [T].

    Args:
        hidden: the hidden states of all tokens [T, 1, K], which sequence parallelism has gathered. Its backward pass adds the
            gradients of all ranks. Without sequence parallelism nothing does in verl, so this does.
        weight: this rank's part of the head [V / ranks, K].
        labels: [1, T].
    """
    engine = _running.get()
    if engine is None:
        return original(hidden, weight, labels, temperature, *args)
    import torch
    from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

    from jetrl_patch.exact.logprob import chunked_log_probs

    config = session.active_config()
    if not engine.tf_config.sequence_parallel:
        hidden = copy_to_tensor_model_parallel_region(hidden)
    edit = _whole(engine, labels, torch.float32 if config.fp32_head else torch.bfloat16)
    return chunked_log_probs(hidden, weight, labels.flatten(), product_of(config), temperature, edit=edit)
