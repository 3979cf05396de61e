"""Tiny models with a vision tower, their processors and an image, built locally: nothing is downloaded.

The towers' linears have blocks, merged layers and widths of their own, so that a rule that looked at blocks alone would
quantize them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import models

#: torchvision and what verl needs for images, which `make vision` installs; not in the environment of all tests
ROOT = Path(__file__).resolve().parents[1]
VISION = Path(sys.prefix) / "vision"
needs_images = pytest.mark.skipif(not VISION.is_dir(), reason=f"needs {VISION}, which `make vision` makes")

WORDS = ("<|endoftext|>", "<|im_end|>", "<|im_start|>")
#: tokens before, after and in place of an image, and in place of a film
MEDIA = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
#: what stands for an image in a prompt
IMAGE = MEDIA[0] + MEDIA[2] + MEDIA[1]
FIRST = len(WORDS) + 256  # behind the 256 bytes
IDS = {
    "vision_start_token_id": FIRST,
    "vision_end_token_id": FIRST + 1,
    "image_token_id": FIRST + 2,
    "video_token_id": FIRST + 3,
}
_TEXT = {
    "vocab_size": 272, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
_VISION = {
    "depth": 2, "hidden_size": 128, "num_heads": 2, "intermediate_size": 256, "out_hidden_size": 256, "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_PARTIAL = {**_ROPE, "partial_rotary_factor": 0.25, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
_QWEN3_5 = {"patch_size": 16, "num_position_embeddings": 64}

#: family -> what its language model and its tower have beyond the sizes
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (
        {"rope_parameters": {**_ROPE, "mrope_section": [8, 12, 12]}},
        {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": (
        {"head_dim": 64, "rope_parameters": {**_ROPE, "mrope_section": [12, 10, 10], "mrope_interleaved": True}},
        {"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
    ),
    "qwen3_5": ({**models.DELTA_NET, "head_dim": 64, "rope_parameters": _PARTIAL}, _QWEN3_5),
    "qwen3_5_moe": (
        {
            **models.DELTA_NET,
            "head_dim": 64,
            "rope_parameters": _PARTIAL,
            "moe_intermediate_size": 256,
            "shared_expert_intermediate_size": 256,
            "num_experts": 8,
            "num_experts_per_tok": 3,
        },
        _QWEN3_5,
    ),
}


def config_of(family: str, **text: Any) -> Any:
    """A Hugging Face config: 2 blocks of width 256, a tower with 2 blocks of width 128, vocabulary 272."""
    from transformers import AutoConfig

    own, vision = FAMILIES[family]
    return AutoConfig.for_model(
        family, text_config={**_TEXT, **own, **text}, vision_config={**_VISION, **vision}, tie_word_embeddings=False, **IDS
    )


def build(family: str, seed: int = 0, **text: Any) -> Any:
    """A BF16 model with weights large enough that its next-token distribution is not uniform."""
    from transformers import AutoModelForImageTextToText

    return models.spread(AutoModelForImageTextToText, config_of(family, **text), seed)


def tokenizer() -> Any:
    """One token for each byte, and those around and in place of images."""
    import tokenizers
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {token: i for i, token in enumerate([*WORDS, *alphabet])}
    made = Tokenizer(tokenizers.models.BPE(vocab=words, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token=WORDS[0],
        eos_token=WORDS[1],
        additional_special_tokens=[WORDS[2], *MEDIA],
        model_max_length=512,
    )
    assert fast.convert_tokens_to_ids(list(MEDIA)) == list(range(FIRST, FIRST + len(MEDIA)))
    fast.chat_template = _TEMPLATE.replace("IMAGE", IMAGE)
    return fast


_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}="
)


_PROCESSORS = {
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor"),
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_5", "qwen3_5_moe"), ("Qwen3VLProcessor", "Qwen2VLImageProcessor", "Qwen3VLVideoProcessor")
    ),
}


def processor(family: str) -> Any:
    """The family's own processor, for images of 4 to 16 tokens. Needs torchvision."""
    import transformers

    patch = FAMILIES[family][1]["patch_size"]
    side = 2 * patch
    sizes = {"size": {"shortest_edge": 4 * side * side, "longest_edge": 16 * side * side}, "patch_size": patch}
    words, whole, images, films = tokenizer(), *_PROCESSORS[family]
    return getattr(transformers, whole)(
        image_processor=getattr(transformers, images)(**sizes),
        tokenizer=words,
        video_processor=getattr(transformers, films)(**sizes),
        chat_template=words.chat_template,
    )


def picture(seed: int = 0, side: int = 64) -> Any:
    """A PIL image of coloured noise."""
    import numpy
    from PIL import Image

    return Image.fromarray(numpy.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=numpy.uint8))


def environ() -> dict[str, str]:
    """What a process needs in its environment to see."""
    return {"PYTHONPATH": f"{VISION}{os.pathsep}{ROOT}"}


def save(path: Path, family: str, seed: int = 0, **text: Any) -> str:
    """Write a checkpoint, with the family's processor if there is torchvision for it. Return its path."""
    from transformers import GenerationConfig

    build(family, seed, **text).save_pretrained(path)
    GenerationConfig(eos_token_id=1, pad_token_id=0).save_pretrained(path)
    if VISION.is_dir():
        words = [sys.executable, "-m", "tests.seeing", str(path), family]
        subprocess.run(words, check=True, env={**os.environ, **environ()})
    else:
        tokenizer().save_pretrained(path)
    return str(path)


if __name__ == "__main__":
    processor(sys.argv[2]).save_pretrained(sys.argv[1])
