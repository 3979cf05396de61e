"""Tiny models with a vision tower, their processors and an image, built locally: nothing is downloaded.

The towers' linears have blocks, merged layers and widths of their own, so that a rule that looked at blocks alone would
quantize them.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from jetrl_patch.measure.pictures import Picture, noise, place_pictures
from jetrl_patch.models import families
from tests import forks, models

#: torchvision and what verl needs for images, which `make vision` installs; not in the environment of all tests
ROOT = Path(__file__).resolve().parents[1]
VISION = ROOT / ".venv" / "vision"
needs_images = pytest.mark.skipif(not VISION.is_dir(), reason=f"needs {VISION}, which `make vision` makes")

WORDS = ("<|endoftext|>", "<|im_end|>", "<|im_start|>")
FIRST = len(WORDS) + 256  # behind the 256 bytes
#: tokens before, after and in place of an image, and in place of a film -> keys of their numbers in the configuration
_QWEN = {
    "<|vision_start|>": "vision_start_token_id", "<|vision_end|>": "vision_end_token_id", "<|image_pad|>": "image_token_id",
    "<|video_pad|>": "video_token_id",
}  # fmt: skip
#: the same, and tokens before and after a film
_GLM = {
    "<|begin_of_image|>": "image_start_token_id", "<|end_of_image|>": "image_end_token_id", "<|image|>": "image_token_id",
    "<|video|>": "video_token_id", "<|begin_of_video|>": "video_start_token_id", "<|end_of_video|>": "video_end_token_id",
}  # fmt: skip
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
_QWEN3 = (
    {"head_dim": 64, "rope_parameters": {**_ROPE, "mrope_section": [12, 10, 10], "mrope_interleaved": True}},
    {"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
)
#: experts as wide as no other part: its checkpoint holds them transposed, and a square matrix would hide it
_EXPERTS = {"moe_intermediate_size": 384, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True}

#: family -> what its language model and its tower have beyond the sizes
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (
        {"rope_parameters": {**_ROPE, "mrope_section": [8, 12, 12]}},
        {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": ({**_QWEN3[0], **_EXPERTS, "tie_word_embeddings": False}, _QWEN3[1]),
    "glm4v": (  # half of a head is rotated
        {"attention_bias": True, "rope_parameters": {**_ROPE, "mrope_section": [4, 6, 6], "partial_rotary_factor": 0.5}},
        {"patch_size": 14, "image_size": 112},
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

#: a head as wide as published ones, whose sections end in the middle of a third, and one weight for embedding and lm_head
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5-tied": (
        "qwen3_5",
        {
            "head_dim": 256,
            "num_key_value_heads": 1,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "rope_parameters": {**_PARTIAL, "mrope_section": [11, 11, 10]},
            "num_hidden_layers": 3,
            "tie_word_embeddings": True,
        },
    ),
}


def media(family: str) -> dict[str, str]:
    """The tokens around and in place of images and films, numbered from ``FIRST``, and their keys in the configuration."""
    return _GLM if family == "glm4v" else _QWEN


def words(family: str) -> list[str]:
    """The tokens behind the bytes: those of ``media``, and those that verl looks up to tell a family's turns apart."""
    return [*media(family), *(("<|observation|>", "<|user|>") if family == "glm4v" else ())]


def image(family: str) -> str:
    """The placeholder of an image in a prompt."""
    before, after, place, *_ = media(family)
    return before + place + after


def config_of(family: str, **text: Any) -> Any:
    """A Hugging Face config: 2 blocks of width 256, a tower with 2 blocks of width 128, vocabulary 272."""
    from transformers import AutoConfig

    own, vision = FAMILIES[family]
    ids = {key: FIRST + i for i, key in enumerate(media(family).values())}
    return AutoConfig.for_model(
        family,
        text_config={**_TEXT, **own, **text},
        vision_config={**_VISION, **vision},
        tie_word_embeddings=text.get("tie_word_embeddings", False),
        architectures=[families.FAMILIES[family].causal_lm],
        **ids,
    )


def build(family: str, seed: int = 0, **text: Any) -> Any:
    """A BF16 model with weights large enough that its next-token distribution is not uniform."""
    from transformers import AutoModelForImageTextToText

    return models.spread(AutoModelForImageTextToText, config_of(family, **text), seed)


def tokenizer(family: str) -> Any:
    """One token for each byte, and those around and in place of images."""
    import tokenizers
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    own = words(family)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*WORDS, *alphabet])}
    made = Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token=WORDS[0],
        eos_token=WORDS[1],
        additional_special_tokens=[WORDS[2], *own],
        model_max_length=512,
    )
    assert fast.convert_tokens_to_ids(own) == list(range(FIRST, FIRST + len(own)))
    fast.chat_template = _TEMPLATE.replace("IMAGE", image(family))
    return fast


_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}="
)


_PROCESSORS = {
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor"),
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        ("Qwen3VLProcessor", "Qwen2VLImageProcessor", "Qwen3VLVideoProcessor"),
    ),
    "glm4v": ("Glm4vProcessor", "Glm4vImageProcessor", "Glm4vVideoProcessor"),
}


def processor(family: str) -> Any:
    """The family's own processor, for images of at most 16 tokens. Needs torchvision."""
    import transformers

    patch = FAMILIES[family][1]["patch_size"]
    side = 2 * patch
    sizes = {"size": {"shortest_edge": 4 * side * side, "longest_edge": 16 * side * side}, "patch_size": patch}
    spoken, whole, images, films = tokenizer(family), *_PROCESSORS[family]
    return getattr(transformers, whole)(
        image_processor=getattr(transformers, images)(**sizes),
        tokenizer=spoken,
        video_processor=getattr(transformers, films)(**sizes),
        chat_template=spoken.chat_template,
    )


def picture(seed: int = 0, side: int = 64) -> Any:
    """A square PIL image of colored noise."""
    return noise(seed, side, side)


def prompts(llm: Any, count: int) -> tuple[list[list[int]], list[list[Picture]]]:
    """Prompts for an engine, the first with an image, and the images of each."""
    from jetrl_patch.adapters.vllm.sample import around, make_pictures

    encode = llm.get_tokenizer().encode
    texts = [encode(f"{number % 5}?" + "=" * (number % 7 + 1)) for number in range(count + 1)]
    asked, shown = place_pictures(texts, make_pictures(llm.model_config.model), around(llm.model_config.hf_config))
    return asked[1:], shown[1:]


def environ() -> dict[str, str]:
    """The environment variables that a process needs to process images."""
    return {"PYTHONPATH": f"{VISION}{os.pathsep}{ROOT}"}


def save(path: Path, family: str, seed: int = 0, **text: Any) -> str:
    """Write a checkpoint, with the family's processor if there is torchvision for it. Return its path."""
    from transformers import GenerationConfig

    build(family, seed, **text).save_pretrained(path)
    if family == "qwen3_vl_moe":
        _as_on_the_hub(path / "model.safetensors")
    GenerationConfig(eos_token_id=1, pad_token_id=0).save_pretrained(path)
    if VISION.is_dir():
        done = forks.run(__file__, str(path), family, environ=environ())
        assert done.returncode == 0, done.stderr
    else:
        tokenizer(family).save_pretrained(path)
    return str(path)


def numbers(model: Path) -> tuple[int, int, int, int]:
    """How many FP8 layers a model has, how many numbers they hold, how many blocks of 128 x 128, and all the rest."""
    from safetensors import safe_open

    from jetrl_patch.models.layers import is_quantized

    layers, inside, blocks, rest = 0, 0, 0, 0
    with safe_open(model / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            shape = file.get_slice(name).get_shape()
            if ".mlp.experts." not in name and (len(shape) != 2 or not is_quantized(name.removesuffix(".weight"), ())):
                rest += file.get_tensor(name).numel()
                continue
            *experts, n, k = shape
            count = (2 if name.endswith("experts.gate_up_proj") else 1) * math.prod(experts)
            layers, inside = layers + count, inside + math.prod(shape)
            blocks += math.prod(experts) * -(-n // 128) * -(-k // 128)  # no size of an expert leaves a rest
    return layers, inside, blocks, rest


def _as_on_the_hub(file: Path) -> None:
    """Transpose stacked experts: so the hub's checkpoints hold them, and so vLLM reads them.

    transformers 5.10 reads either way by its shape, and saves them as they are in the model.
    """
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    experts = {name: tensor.mT.contiguous() for name, tensor in tensors.items() if ".mlp.experts." in name}
    if experts:
        save_file(tensors | experts, file, {"format": "pt"})


if __name__ == "__main__":
    processor(sys.argv[2]).save_pretrained(sys.argv[1])
