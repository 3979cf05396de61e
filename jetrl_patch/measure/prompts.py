"""The prompts of ``jetrl parity`` as token ids: the user's, built-in samples, or random ones."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

from jetrl_patch.errors import ConfigError, explain

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
    """``count`` prompts of 1 to ``longest`` token ids, repeated if there are fewer.

    Args:
        file: text file with one prompt per line; blank lines are skipped. In a ``.jsonl`` file each line is a JSON string, which
            can have line breaks.
        tokenize: None if the model has no usable tokenizer. Prompts are then random.

    Raises ConfigError if the file is missing, malformed, empty or given without a tokenizer, or the tokenizer is another model's.
    """
    texts: list[str] = list(SAMPLES)
    if file is not None:
        if tokenize is None:
            why = "needs a tokenizer, but none loads from the model's directory"
            raise ConfigError(f"--prompts {file} {why}; add the tokenizer files or remove --prompts")
        try:
            texts = [line.strip() for line in Path(file).read_text().splitlines() if line.strip()]
        except OSError as error:
            raise ConfigError(f"--prompts {file} cannot be read: {error.strerror}") from None
        if file.endswith(".jsonl"):
            texts = [_json_string(file, line) for line in texts]
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


def _json_string(file: str, line: str) -> str:
    try:
        text = json.loads(line)
    except ValueError:
        text = None
    if not isinstance(text, str):
        what, required = f"--prompts {file}", "a JSON string on each line"
        raise ConfigError(explain(what, required=required, found=line[:60], fix="write one, or use a .txt file of plain lines"))
    return text
