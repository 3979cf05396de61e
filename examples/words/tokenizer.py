"""The tokenizer of the words example: whole words and single digits, 128 entries, nothing downloaded.

A word includes its leading space (`` twelve``), so joining the tokens restores the text exactly.
"""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.words import task

VOCAB_SIZE = 128
PAD, START, END, UNKNOWN = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unknown|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_PIECE = r" ?[a-z]+|[0-9]| ?[^ a-z0-9\n]|\n| "


def vocabulary() -> list[str]:
    """All pieces in a fixed order: special tokens, characters, then words with and without a leading space."""
    pieces = [PAD, START, END, UNKNOWN, "\n", " ", *"0123456789", *"+-=,.:?"]
    sources = [*task.ONES, *task.TENS]
    for phrase in (
        *task.PLUS,
        *task.MINUS,
        *task.WORKED_OPENINGS,
        *task.GUESSED_OPENINGS,
        *task.JOINTS,
        *task.CLOSINGS,
    ):
        sources += phrase.replace("{a}", " ").replace("{b}", " ").split()
    words = [word.strip("?.,:") for word in sources]
    openings = [
        phrase.split()[0].strip("?.,:")
        for phrase in (*task.PLUS, *task.MINUS, *task.WORKED_OPENINGS, *task.GUESSED_OPENINGS)
    ]
    pieces += [" " + word for word in words if word] + openings + ["system", "user", "assistant"]
    return list(dict.fromkeys(pieces))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer, with ``len(tokenizer) == VOCAB_SIZE``: verl masks ids beyond its length in the rollout only.

    Raises:
        ValueError: the wordings of the task need more than ``VOCAB_SIZE`` entries.
    """
    pieces = vocabulary()
    if len(pieces) > VOCAB_SIZE:
        raise ValueError(
            f"tokenizer: required {len(pieces)} entries, found room for {VOCAB_SIZE}; raise VOCAB_SIZE"
        )
    pieces += [f"<|unused{i}|>" for i in range(VOCAB_SIZE - len(pieces))]
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECE), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        additional_special_tokens=[START],
        model_max_length=128,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
