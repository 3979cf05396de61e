"""Read a Hugging Face checkpoint one tensor at a time, and check it against its own config.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetrl_patch.errors import ConfigError, ModelError, explain
from jetrl_patch.families import FAMILIES
from jetrl_patch.fp8.expert_layers import expert_modules, shapes_per_expert

__all__ = ["INDEX", "SECOND_TOKEN", "SINGLE", "Source", "empty_model", "open_source", "read_tensors"]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_REQUIRED = "a Hugging Face checkpoint (config.json with model.safetensors, or with shards and their index)"
_WHOLE = "copy or save the checkpoint again"
#: a buffer that the model computes; old versions of transformers saved it
_NOT_LOADED = "rotary_emb.inv_freq"
#: the number of blocks that predict a second token, in config.json
SECOND_TOKEN = "num_nextn_predict_layers"
_BLOCK = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Source:
    """The location of each tensor of a checkpoint.

    Attributes:
        config: the contents of config.json.
        files: tensor -> file, shard by shard.
    """

    folder: Path
    config: dict[str, Any]
    files: dict[str, Path]

    def holds(self, name: str) -> bool:
        """Whether a tensor is the model's. Blocks behind the last one predict a second token, and no trainer loads them."""
        block, count = _BLOCK.match(name), self.config.get("num_hidden_layers", 0)
        behind = self.config.get(SECOND_TOKEN) and block is not None and int(block[1]) >= count
        return not behind and not name.endswith(_NOT_LOADED)

    @property
    def count(self) -> int:
        """The number of the model's tensors."""
        return sum(map(self.holds, self.files))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors, file by file, one at a time."""
        for file in dict.fromkeys(self.files.values()):
            for name, tensor in read_tensors(file):
                if self.holds(name):
                    yield name, tensor


def open_source(folder: Path) -> Source:
    """Inspect a checkpoint's folder. Raises ConfigError if it is not a checkpoint, incomplete, or already quantized."""
    what = f"checkpoint {folder}"
    if not (folder / "config.json").is_file():
        found = sorted(path.name for path in folder.iterdir())[:6] if folder.is_dir() else "no such folder"
        raise ConfigError(explain(what, required=_REQUIRED, found=found, fix="give the folder that holds config.json"))
    config = _json(folder / "config.json")
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method")
        raise ConfigError(
            explain(
                what,
                required="weights in BF16 or FP32",
                found=f"quantization_config with quant_method={method!r}",
                fix="export the checkpoint from before it was quantized",
            )
        )
    if (folder / INDEX).is_file():
        weight_map = _json(folder / INDEX).get("weight_map", {})
        files = {name: folder / file for name, file in weight_map.items()}
    elif (folder / SINGLE).is_file():
        files = dict.fromkeys(_names(folder / SINGLE), folder / SINGLE)
    else:
        found = (
            ", ".join(sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth"))[:4])
            or "no weights"
        )
        fix = "save the model with save_pretrained, which writes safetensors"
        raise ConfigError(explain(what, required=_REQUIRED, found=found, fix=fix))
    for file in sorted(set(files.values())):
        listed = {name for name, place in files.items() if place == file}
        lost = sorted(listed - _names(file))
        if lost:
            raise ConfigError(
                explain(what, required=f"{lost[0]} in {file.name}", found="a file without it", fix=_WHOLE)
            )
    if not files:
        raise ConfigError(explain(what, required="weights", found="none", fix=_WHOLE))
    return Source(folder, config, files)


def read_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one safetensors file, one at a time."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118
            yield name, opened.get_tensor(name)


def empty_model(source: Source) -> Any:
    """Build the model of config.json without weights, and check that the checkpoint holds exactly its tensors.

    Raises:
        ModelError: transformers does not know the model, or a tensor is missing, unknown or of another shape.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    what = f"checkpoint {source.folder}"
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source.folder))
    except Exception as error:  # whatever config.json makes transformers raise
        found = f"{type(error).__name__}: {error}"
        fix = "check model_type and architectures in config.json"
        raise ModelError(explain(what, required="a causal language model", found=found, fix=fix)) from error
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if expert_modules(model):
        family = FAMILIES[model.config.model_type]
        expected = {family.to_stored(name): shape for name, shape in shapes_per_expert(expected).items()}
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    found_names = set(filter(source.holds, source.files))
    for problem, names in (
        ("missing", set(expected) - found_names - tied),
        ("unknown", found_names - set(expected)),
    ):
        if names:
            raise ModelError(
                explain(
                    what,
                    required=f"the {len(expected)} tensors of {type(model).__name__}",
                    found=f"{len(names)} {problem}, such as {min(names)}",
                    fix="use a complete checkpoint with its own config.json",
                )
            )
    for name, shape in _shapes(source):
        if shape != expected[name]:
            raise ModelError(
                explain(
                    f"{name} of {what}",
                    required=f"shape {list(expected[name])}",
                    found=list(shape),
                    fix="use the checkpoint's own config.json",
                )
            )
    return model


def _shapes(source: Source) -> Iterator[tuple[str, tuple[int, ...]]]:
    from safetensors import safe_open

    for file in dict.fromkeys(source.files.values()):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                if source.holds(name):
                    yield name, tuple(opened.get_slice(name).get_shape())


def _names(file: Path) -> set[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            return set(opened.keys())
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            explain(f"{file}", required="a complete safetensors file", found=error, fix=_WHOLE)
        ) from error


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
        if isinstance(found, dict):
            return found
        raise ValueError("not a JSON object")
    except (OSError, ValueError) as error:
        raise ConfigError(
            explain(f"{file}", required="a JSON object", found=error, fix=_WHOLE)
        ) from error
