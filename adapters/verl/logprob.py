"""Compute the trainer's log-probs as the rollout does, in exact mode and FP16, with verl's fused kernels too."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from jetrl_patch import session
from jetrl_patch.adapters.verl.compat import wants_float_logits
from jetrl_patch.adapters.verl.yaml_settings import MODEL, named
from jetrl_patch.config import Config
from jetrl_patch.errors import ModelError, explain
from jetrl_patch.models.families import FAMILIES
from jetrl_patch.models.structure import is_vision_language

if TYPE_CHECKING:
    from torch import Tensor

    from jetrl_patch.adapters.verl.state import Prepared

__all__ = [
    "attach", "check_fused", "check_model", "check_setting", "forward", "forward_with_gathered_head",
    "forward_with_torch_backend", "gathered", "is_used", "notes", "wanted",
]  # fmt: skip


# ---- Compute the trainer's log-probs as the rollout does, in exact mode and FP16 -----------------
# vLLM's sampler casts logits to FP32, divides by the temperature, sets the tokens that verl bans to −inf and takes the
# log-softmax, all in FP32. verl's trainer divides BF16 logits in BF16. It then uses a formula per dtype (log-probs rounded to
# BF16 for BF16 logits, ``x − logsumexp`` for FP32) over the whole vocabulary.

#: value of a banned logit: its exp is 0 as for -inf, and 0 · logit in the entropy is 0 instead of NaN
BANNED = -1e30


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


def logprobs_from_logits(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``transformer_impl.logprobs_from_logits``: logits [..., V], labels [...] -> float32 [...]."""

    def logprobs_from_logits(logits: Any, labels: Any, inplace_backward: bool = True) -> Any:
        from jetrl_patch.exact.ops import token_log_probs

        if not _current.alone:  # others hold the logits too
            return token_log_probs(logits, labels)
        return token_log_probs(logits, labels, _current.temperature, edit=_current.edit, reuse=inplace_backward)

    return logprobs_from_logits


def prepare_model_inputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``FSDPEngineWithLMHead.prepare_model_inputs``: note how many sequences a packed row holds at most.

    They are the micro-batch's, the padding's, of which every token may count as one, and the one that a rank's slice cuts.
    """

    def prepare_model_inputs(self: Any, micro_batch: Any) -> Any:
        from jetrl_patch.exact import attention

        inputs, arguments = original(self, micro_batch)
        positions = inputs.get("position_ids")
        if "pad_size" in arguments and positions is not None:  # verl pads packed rows only
            attention.mark(positions, micro_batch.batch_size[0] + int(arguments["pad_size"]) + 1)
        return inputs, arguments

    return prepare_model_inputs


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


# ---- verl's fused kernels (``use_fused_kernels``) in the modes whose log-probs follow the rollout's formula
# They bypass ``lm_head``'s forward: the model returns log-probs and entropies that ``FusedLinearForPPO`` or a Triton kernel
# computes from hidden states and the head's weight, a few rows at a time. Their product depends on the batch, they divide by the
# temperature in BF16, and they know nothing of the tokens that verl bans in vLLM. Here ``FusedLinearForPPO`` keeps its interface
# and its low memory, and computes what the unfused path does: the run's own head, the banned tokens, log-softmax in FP32.

_USED = f"{MODEL}.use_fused_kernels"
#: the implementation that calls ``FusedLinearForPPO``
_IMPLEMENTATION = f"{MODEL}.fused_kernel_options.impl_backend"
#: where ``attach`` leaves the engine's record on its model
_ATTRIBUTE = "_jetrl_prepared"

#: the record of the model whose forward is running in this thread
_running: ContextVar[Prepared | None] = ContextVar("jetrl_fused_model", default=None)


def is_used(select: Callable[[str], Any], config: Config) -> bool:
    """Whether verl would compute log-probs by fused kernels in a mode whose log-probs follow the rollout's."""
    return config.same_log_probs and bool(select(_USED))


def wanted(select: Callable[[str], Any], config: Config) -> dict[str, Any]:
    """Return the verl setting that leads to the replaced class: path -> value."""
    return {_IMPLEMENTATION: "torch"} if is_used(select, config) else {}


def notes(select: Callable[[str], Any], config: Config) -> Iterator[str]:
    """Yield the line that says what stands in for the fused kernels."""
    if is_used(select, config):
        yield f"{_USED}: log-probs and entropies come from the run's own head, in chunks, instead of verl's fused kernels"


def attach(engine: Any, module: Any, prepared: Prepared) -> None:
    """Leave the engine's record on its model, for ``forward_with_torch_backend``. Raises ModelError as ``check_model``."""
    if engine.model_config.use_fused_kernels and session.active_config().same_log_probs:
        check_model(module.config)
        setattr(module, _ATTRIBUTE, prepared)


def check_model(hf_config: Any) -> None:
    """Raise ModelError if the model divides the logits of ``lm_head``: verl's fused forward leaves that out."""
    family = FAMILIES.get(getattr(hf_config, "model_type", ""))
    name = None if family is None else family.logits_divisor
    if name is not None and getattr(hf_config, name, 1.0) != 1.0:
        required, found = "logits that lm_head alone computes", f"{name}={getattr(hf_config, name)}"
        raise ModelError(explain(named(_USED), required=required, found=found, fix="set it to false"))


def check_fused(implementation: Any, hf_config: Any) -> None:
    """Raise ModelError for a vision-language model and a fused implementation with which its log-probs have not been compared."""
    if is_vision_language(hf_config) and implementation != "torch":
        what, found = f"{named(_USED)} with model_type={hf_config.model_type!r}", f"{_IMPLEMENTATION}={implementation!r}"
        raise ModelError(explain(what, required="the implementation torch", found=found, fix=f"set {_IMPLEMENTATION}=torch"))


def check_setting(select: Callable[[str], Any], hf_config: Any) -> None:
    """Raise ModelError as ``check_fused`` if verl's configuration asks for fused kernels."""
    if select(_USED):
        check_fused(select(_IMPLEMENTATION), hf_config)


def forward_with_gathered_head(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a model's ``forward_with_torch_backend``, which multiplies with ``lm_head.weight`` itself: gather the head."""

    def forward_with_torch_backend(self: Any, *args: Any, **kwargs: Any) -> Any:
        with gathered(self.lm_head):
            return original(self, *args, **kwargs)

    return forward_with_torch_backend


def forward_with_torch_backend(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``dense_common.forward_with_torch_backend``: note whose banned tokens apply, and gather a head that is sharded."""

    def forward_with_torch_backend(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = getattr(self, _ATTRIBUTE, None)
        if prepared is None:
            return original(self, *args, **kwargs)
        token = _running.set(prepared)
        try:
            with gathered(self.lm_head):
                return original(self, *args, **kwargs)
        finally:
            _running.reset(token)

    return forward_with_torch_backend


@contextlib.contextmanager
def gathered(head: Any) -> Iterator[None]:
    """Gather a head, or an embedding, that is an FSDP2 unit of its own, as verl makes them unless they are tied.

    FSDP2 gathers a unit in its forward, which the fused forward never calls. In training the unit stays gathered until the
    end of the backward pass, where FSDP2 reduces its gradient and shards it again.
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


def forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``FusedLinearForPPO.forward`` for a converted model: hidden states [..., K], head [V, K], labels [...]."""

    def forward(
        self: Any, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        prepared = _running.get()
        if prepared is None:
            return original(self, hidden_states, vocab_weights, input_ids, temperature)
        from jetrl_patch.exact.logprob import chunked_log_probs

        product = product_of(session.active_config())

        def logits_of(h_TK: Tensor, w_VK: Tensor) -> Tensor:
            logits = product(h_TK, w_VK)
            return ban(logits, banned_columns(logits, prepared.vocabulary, prepared.banned))

        return chunked_log_probs(hidden_states, vocab_weights, input_ids, logits_of, temperature, self.chunk_size)

    return forward


def product_of(config: Config) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the product of the run's head: (hidden states [T, K], weight [V, K]) -> logits [T, V]."""
    import torch

    from jetrl_patch.exact import ops

    if config.exact:
        return ops.head_linear_fp32 if config.fp32_head else ops.head_linear
    dtype = getattr(torch, config.compute_dtype)
    # backward runs it again, outside autocast
    return lambda h_TK, w_VK: torch.nn.functional.linear(h_TK.to(dtype), w_VK.to(dtype))
