"""Images of random pixels in the prompts of ``jetrl parity``, for models with a vision tower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetrl_patch.errors import JetrlError, ModelError, explain
from jetrl_patch.models.families import FAMILIES
from jetrl_patch.patching.guards import is_installed

if TYPE_CHECKING:
    from torch import Tensor

#: most images of a prompt
MOST_PICTURES = 2


@dataclass(frozen=True)
class Picture:
    """An image for the rollout, and what the model's processor makes of it for the trainer.

    Attributes:
        image: a PIL image.
        pixels: FP32 patches [T, K].
        grid: int64 [1, 3], the number of patches in time, height and width.
        tokens: number of tokens in the language model.
    """

    image: Any
    pixels: Tensor
    grid: Tensor
    tokens: int


def noise(seed: int, height: int, width: int) -> Any:
    """A PIL image of random colors. Sizes in pixels."""
    import numpy
    from PIL import Image

    return Image.fromarray(numpy.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=numpy.uint8))


def place_pictures(
    prompts: Sequence[list[int]], pictures: Sequence[Picture], around: list[int]
) -> tuple[list[list[int]], list[list[Picture]]]:
    """Give the prompts no, one or two pictures in turn: one before the text, one in it.

    Args:
        around: the tokens before, in place of and after an image.

    Returns the prompts, in which each picture is a single placeholder, and the pictures of each prompt.
    """
    shown = [[pictures[(i + place) % len(pictures)] for place in range(i % (MOST_PICTURES + 1))] for i in range(len(prompts))]
    made = []
    for prompt, seen in zip(prompts, shown, strict=True):
        half = len(prompt) // 2
        made.append([*around * len(seen[:1]), *prompt[:half], *around * len(seen[1:]), *prompt[half:]])
    return made, shown


def check_images(path: str, model_type: Any) -> None:
    """Check that the prompts of a model in this folder can have images.

    Raises:
        ModelError: another family has a vision tower, or the folder has no image processor.
        JetrlError: a package that processes images is not installed.
    """
    what = f"--model {path}"
    known = [name for name, family in FAMILIES.items() if family.tower]
    if model_type not in known:
        required, found = f"a text model, or one of {', '.join(known)}", f"model_type={model_type!r}, which has a vision_config"
        raise ModelError(explain(what, required=required, found=found, fix="compare the text model that it is built on"))
    if not any((Path(path) / file).is_file() for file in ("preprocessor_config.json", "processor_config.json")):
        required = "the model's image processor (preprocessor_config.json)"
        raise ModelError(explain(what, required=required, found="no such file", fix="copy it from the original model"))
    if missing := [name for name in ("PIL", "torchvision") if not is_installed(name)]:
        found = f"no {' and no '.join(missing)}"
        raise JetrlError(explain(f"images for {path}", required="pillow and torchvision", found=found, fix="install them"))
