"""verl's fused kernels (``use_fused_kernels``) in the modes whose log-probs follow the rollout's formula.

They bypass ``lm_head``'s forward: the model returns log-probs and entropies that ``FusedLinearForPPO`` or a Triton kernel
computes from hidden states and the head's weight, a few rows at a time. Their product depends on the batch, they divide by the
temperature in BF16, and they know nothing of the tokens that verl bans in vLLM. Here ``FusedLinearForPPO`` keeps its interface
and its low memory, and computes what the unfused path does: the run's own head, the banned tokens, log-softmax in FP32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from jetrl_patch import runtime
from jetrl_patch.adapters.verl.logprob import ban, banned_columns, same_log_probs
from jetrl_patch.adapters.verl.paths import MODEL, named
from jetrl_patch.config import Config
from jetrl_patch.errors import ModelError, explain
from jetrl_patch.families import FAMILIES
from jetrl_patch.gate import while_active
from jetrl_patch.structure import sees

if TYPE_CHECKING:
    from torch import Tensor

    from jetrl_patch.adapters.verl.state import Prepared

__all__ = [
    "attach",
    "check_model",
    "check_seeing",
    "check_setting",
    "forward",
    "forward_with_gathered_head",
    "forward_with_torch_backend",
    "gathered",
    "is_used",
    "notes",
    "wanted",
]

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
    if engine.model_config.use_fused_kernels and runtime.active_config().same_log_probs:
        check_model(module.config)
        setattr(module, _ATTRIBUTE, prepared)


def check_model(hf_config: Any) -> None:
    """Raise ModelError if the model divides the logits of ``lm_head``: verl's fused forward leaves that out."""
    family = FAMILIES.get(getattr(hf_config, "model_type", ""))
    name = None if family is None else family.logits_divisor
    if name is not None and getattr(hf_config, name, 1.0) != 1.0:
        required, found = "logits that lm_head alone computes", f"{name}={getattr(hf_config, name)}"
        raise ModelError(explain(named(_USED), required=required, found=found, fix="set it to false"))


def check_seeing(implementation: Any, hf_config: Any) -> None:
    """Raise ModelError for a model that sees and a fused implementation with which its log-probs have not been compared."""
    if sees(hf_config) and implementation != "torch":
        what, found = f"{named(_USED)} with model_type={hf_config.model_type!r}", f"{_IMPLEMENTATION}={implementation!r}"
        raise ModelError(explain(what, required="the implementation torch", found=found, fix=f"set {_IMPLEMENTATION}=torch"))


def check_setting(select: Callable[[str], Any], hf_config: Any) -> None:
    """Raise ModelError as ``check_seeing`` if verl's configuration asks for fused kernels."""
    if select(_USED):
        check_seeing(select(_IMPLEMENTATION), hf_config)


@while_active
def forward_with_gathered_head(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a model's ``forward_with_torch_backend``, which multiplies with ``lm_head.weight`` itself: gather the head."""

    def forward_with_torch_backend(self: Any, *args: Any, **kwargs: Any) -> Any:
        with gathered(self.lm_head):
            return original(self, *args, **kwargs)

    return forward_with_torch_backend


@same_log_probs
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


@same_log_probs
def forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``FusedLinearForPPO.forward`` for a converted model: hidden states [..., K], head [V, K], labels [...]."""

    def forward(
        self: Any, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        prepared = _running.get()
        if prepared is None:
            return original(self, hidden_states, vocab_weights, input_ids, temperature)
        from jetrl_patch.exact.chunked import chunked_log_probs

        product = product_of(runtime.active_config())

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
