"""Prompts as token ids: the user's, built-in samples, or random ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from jetrl_patch.errors import ConfigError

__all__ = ["SAMPLES", "make_prompts"]

SAMPLES = (
    "The capital of France is",
    "Question: a train travels 120 km in 2 hours. What is its average speed? Answer:",
    "def fibonacci(n):",
    "Once upon a time there was a mathematician who",
    "List three prime numbers greater than 50:",
    "In 1687 Isaac Newton published",
    "Explain in one sentence why the sky is blue.",
    "12 + 7 * 3 =",
)

#: text -> token ids
Tokenize = Callable[[str], list[int]]


def make_prompts(
    file: str | None, tokenize: Tokenize | None, *, count: int, vocabulary: int, longest: int, seed: int
) -> list[list[int]]:
    """Return ``count`` prompts of 1 to ``longest`` token ids, repeating them if there are fewer.

    Args:
        file: text file with one prompt per line; blank lines are skipped.
        tokenize: None if the model has no usable tokenizer; prompts are then random.

    Raises:
        ConfigError: the file is missing, empty or given without a tokenizer, or the tokenizer is another model's.
    """
    texts: list[str] = list(SAMPLES)
    if file is not None:
        if tokenize is None:
            raise ConfigError(
                f"--prompts {file} needs a tokenizer, but none loads from the model's directory; "
                f"add the tokenizer files or remove --prompts"
            )
        try:
            texts = [line.strip() for line in Path(file).read_text().splitlines() if line.strip()]
        except OSError as error:
            raise ConfigError(f"--prompts {file} cannot be read: {error.strerror}") from None
        if not texts:
            raise ConfigError(f"--prompts {file} contains no prompts. Write one per line.")
    if tokenize is not None:
        prompts = [ids for ids in (tokenize(text)[:longest] for text in texts) if ids]
        strange = max((token for ids in prompts for token in ids), default=-1)
        if strange >= vocabulary:
            raise ConfigError(
                f"the tokenizer returns token {strange}, but the model has {vocabulary} tokens, so it is another model's; "
                f"copy the model's own tokenizer files into its directory"
            )
        if prompts:
            return [prompts[i % len(prompts)] for i in range(count)]
    generator = random.Random(seed)
    lengths = [generator.randint(1, min(24, longest)) for _ in range(count)]
    return [[generator.randrange(vocabulary) for _ in range(length)] for length in lengths]
