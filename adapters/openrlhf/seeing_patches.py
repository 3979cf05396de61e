"""The patches of OpenRLHF for models that see, in every mode."""

from __future__ import annotations

from jetrl_patch.adapters.base import Patch
from jetrl_patch.adapters.openrlhf import seeing

__all__ = ["SEEING"]

#: in every mode, bf16 too: OpenRLHF itself fails, or measures wrongly, without them. Models without a record are not changed
SEEING: tuple[Patch, ...] = (
    Patch(
        module="vllm.v1.engine.async_llm",
        attr="AsyncLLM.generate",
        make=seeing.never_samples,
        reason="a model that sees may answer with the token in place of an image or a film, which the trainer then takes for "
        "one: the step ends in get_rope_index or get_placeholder_mask. Not banned in the trainer, whose log-probs leave it in",
        remove_when="OpenRLHF bans these tokens in its sampling parameters",
    ),
    Patch(
        module="vllm.v1.engine.async_llm",
        attr="AsyncLLM.collective_rpc",
        make=seeing.forget_images,
        reason="vLLM answers to an image that it has seen before by what its tower made of it with the old weights; OpenRLHF's "
        "sync resets the prefix cache alone",
        remove_when="OpenRLHF resets vLLM's encoder cache after a weight sync",
    ),
)
