"""Tiny models with a vision tower, and questions about pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests import vision_models

#: of the names of a checkpoint's first weight and its last
ENDS = ("embed_tokens.weight", "lm_head.weight")


def checkpoint(folder: Path, family: str) -> str:
    """Write a model that never answers with the placeholder of an image, and return its path.

    The first number of every embedding is large, and so is the logit that the placeholders lose by it.
    """
    import safetensors.torch

    vision_models.save(folder, family)
    file = folder / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    embeddings, head = (next(value for name, value in weights.items() if name.endswith(end)) for end in ENDS)
    embeddings[:, 0] = 8.0
    head[vision_models.FIRST :] = 0.0
    head[vision_models.FIRST :, 0] = -8.0
    safetensors.torch.save_file(weights, file, metadata={"format": "pt"})
    return str(folder)


def questions(count: int) -> list[dict[str, Any]]:
    """About one or two pictures, of several sizes. The same four pictures come again and again."""

    def ask(number: int) -> dict[str, Any]:
        shown = [vision_models.picture(number % 2 + i, 56 + 28 * (number % 3)) for i in range(1 + number % 2)]
        content = [*({"type": "image"} for _ in shown), {"type": "text", "text": "what is it" + "?" * (number % 5)}]
        return {"prompt": [{"role": "user", "content": content}], "images": shown}

    return [ask(number) for number in range(count)]
