"""Vision-language models in OpenRLHF: unsupported settings, and fixes for OpenRLHF's bugs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jetrl_patch.config import Config
from jetrl_patch.errors import JetrlError
from jetrl_patch.models.structure import is_vision_language, placeholders
from jetrl_patch.patching.patch import NO_REPORT, replacement
from jetrl_patch.registry import Patch
from jetrl_patch.sync.orders import decode
from jetrl_patch.trainer.rules import Rule, broken, is_set, positive

# ---- Settings that are untested with vision-language models, and why OpenRLHF needs fixes ----
# OpenRLHF processes an image for the trainer and passes the picture itself to vLLM, with one placeholder token in its place. The
# trainer finds images by placeholder tokens anywhere in a sample, so a response must not contain one.
#
# vLLM caches an image's features. A weight sync changes the vision tower unless it is frozen, and makes them stale.

_REMOVE = "remove the flag"

#: for vision-language models
RULES: tuple[Rule, ...] = (
    Rule("ds.packing_samples", is_set, "one sample a row for vision-language models (packing has not run)", _REMOVE, "quantized"),
    Rule(
        "train.partial_rollout_enable", is_set,
        "whole rollouts for a vision-language model (a sync drops the cached images of paused requests)", _REMOVE, "quantized",
    ),
)  # fmt: skip
#: for all others
TEXT_RULES: tuple[Rule, ...] = (
    Rule("data.max_images_per_prompt", positive, "0 for a model without a vision tower", "set it to 0", "quantized"),
)

#: added to the logit of a token that vLLM must never sample
NEVER = -100.0


def problems(select: Callable[[str], Any], hf_config: Any, config: Config) -> Iterator[JetrlError]:
    """Yield an error for each argument that is wrong or untested with this kind of model."""
    rules = RULES if is_vision_language(hf_config) else TEXT_RULES
    model = f"model_type={getattr(hf_config, 'model_type', None)!r}"
    yield from broken(rules, select, config, lambda path: f"OpenRLHF's --{path}", model)


@replacement
def never_samples(original: Any, self: Any, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``AsyncLLM.generate``: responses contain no placeholder token of an image or video."""
    banned = placeholders(self.model_config.hf_config)
    if banned:  # OpenRLHF makes a copy for each request
        sampling_params.logit_bias = {**(sampling_params.logit_bias or {}), **dict.fromkeys(banned, NEVER)}
    return original(self, prompt, sampling_params, *args, **kwargs)


@replacement
async def forget_images(original: Any, self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
    """Wrap ``AsyncLLM.collective_rpc``: after a weight sync, vLLM drops cached image features."""
    result = await original(self, method, timeout, args, kwargs)
    if method in ("update_weight", "update_weight_cuda_ipc") and args and is_vision_language(self.model_config.hf_config):
        order = decode(args[0])
        ends = args[-1] if order is None else order["op"] == "end"  # the last call of OpenRLHF's own sync empties the cache
        if ends:
            await self.reset_encoder_cache()
    return result


def synced(actor: Any) -> list[Any]:
    """Return the parameters that OpenRLHF's own sync sends: all, or a vision-language model's trained ones."""
    return [p for p in actor.model.module.parameters() if p.requires_grad or not getattr(actor, "is_vlm", False)]


# ---- Fixes for OpenRLHF's bugs with vision-language models ---------------------------------------

#: models without a record are not changed
VISION: tuple[Patch, ...] = (
    Patch(
        "vllm.v1.engine.async_llm", "AsyncLLM.generate", never_samples,
        reason="a vision-language model may sample an image or video placeholder token, and the trainer then crashes in "
        "get_rope_index or get_placeholder_mask. The trainer's own log-probs mask it only in exact mode",
        upstream=NO_REPORT,
        remove_when="OpenRLHF's SamplesGenerator bans placeholder tokens in its SamplingParams, as verl does since verl#7038",
        fixes="openrlhf",
    ),
    Patch(
        "vllm.v1.engine.async_llm", "AsyncLLM.collective_rpc", forget_images,
        reason="after a sync vLLM reuses cached image features of the old weights, because OpenRLHF resets only the prefix cache",
        upstream="https://github.com/vllm-project/vllm/issues/44910",
        remove_when="OpenRLHF calls AsyncLLM.reset_encoder_cache after a weight sync, or vLLM does so itself (vllm#48762)",
        fixes="openrlhf",
    ),
)
