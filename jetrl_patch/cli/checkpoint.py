"""A checkpoint, read one tensor at a time and checked, and what each tensor becomes as BF16 or block FP8."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from jetrl_patch.backends.quantize import dequantize_weight, expand_weight_scale, quantize_weight
from jetrl_patch.config.formats import FORMATS, ScaleFormat
from jetrl_patch.errors import ConfigError, ModelError, explain
from jetrl_patch.fp8.convert import expert_modules, select_layers, shapes_per_expert, stored_buffers, whole_shape
from jetrl_patch.kernels.formats import BLOCK
from jetrl_patch.models.families import FAMILIES, LLAMA_LIKE, MERGED
from jetrl_patch.models.structure import units

# ---- Read a Hugging Face checkpoint one tensor at a time, and check it against its own config.json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_REQUIRED = "a Hugging Face checkpoint (config.json with model.safetensors, or with shards and their index)"
_WHOLE = "copy or save the checkpoint again"
#: a buffer that the model computes; old versions of transformers saved it
_NOT_LOADED = "rotary_emb.inv_freq"
#: the number of blocks that predict a second token, in config.json
_SECOND_TOKEN = "num_nextn_predict_layers"
_BLOCK = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Source:
    """A checkpoint and where it stores each tensor of the model.

    Attributes:
        config: the contents of config.json.
        files: tensor -> file, shard by shard.
        shapes: tensor -> shape.
    """

    folder: Path
    config: dict[str, Any]
    files: dict[str, Path]
    shapes: dict[str, tuple[int, ...]]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors, file by file, one at a time."""
        from safetensors import safe_open

        for file in dict.fromkeys(self.files.values()):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    if name in self.files:
                        yield name, opened.get_tensor(name)


def open_source(folder: Path) -> Source:
    """Inspect a checkpoint's folder. Raises ConfigError if it is not a checkpoint, incomplete, or already quantized."""
    what = f"checkpoint {folder}"
    if not (folder / "config.json").is_file():
        here = sorted(path.name for path in folder.iterdir())[:6] if folder.is_dir() else "no such folder"
        raise ConfigError(explain(what, required=_REQUIRED, found=here, fix="give the folder that holds config.json"))
    config = _json(folder / "config.json")
    if "quantization_config" in config:
        found = f"quantization_config with quant_method={config['quantization_config'].get('quant_method')!r}"
        fix = "export the checkpoint from before it was quantized"
        raise ConfigError(explain(what, required="weights in BF16 or FP32", found=found, fix=fix))
    if (folder / INDEX).is_file():
        listed = {name: folder / file for name, file in _json(folder / INDEX).get("weight_map", {}).items()}
    elif (folder / SINGLE).is_file():
        listed = dict.fromkeys(shapes_in(folder / SINGLE), folder / SINGLE)
    else:
        found = ", ".join(sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth"))[:4])
        fix = "save the model with save_pretrained, which writes safetensors"
        raise ConfigError(explain(what, required=_REQUIRED, found=found or "no weights", fix=fix))
    if not listed:
        raise ConfigError(explain(what, required="weights", found="none", fix=_WHOLE))
    stored = {file: shapes_in(file) for file in sorted(set(listed.values()))}
    for name, file in listed.items():
        if name not in stored[file]:
            raise ConfigError(explain(what, required=f"{name} in {file.name}", found="a file without it", fix=_WHOLE))
    files = {name: file for name, file in listed.items() if _is_loaded(name, config)}
    return Source(folder, config, files, {name: stored[file][name] for name, file in files.items()})


def _is_loaded(name: str, config: dict[str, Any]) -> bool:
    """Whether a tensor is part of the model. Trainers ignore the blocks after the last one, which predict a second token."""
    block = _BLOCK.match(name)
    after = config.get(_SECOND_TOKEN) and block is not None and int(block[1]) >= config.get("num_hidden_layers", 0)
    return not after and not name.endswith(_NOT_LOADED)


def shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    """Tensor -> shape, from the header of a safetensors file. Raises ConfigError if the file is incomplete."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ConfigError(explain(f"{file}", required="a complete safetensors file", found=error, fix=_WHOLE)) from error


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
        if isinstance(found, dict):
            return found
        raise ValueError("not a JSON object")
    except (OSError, ValueError) as error:
        raise ConfigError(explain(f"{file}", required="a JSON object", found=error, fix=_WHOLE)) from error


def _empty_model(source: Source) -> Any:
    """Build the model of config.json without weights, and check that the checkpoint holds exactly its tensors.

    Raises ModelError if transformers does not know the model, or if a tensor is missing, unknown or of another shape.
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
    missing, unknown = expected.keys() - source.shapes.keys() - tied, source.shapes.keys() - expected.keys()
    for problem, names in (("missing", missing), ("unknown", unknown)):
        if names:
            required = f"the {len(expected)} tensors of {type(model).__name__}"
            found, fix = f"{len(names)} {problem}, such as {min(names)}", "use a complete checkpoint with its own config.json"
            raise ModelError(explain(what, required=required, found=found, fix=fix))
    for name, shape in source.shapes.items():
        if shape != expected[name]:
            required, fix = f"shape {list(expected[name])}", "use the checkpoint's own config.json"
            raise ModelError(explain(f"{name} of {what}", required=required, found=list(shape), fix=fix))
    return model


# ---- Convert each tensor of a checkpoint to BF16, or to block FP8 as in DeepSeek's checkpoints ---
# Block FP8 is ``layer.weight`` e4m3 [N, K] and ``layer.weight_scale_inv`` FP32 [ceil(N/128), ceil(K/128)]. The trainer's own
# quantizer makes them from the BF16 value: these are the bytes that the trainer computed with. An expert is three such layers.

Format = Literal["bf16", "fp8"]
SCALE_SUFFIX = "_scale_inv"


class Chosen(NamedTuple):
    """What becomes of a model's tensors.

    Attributes:
        layers: names of the layers that become FP8, as the checkpoint has them.
        left: modules that stay in BF16 and that a loader would take for FP8, by every name that a loader may use.
        fp32: tensors that stay in FP32: the buffers of a mixture of experts, as in its checkpoint.
        scale_format: format of the FP8 layers' scales.
    """

    layers: dict[str, None]
    left: list[str]
    fp32: frozenset[str]
    scale_format: ScaleFormat


def choose(source: Source, format: Format, scale_format: ScaleFormat, exclude: Sequence[str]) -> Chosen:
    """Choose the layers that become FP8, so that stock vLLM and transformers can load the result.

    Raises:
        ModelError: the checkpoint does not hold exactly the tensors of its model, or as ``select_layers``.
        ConfigError: vLLM merges some layers of which only a part would be FP8, or of which one ends inside a block.
    """
    if format == "fp8" and not FORMATS[scale_format].square:
        required, fix = "scale_format='pow2' or 'fp32', which vLLM and transformers load", "give --scale-format pow2"
        found = f"{scale_format!r}, as in the run's settings"
        raise ConfigError(explain("export to FP8", required=required, found=found, fix=fix))
    model = _empty_model(source)
    experts = expert_modules(model)
    family = FAMILIES.get(model.config.model_type, LLAMA_LIKE)
    fp32 = frozenset(family.to_stored(name) for name in stored_buffers(model)) if experts else frozenset()
    if format == "bf16":
        return Chosen({}, [], fp32, scale_format)
    chosen = select_layers(model, exclude)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    for merged in MERGED:
        for name in [name for name in linears if name.rsplit(".", 1)[-1] == merged[0]]:
            prefix = name.removesuffix(merged[0])
            group = [prefix + part for part in merged if prefix + part in linears]
            fp8 = [name for name in group if name in chosen]
            if fp8 and fp8 != group:
                _refuse(", ".join(group), "all or none of them in FP8", f"only {', '.join(fp8)}", merged)
            for layer in fp8[:-1]:  # the next layer has to start on a block boundary
                rows = linears[layer].out_features
                if rows % BLOCK:
                    _refuse(layer, f"a multiple of {BLOCK} rows, as vLLM merges it", f"{rows} rows", merged)
    inside = units(chosen)
    for name, module in experts.items():
        width = whole_shape(module.down_proj)[2]
        if name in inside and width % BLOCK:
            _refuse(name, f"a multiple of {BLOCK} rows of gate and up, as vLLM merges them", f"{width} rows", ("experts",))
    # vLLM's routers are linear layers, and transformers' are not
    routers = [name for name, module in model.named_modules() if family.router and type(module).__name__ == family.router]
    left = [name for name in (*linears, *routers, *experts) if name not in inside]
    both = dict.fromkeys(name for ours in left for name in (ours, family.to_stored(ours)))
    return Chosen(dict.fromkeys(map(family.to_stored, chosen)), list(both), fp32, scale_format)


def _refuse(what: str, required: str, found: str, merged: Sequence[str]) -> None:
    leave = " ".join(f"--exclude {part}" for part in merged)
    fix = f"keep the merged layers in BF16 with {leave}"
    raise ConfigError(explain(f"FP8 export of {what}", required=required, found=found, fix=fix))


def new_config(source: Source, fp8: bool, left: Sequence[str]) -> dict[str, Any]:
    """The config.json of the export, with the section that tells vLLM and transformers which layers are FP8."""
    config = dict(source.config)
    named = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
    config |= dict.fromkeys(named, "bfloat16")
    if config.get(_SECOND_TOKEN):
        config[_SECOND_TOKEN] = 0  # these blocks are not exported
    if fp8:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": list(left),
        }
    return config


def convert(name: str, tensor: Tensor, chosen: Chosen) -> dict[str, Tensor]:
    """Return the tensors written for one source tensor. Raises ModelError, with its name, for a NaN or Inf."""
    if not tensor.is_floating_point():
        return {name: tensor}
    value = tensor.float() if name in chosen.fp32 else tensor.to(torch.bfloat16)
    bad = int((~torch.isfinite(value)).sum())
    if bad:
        found = f"{bad} NaN or Inf among {value.numel()} in {'FP32' if name in chosen.fp32 else 'BF16'}"
        fix = "export an earlier checkpoint of the run"
        raise ModelError(explain(f"tensor {name}", required="finite values", found=found, fix=fix))
    if name.removesuffix(".weight") not in chosen.layers:
        return {name: value}
    q, s_blocks = quantize_weight(value, chosen.scale_format)
    return {name: q, name + SCALE_SUFFIX: s_blocks}


def check_error(name: str, tensor: Tensor, q: Tensor, s_blocks: Tensor) -> float:
    """Check that each value is within half an e4m3 step, and return the SQNR in dB (infinite if nothing is lost).

    A step is 2^-3 of the power of two at or below the value, and at least 2^-9 of the scale. Raises ModelError.
    """
    value = tensor.to(torch.bfloat16).double()
    error = (dequantize_weight(q, s_blocks, torch.float32).double() - value).abs()
    s_NK = expand_weight_scale(s_blocks, q.shape[0]).repeat_interleave(BLOCK, 1)[:, : q.shape[1]].double()
    allowed = torch.maximum(value.abs() * 2.0**-4, s_NK * 2.0**-10) * (1 + 1e-6)
    if not bool((error <= allowed).all()):
        found, fix = f"{float((error / allowed).max()):.3g} times that", "report this as a bug of jetrl_patch"
        required = "an error within half a step of e4m3"
        raise ModelError(explain(f"{name} on disk", required=required, found=found, fix=fix))
    noise, signal = float(error.pow(2).sum()), float(value.pow(2).sum())
    return float("inf") if noise == 0 else 10 * float(torch.log10(torch.tensor(signal / noise)))
