"""Vision-language models in TRL: fixes for bugs by which the rollout sees other prompts, or other images, than the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from jetrl_patch.errors import ModelError, explain
from jetrl_patch.patching.patch import replacement
from jetrl_patch.registry import Patch

# TRL's processor puts as many placeholders into a prompt as an image has features. vLLM does so itself, and takes the first of
# them for an image that it has yet to expand. It also keeps the features of images, which are stale after a weight sync.


@replacement
def generate(original: Any, self: Any, prompts: Any, images: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``VLLMGeneration.generate``: an engine in this process gets one placeholder for each image.

    Raises ModelError for a prompt with another number of images than of runs of placeholders.
    """
    if self.mode == "colocate" and images is not None:
        token = self.processing_class.image_token_id
        prompts = [one_each(ids, token, len(shown or ())) for ids, shown in zip(prompts, images, strict=True)]
    return original(self, prompts, images, *args, **kwargs)


def one_each(ids: Sequence[int], token: int, images: int) -> list[int]:
    """The ids of a prompt in which each run of placeholders is one of them."""
    found: list[int] = []
    runs = 0
    for value, run in groupby(ids):
        found.extend([value] if value == token else run)
        runs += value == token
    if runs != images:
        required, fix = f"{images} runs of image tokens, one for each image", "use a processor that separates images by a token"
        raise ModelError(explain("a prompt for vLLM", required=required, found=runs, fix=fix))
    return found


@replacement
def sync_weights(original: Any, self: Any) -> None:
    """Wrap ``VLLMGeneration.sync_weights``: an engine in this process drops the features of images."""
    original(self)
    if self.mode == "colocate":
        self.llm.llm_engine.reset_encoder_cache()


VISION: tuple[Patch, ...] = (
    Patch(
        "trl.generation.vllm_generation", "VLLMGeneration.generate", generate,
        reason="vLLM expands the first of an image's placeholders again, so it samples answers to another prompt",
        upstream="https://github.com/huggingface/trl/issues/6294",
        remove_when="the oldest supported TRL gives vLLM one placeholder for each image (trl#6718)",
        fixes="trl",
    ),
    Patch(
        "trl.generation.vllm_generation", "VLLMGeneration.sync_weights", sync_weights,
        reason="after a sync vLLM reuses features of images by the weights before, because TRL resets only the prefix cache",
        upstream="https://github.com/vllm-project/vllm/issues/44910",
        remove_when="TRL resets the encoder cache after a weight sync, or vLLM does so itself (vllm#48762)",
        fixes="trl",
    ),
)  # fmt: skip
