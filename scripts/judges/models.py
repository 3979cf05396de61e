"""Models for the suites of others: random weights, and a tokenizer for which text is as good as token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests import vision_models
from tests.models import save

__all__ = ["MODELS", "sees", "tokenizer", "write"]

#: what the tests of vLLM generate with; wide enough that a stock engine's results depend on the batch
_WIDE: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {**_WIDE, "num_hidden_layers": 4},
    "qwen3_moe": {**_WIDE, "moe_intermediate_size": 512},
    "deepseek_v3": {"hidden_size": 1024, "intermediate_size": 3072, "moe_intermediate_size": 512},
    "qwen3_next": {**_WIDE, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
}
#: positions of the longest request
_POSITIONS = 8192


def tokenizer(words: int = 1024) -> Any:
    """One token a character, so that text which was decoded gives the same tokens again, as one of vLLM's tests assumes."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<unk>"]
    plain = [chr(code) for code in range(32, 127)]
    # the rest of the vocabulary: ideographs, which no normalization changes
    rest = [chr(0x4E00 + i) for i in range(words - len(special) - len(plain) - 1)]
    found = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*special, "\n", *plain, *rest])}, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    found.decoder = decoders.Fuse()
    text = PreTrainedTokenizerFast(tokenizer_object=found, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    text.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    return text


def sees(name: str) -> bool:
    """Whether a model takes images, for which its process needs what ``make vision`` installs."""
    return name in vision_models.FAMILIES


def write(folder: Path, name: str) -> Path:
    """The checkpoint of one of ``MODELS``, or of a vision-language family, below ``folder``, made at the first call."""
    path = folder / name
    if (path / "tokenizer.json").is_file():
        return path
    if sees(name):
        vision_models.save(path, name, max_position_embeddings=_POSITIONS)
    else:
        text = tokenizer()
        save(path, name, steps=10, vocab_size=len(text), max_position_embeddings=_POSITIONS, **MODELS[name])
        text.save_pretrained(path)
    return path
