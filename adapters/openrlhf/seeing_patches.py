"""Fixes for OpenRLHF's bugs with models that see."""

from __future__ import annotations

from jetrl_patch.adapters.base import Patch
from jetrl_patch.adapters.openrlhf import seeing
from jetrl_patch.patching.patch import NO_REPORT

__all__ = ["SEEING"]

#: models without a record are not changed
SEEING: tuple[Patch, ...] = (
    Patch(
        module="vllm.v1.engine.async_llm",
        attr="AsyncLLM.generate",
        make=seeing.never_samples,
        reason="a model that sees may answer with the token in place of an image or a film, which the trainer then takes for "
        "one: the step ends in get_rope_index or get_placeholder_mask. Not banned in the trainer, whose log-probs leave it in",
        upstream=NO_REPORT,
        remove_when="OpenRLHF bans these tokens in its sampling parameters, as verl has since verl#7038",
        fixes="openrlhf",
    ),
    Patch(
        module="vllm.v1.engine.async_llm",
        attr="AsyncLLM.collective_rpc",
        make=seeing.forget_images,
        reason="vLLM answers to an image that it has seen before by what its tower made of it with the old weights; OpenRLHF's "
        "sync resets the prefix cache alone",
        upstream="https://github.com/vllm-project/vllm/issues/44910",
        remove_when="OpenRLHF calls reset_encoder_cache after a weight sync, or vLLM does so itself (vllm#48762)",
        fixes="openrlhf",
    ),
)
