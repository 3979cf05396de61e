"""Compute the trainer's log-probs as the rollout does, in exact mode and FP16, with verl's fused kernels too."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from jetrl_patch import session
from jetrl_patch.adapters.verl import support
from jetrl_patch.adapters.verl.compat import wants_float_logits
from jetrl_patch.adapters.verl.yaml_settings import MODEL, Select, named
from jetrl_patch.config import Config
from jetrl_patch.errors import ModelError, explain
from jetrl_patch.models.families import record_of
from jetrl_patch.models.structure import is_vision_language
from jetrl_patch.patching.attached import Attached
from jetrl_patch.patching.patch import replacement

if TYPE_CHECKING:
    from torch import Tensor

    from jetrl_patch.adapters.verl.state import Prepared

# ---- Log-probs by the rollout's formula ----
# vLLM's sampler casts logits to FP32, divides by the temperature, sets the tokens that verl bans to −inf and takes the
# log-softmax, all in FP32. verl's trainer divides BF16 logits in BF16. Its formula depends on the dtype (log-probs rounded to
# BF16 for BF16 logits, ``x − logsumexp`` for FP32 logits), and it uses the whole vocabulary.

#: keys of a micro-batch that make verl use the logits for something other than log-probs
_OTHER_READERS = ("calculate_entropy", "calculate_sum_pi_squared", "distillation_use_topk")


@dataclasses.dataclass(frozen=True)
class PendingLogits:
    """Logits [..., V] from which verl computes log-probs and nothing else. verl passes this on as if it were the tensor.

    ``logprobs_from_logits`` then edits and divides blocks of tokens, so that no copy of all logits is made.
    """

    values: Tensor
    edit: Callable[[Any, Any], Any] | None
    temperature: Any = 1.0

    def squeeze(self, dim: int) -> PendingLogits:
        """Like a tensor's."""
        return dataclasses.replace(self, values=self.values.squeeze(dim))


@replacement
def scale_logits(original: Any, logits: Any, temperature: Any, *, is_unit_temperature: bool) -> Any:
    """Replace ``transformer_impl._scale_logits_by_temperature``: divide logits [..., V] in FP32.

    The dtype of the result must not depend on the temperatures, because verl concatenates the entropies of micro-batches and of
    ranks that share sequences.
    """
    if is_unit_temperature:
        return logits
    temperature = temperature.clamp(min=1e-8).float()
    if isinstance(logits, PendingLogits):
        return dataclasses.replace(logits, temperature=temperature)
    return logits.float() / temperature


@replacement
def logprobs_from_logits(original: Any, logits: Any, labels: Any, inplace_backward: bool = True) -> Any:
    """Replace ``transformer_impl.logprobs_from_logits``: logits [..., V], labels [...] -> float32 [...]."""
    from jetrl_patch.exact.ops import token_log_probs

    if not isinstance(logits, PendingLogits):  # verl uses the logits elsewhere too
        return token_log_probs(logits, labels)
    return token_log_probs(logits.values, labels, logits.temperature, edit=logits.edit, reuse=inplace_backward)


@replacement
def prepare_model_inputs(original: Any, self: Any, micro_batch: Any) -> Any:
    """Wrap ``FSDPEngineWithLMHead.prepare_model_inputs``: use each sample's own temperature.

    And tell exact attention how many sequences a packed row has at most: the micro-batch's sequences, one for each padding
    token, and one that a rank's slice may cut.
    """
    from jetrl_patch.exact import sequences

    inputs, arguments = original(self, support.with_temperatures(micro_batch))
    positions = inputs.get("position_ids")
    if "pad_size" in arguments and positions is not None:  # verl pads packed rows only
        sequences.mark(positions, micro_batch.batch_size[0] + int(arguments["pad_size"]) + 1)
    return inputs, arguments


@replacement
def prepare_model_outputs(
    original: Any, self: Any, output: Any, output_args: Any, micro_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wrap ``FSDPEngineWithLMHead.prepare_model_outputs``: ban the tokens that the rollout cannot sample.

    A verl that divides by the temperature in line, in the logits' dtype, gets FP32 logits.
    """
    from jetrl_patch.adapters.verl.state import RECORD
    from jetrl_patch.exact.logprob import chained, edited

    prepared, logits = RECORD.get(self), getattr(output, "logits", None)
    if logits is None:
        return original(self, output, output_args, micro_batch, *args, **kwargs)
    outside = None if prepared is None else banned_columns(logits, prepared.vocabulary, prepared.banned)
    banned = None if outside is None else lambda block, rows: ban(block, outside)
    drawn = None if prepared is None else support.of_rows(micro_batch, logits.shape)
    left_out = None if drawn is None else chained(banned, drawn.edit)
    in_line = wants_float_logits()
    if prepared is None or in_line or not log_probs_alone(micro_batch, logits):
        output.logits = ban(logits, outside) if left_out is None else edited(logits, left_out)
        temperatures = output_args.get("temperature_rmpad", output_args.get("temperature"))
        if in_line and not bool((temperatures == 1.0).all()):  # dividing by 1 is exact in any dtype
            output.logits = output.logits.float()
        return original(self, output, output_args, micro_batch, *args, **kwargs)
    output.logits = PendingLogits(logits, left_out or banned)
    return original(self, output, output_args, micro_batch, *args, **kwargs)


def log_probs_alone(micro_batch: Any, logits: Any) -> bool:
    """Whether verl computes log-probs from these logits and nothing else, in one packed row of tokens.

    In a padded batch verl first copies the logits of all tokens, and it first gathers a DTensor.
    """
    from torch.distributed.tensor import DTensor
    from verl.utils import tensordict_utils as tu

    def setting(key: str, default: bool) -> bool:
        return bool(tu.get_non_tensor_data(data=micro_batch, key=key, default=default))

    packed = setting("use_remove_padding", True) and not setting("use_fused_kernels", False)
    return packed and not isinstance(logits, DTensor) and not any(setting(key, False) for key in _OTHER_READERS)


def banned_columns(logits: Any, vocabulary: int | None, banned: list[int]) -> Any:
    """Return a bool [V]: True for banned tokens and tokens beyond the tokenizer. None if there are none.

    verl masks the same tokens in vLLM (``monkey_patch_compute_logits``).
    """
    width = logits.shape[-1]
    tail = width if vocabulary is None else min(vocabulary, width)
    return _mask(width, tail, tuple(banned), logits.device) if banned or tail < width else None


@functools.cache
def _mask(width: int, tail: int, banned: tuple[int, ...], device: Any) -> Any:
    """A mask on its device. Copying it at each micro-batch would make the host wait."""
    import torch

    out = torch.zeros(width, dtype=torch.bool)
    out[tail:] = True
    out[list(banned)] = True
    return out.to(device)


def ban(logits: Any, outside: Any) -> Any:
    """Remove tokens (``banned_columns``) from the distribution of logits [..., V]. Returns the same tensor if there are none."""
    import torch

    from jetrl_patch.exact.support import BANNED

    if outside is None:
        return logits
    if logits.dtype == torch.float16:  # cannot represent BANNED
        logits = logits.float()
    return logits.masked_fill(outside, BANNED)


# ---- verl's fused kernels (``use_fused_kernels``), in the same modes ----
# They bypass ``lm_head``'s forward: ``FusedLinearForPPO`` or a Triton kernel computes log-probs and entropies from hidden states
# and the head's weight, a few rows at a time. Their matmul depends on the batch, they divide by the temperature in BF16, and they
# ignore the tokens that verl bans in vLLM. Here ``FusedLinearForPPO`` keeps its interface and its low memory, and computes what
# the unfused path computes: the run's own head, banned tokens, log-softmax in FP32.

USED = f"{MODEL}.use_fused_kernels"
#: only "torch" calls ``FusedLinearForPPO``
IMPLEMENTATION = f"{MODEL}.fused_kernel_options.impl_backend"
#: an engine's record, on its model
_OF_MODEL: Attached[Prepared] = Attached("_jetrl_prepared", "verl's fused forward gets the model and no engine")

#: the record of the model whose forward runs in this thread, because verl passes ``FusedLinearForPPO`` only tensors
_running: ContextVar[Prepared | None] = ContextVar("jetrl_fused_model", default=None)


def is_used(select: Select, config: Config) -> bool:
    """Whether verl would use fused kernels in a mode whose log-probs must equal the rollout's."""
    return config.same_log_probs and bool(select(USED))


def attach(engine: Any, module: Any, prepared: Prepared) -> None:
    """Store the engine's record on its model, for ``forward_with_torch_backend``. Raises ModelError as ``check_model``."""
    if engine.model_config.use_fused_kernels and session.active_config().same_log_probs:
        check_model(module.config)
        _OF_MODEL.set(module, prepared)


def check_model(hf_config: Any) -> None:
    """Raise ModelError if the model divides the logits of ``lm_head``: verl's fused forward skips the division."""
    name = record_of(hf_config).logits_divisor
    if name is not None and getattr(hf_config, name, 1.0) != 1.0:
        required, found = "logits that lm_head alone computes", f"{name}={getattr(hf_config, name)}"
        raise ModelError(explain(named(USED), required=required, found=found, fix="set it to false"))


def check_fused(implementation: Any, hf_config: Any) -> None:
    """Raise ModelError for a vision-language model with a fused implementation that was never compared with the rollout."""
    if is_vision_language(hf_config) and implementation != "torch":
        what, found = f"{named(USED)} with model_type={hf_config.model_type!r}", f"{IMPLEMENTATION}={implementation!r}"
        raise ModelError(explain(what, required="the implementation torch", found=found, fix=f"set {IMPLEMENTATION}=torch"))


@replacement
def forward_with_gathered_head(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap a model's ``forward_with_torch_backend``: gather the head, because it multiplies by ``lm_head.weight`` directly."""
    with gathered(self.lm_head):
        return original(self, *args, **kwargs)


@replacement
def forward_with_torch_backend(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``dense_common.forward_with_torch_backend``: note whose banned tokens apply, and gather a sharded head."""
    prepared = _OF_MODEL.get(self)
    if prepared is None:
        return original(self, *args, **kwargs)
    token = _running.set(prepared)
    try:
        with gathered(self.lm_head):
            return original(self, *args, **kwargs)
    finally:
        _running.reset(token)


@contextlib.contextmanager
def gathered(head: Any) -> Iterator[None]:
    """Gather a head or an embedding that is its own FSDP2 unit. verl makes them such units unless they are tied.

    FSDP2 gathers a unit when its forward is called, and the fused forward does not call it. In training the unit stays gathered
    until the end of the backward pass; FSDP2 then reduces its gradient and shards it again.
    """
    import torch
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(head, FSDPModule):
        yield
        return
    head.unshard()
    try:
        yield
    finally:
        if not torch.is_grad_enabled():
            head.reshard()


@replacement
def forward(
    original: Any, self: Any, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Replace ``FusedLinearForPPO.forward`` for a converted model: hidden states [..., K], head [V, K], labels [...].

    Returns log-probs and entropies, float32 [...].
    """
    prepared = _running.get()
    if prepared is None:
        return original(self, hidden_states, vocab_weights, input_ids, temperature)
    from jetrl_patch.exact.logprob import chunked_log_probs

    product = product_of(session.active_config())

    def logits_of(h_TK: Tensor, w_VK: Tensor) -> Tensor:
        logits = product(h_TK, w_VK)
        return ban(logits, banned_columns(logits, prepared.vocabulary, prepared.banned))

    return chunked_log_probs(hidden_states, vocab_weights, input_ids, logits_of, temperature, self.chunk_size)


def product_of(config: Config) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the product of the run's head: (hidden states [T, K], weight [V, K]) -> logits [T, V]."""
    import torch

    from jetrl_patch.exact import ops

    if config.exact:
        return ops.head_linear_fp32 if config.fp32_head else ops.linear
    dtype = getattr(torch, config.compute_dtype)
    # the backward pass runs it again, outside autocast
    return lambda h_TK, w_VK: torch.nn.functional.linear(h_TK.to(dtype), w_VK.to(dtype))
