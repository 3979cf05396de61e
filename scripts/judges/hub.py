"""A folder with the models and data sets that TRL's tests name on a hub, made here: paths come before names on a hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scripts.judges.models import tokenizer

__all__ = ["write"]

_OWNER = "trl-internal-testing"
#: a model of the hub -> its family
_POLICIES = {
    f"{_OWNER}/tiny-Qwen2ForCausalLM-2.5": "qwen2",
    f"{_OWNER}/tiny-Qwen3ForCausalLM": "qwen3",
    f"{_OWNER}/tiny-LlamaForCausalLM-3.2": "llama",
    f"{_OWNER}/tiny-MistralForCausalLM-0.2": "mistral",
    f"{_OWNER}/tiny-Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen/Qwen2.5-0.5B-Instruct": "qwen2",
}
#: a reward model -> its family
_REWARDS = {
    f"{_OWNER}/tiny-Qwen2ForSequenceClassification-2.5": "qwen2",
    f"{_OWNER}/tiny-Qwen3ForSequenceClassification": "qwen3",
    f"{_OWNER}/tiny-LlamaForSequenceClassification-3.2": "llama",
}
_QUESTIONS = [f"Which word comes after {word}?" for word in "one two three four five six seven eight nine ten".split()] * 2
_CONFIGS = {
    "standard_prompt_only": _QUESTIONS,
    "conversational_prompt_only": [[{"role": "user", "content": question}] for question in _QUESTIONS],
}


def write(folder: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    from tests.models import config_of, save, spread

    text = tokenizer(384)
    common = {"vocab_size": len(text), "eos_token_id": text.eos_token_id, "pad_token_id": text.pad_token_id}
    for name, family in _POLICIES.items():
        save(folder / name, family, steps=0, **common)
        text.save_pretrained(folder / name)
    for name, family in _REWARDS.items():
        model = spread(AutoModelForSequenceClassification, config_of(family, num_labels=1, **common), seed=0)
        model.save_pretrained(folder / name)
        text.save_pretrained(folder / name)
    _questions(folder / _OWNER / "zen")


def _questions(folder: Path) -> None:
    """A data set with two configurations, each with two splits."""
    entries: list[dict[str, Any]] = []
    for name, prompts in _CONFIGS.items():
        splits = {"train": prompts[:-2], "test": prompts[-2:]}
        (folder / name).mkdir(parents=True)
        for split, rows in splits.items():
            (folder / name / f"{split}.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
        files = [{"split": split, "path": f"{name}/{split}.jsonl"} for split in splits]
        entries.append({"config_name": name, "data_files": files})
    # JSON is YAML
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(entries)}\n---\n")
