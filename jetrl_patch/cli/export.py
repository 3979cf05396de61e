"""``jetrl export``: write a checkpoint as BF16 or block FP8 in the layout of DeepSeek's checkpoints, verified on disk."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from jetrl_patch import registry
from jetrl_patch.backends.quantize import dequantize_weight, expand_weight_scale, quantize_weight
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, ModelError, check_target, explain, reading, writing
from jetrl_patch.fp8.convert import expert_modules, select_layers, shapes_per_expert, stored_buffers, whole_shape
from jetrl_patch.kernels.formats import BLOCK, ScaleFormat
from jetrl_patch.models.families import FAMILIES, LLAMA_LIKE, MERGED
from jetrl_patch.models.structure import units
from jetrl_patch.progress import SILENT, Display, Progress
from jetrl_patch.trainer import record

__all__ = [
    "INDEX",
    "SCALE_SUFFIX",
    "SECOND_TOKEN",
    "SHARD_BYTES",
    "SINGLE",
    "Chosen",
    "Exported",
    "Format",
    "Source",
    "check_error",
    "check_free",
    "choose",
    "command",
    "convert",
    "empty_model",
    "export",
    "open_source",
    "quantization_config",
    "read_tensors",
]  # fmt: skip


# ---- Read a Hugging Face checkpoint one tensor at a time, and check it against its own config.json

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


# ---- Convert each tensor of a checkpoint to BF16, or to block FP8 as in DeepSeek's checkpoints ---
# Block FP8 is ``layer.weight`` e4m3 [N, K] and ``layer.weight_scale_inv`` FP32 [ceil(N/128), ceil(K/128)]. The trainer's own
# quantizer makes them from the BF16 value, so the bytes are those that the trainer computed with. An expert is three such layers.

Format = Literal["bf16", "fp8"]
SCALE_SUFFIX = "_scale_inv"


class Chosen(NamedTuple):
    """What becomes of a model's tensors.

    Attributes:
        layers: names of the layers that become FP8, as the checkpoint has them.
        left: modules that stay in BF16 and that a loader would take for FP8, by every name that one knows them by.
        fp32: tensors that stay in FP32: the buffers of a mixture, as in its checkpoint.
    """

    layers: dict[str, None]
    left: list[str]
    fp32: frozenset[str]


def choose(model: Any, format: Format, exclude: Sequence[str]) -> Chosen:
    """Choose the layers that become FP8, so that stock vLLM and transformers can load the result.

    Raises:
        ModelError: as ``select_layers``.
        ConfigError: of the layers that vLLM merges, only some would be FP8, or one ends inside a block.
    """
    experts = expert_modules(model)
    family = FAMILIES.get(model.config.model_type, LLAMA_LIKE)
    fp32 = frozenset(family.to_stored(name) for name in stored_buffers(model)) if experts else frozenset()
    if format == "bf16":
        return Chosen({}, [], fp32)
    chosen = select_layers(model, exclude)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    for merged in MERGED:  # all but the last must end on a block boundary
        for name in [name for name in linears if name.rsplit(".", 1)[-1] == merged[0]]:
            prefix = name.removesuffix(merged[0])
            group = [prefix + part for part in merged if prefix + part in linears]
            fp8 = [name for name in group if name in chosen]
            if fp8 and fp8 != group:
                _refuse(", ".join(group), "all or none of them in FP8", f"only {', '.join(fp8)}", merged)
            for layer in fp8[:-1]:
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
    return Chosen(dict.fromkeys(map(family.to_stored, chosen)), list(both), fp32)


def _refuse(what: str, required: str, found: str, merged: Sequence[str]) -> None:
    leave = " ".join(f"--exclude {part}" for part in merged)
    fix = f"keep the merged layers in BF16 with {leave}"
    raise ConfigError(explain(f"FP8 export of {what}", required=required, found=found, fix=fix))


def quantization_config(left: Sequence[str]) -> dict[str, Any]:
    """The entry of config.json that vLLM and transformers read."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": list(left),
    }


def convert(name: str, tensor: Tensor, chosen: Chosen, scale_format: ScaleFormat) -> list[tuple[str, Tensor]]:
    """Return the tensors written for one source tensor. Raises ModelError, with its name, for a NaN or Inf."""
    if not tensor.is_floating_point():
        return [(name, tensor)]
    value = tensor.float() if name in chosen.fp32 else tensor.to(torch.bfloat16)
    if not bool(torch.isfinite(value).all()):
        bad = int((~torch.isfinite(value)).sum())
        raise ModelError(
            explain(
                f"tensor {name}",
                required="finite values",
                found=f"{bad} NaN or Inf among {value.numel()} in {'FP32' if name in chosen.fp32 else 'BF16'}",
                fix="export an earlier checkpoint of the run",
            )
        )
    if name.removesuffix(".weight") not in chosen.layers:
        return [(name, value)]
    q, s_blocks = quantize_weight(value, scale_format)
    return [(name, q), (name + SCALE_SUFFIX, s_blocks)]


def check_error(name: str, tensor: Tensor, q: Tensor, s_blocks: Tensor) -> float:
    """Check that each value is within half an e4m3 step, and return the SQNR in dB (infinite if nothing is lost).

    A step is 2^-3 of the power of two at or below the value, and at least 2^-9 of the scale. Raises ModelError.
    """
    value = tensor.to(torch.bfloat16).double()
    error = (dequantize_weight(q, s_blocks, torch.float32).double() - value).abs()
    s_NK = expand_weight_scale(s_blocks, q.shape[0]).repeat_interleave(BLOCK, 1)[:, : q.shape[1]].double()
    allowed = torch.maximum(value.abs() * 2.0**-4, s_NK * 2.0**-10) * (1 + 1e-6)
    if not bool((error <= allowed).all()):
        worst = float((error / allowed).max())
        raise ModelError(
            explain(
                f"{name} on disk",
                required="an error within half a step of e4m3",
                found=f"{worst:.3g} times that",
                fix="report this as a bug of jetrl_patch",
            )
        )
    noise, signal = float(error.pow(2).sum()), float(value.pow(2).sum())
    return float("inf") if noise == 0 else 10 * float(torch.log10(torch.tensor(signal / noise)))


# ---- Write a checkpoint as BF16 or block FP8, shard by shard, verify all of it on disk, and only then give it its name

#: upper bound of what is held in memory, besides the current tensor
SHARD_BYTES = 4 << 30
#: copied unchanged: tokenizer, generation settings, chat template
_COPIED = (".json", ".txt", ".jinja", ".model", ".tiktoken", ".py")
_NOT_COPIED = ("config.json", "jetrl.json", INDEX)


@dataclass
class Exported:
    """The result of an export.

    Attributes:
        layers: layers in FP8.
        left: linear layers, routers and modules of experts in BF16.
        sqnr: SQNR in dB of each FP8 layer against its BF16 value.
    """

    folder: Path
    shards: list[str] = field(default_factory=list)
    tensors: int = 0
    size: int = 0
    layers: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    sqnr: dict[str, float] = field(default_factory=dict)


def check_free(out: Path) -> None:
    """Raise ConfigError if the export's folder exists and is not empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        found = "a folder with files" if out.is_dir() else "a file"
        raise ConfigError(
            explain(f"export to {out}", required="a new or empty folder", found=found, fix="choose another folder")
        )


def export(
    checkpoint: Path,
    out: Path,
    format: Format,
    *,
    scale_format: ScaleFormat = "pow2",
    exclude: Sequence[str] = (),
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = SILENT,
) -> Exported:
    """Export a Hugging Face folder.

    Args:
        out: a new or empty folder; it appears only once all of its contents have been read back and verified.
        exclude: patterns of layers that stay in BF16, as in ``Config``.
        progress: counts the tensors of the source, twice: as they are written, and as they are read back.

    Raises:
        ConfigError: ``out`` is not empty, or ``checkpoint`` cannot be exported.
        ModelError: a tensor is missing, not finite, or differs from what was written.
    """
    check_free(out)
    progress.stage("checking the checkpoint")
    source = open_source(checkpoint)
    model = empty_model(source)
    chosen = choose(model, format, exclude)
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        done = Exported(out, layers=list(chosen.layers), left=chosen.left)
        _write(source, unfinished, chosen, scale_format, shard_bytes, done, progress)
        _write_config(source, unfinished, chosen.left if format == "fp8" else None)
        _read_again(source, unfinished, chosen, scale_format, done, progress)
        unfinished.chmod(0o755)
        if out.exists():
            out.rmdir()
        unfinished.rename(out)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return done


def _write(
    source: Source,
    folder: Path,
    chosen: Chosen,
    scale_format: ScaleFormat,
    shard_bytes: int,
    done: Exported,
    progress: Progress,
) -> None:
    from safetensors.torch import save_file

    progress.stage("writing", source.count, "tensors")
    held: dict[str, Tensor] = {}
    parts: list[list[str]] = []

    def flush() -> None:
        if held:
            save_file(held, folder / f"part-{len(parts)}", metadata={"format": "pt"})
            parts.append(list(held))
            held.clear()

    size = 0
    for count, (name, tensor) in enumerate(source.tensors()):
        progress.done(count)
        new = convert(name, tensor, chosen, scale_format)
        added = sum(t.numel() * t.element_size() for _, t in new)
        if size + added > shard_bytes:
            flush()
            size = 0
        held.update((n, t.contiguous()) for n, t in new)
        size += added
        done.size += added
        done.tensors += len(new)
    flush()
    progress.done(source.count)
    weight_map: dict[str, str] = {}
    for at, names in enumerate(parts):
        shard = SINGLE if len(parts) == 1 else f"model-{at + 1:05d}-of-{len(parts):05d}.safetensors"
        (folder / f"part-{at}").rename(folder / shard)
        done.shards.append(shard)
        weight_map |= dict.fromkeys(names, shard)
    if len(parts) > 1:
        index = {"metadata": {"total_size": done.size}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _write_config(source: Source, folder: Path, left: Sequence[str] | None) -> None:
    config = dict(source.config)
    named = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
    config |= dict.fromkeys(named, "bfloat16")
    if config.get(SECOND_TOKEN):
        config[SECOND_TOKEN] = 0  # such blocks are left out
    if left is not None:
        config["quantization_config"] = quantization_config(left)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for file in sorted(source.folder.iterdir()):
        if file.is_file() and file.suffix in _COPIED and file.name not in _NOT_COPIED and "index.json" not in file.name:
            shutil.copyfile(file, folder / file.name)


def _read_again(
    source: Source, folder: Path, chosen: Chosen, scale_format: ScaleFormat, done: Exported, progress: Progress
) -> None:
    """Compare every tensor on disk with a fresh conversion of its source, bit for bit, and FP8 values with their source."""
    progress.stage("verifying", source.count, "tensors")
    places = {name: shard for shard in done.shards for name in _keys(folder / shard)}
    seen = 0
    for count, (name, tensor) in enumerate(source.tensors()):
        progress.done(count)
        for written, expected in convert(name, tensor, chosen, scale_format):
            found = _tensor(folder / places[written], written) if written in places else None
            if found is None or found.dtype != expected.dtype or not _same(found, expected):
                raise ModelError(
                    explain(
                        f"{written} on disk", required="the tensor as written", found="another", fix="check the disk"
                    )
                )
            seen += 1
        if name.removesuffix(".weight") in chosen.layers:
            q, s = (_tensor(folder / places[n], n) for n in (name, name + SCALE_SUFFIX))
            done.sqnr[name.removesuffix(".weight")] = check_error(name, tensor, q, s)
    progress.done(source.count)
    if seen != len(places) or set(done.sqnr) != set(chosen.layers):
        raise ModelError(
            explain("the export on disk", required=f"{seen} tensors", found=len(places), fix="check the disk")
        )


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _keys(file: Path) -> list[str]:
    return [name for name, _ in read_tensors(file)]


def _tensor(file: Path, name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        found: Tensor = opened.get_tensor(name)
        return found


# ---- ``jetrl export``: identify the given folder, export it, and print what was written ----------

def command(
    checkpoint: Path,
    out: Path,
    format: str,
    scale_format: str | None,
    exclude: list[str] | None,
    console: Any,
    display: Display | None = None,
) -> Exported:
    """Export a Hugging Face folder, or a checkpoint of verl's FSDP engine (``global_step_N`` or its ``actor``).

    Scale format and excluded layers default to those of the run (``jetrl.json``). Progress goes to ``display``, or to one of
    its own, and the result to ``console``.
    Raises ConfigError and ModelError as ``export`` does, and ConfigError for what the system refuses to read or write, and for
    a checkpoint with LoRA.
    """
    if format not in ("bf16", "fp8"):
        raise ConfigError(f"--format {format!r} must be 'bf16' or 'fp8'")
    with writing(out):
        check_free(out)
    check_target(out, folder=True)
    with reading(checkpoint):
        folder = checkpoint / "actor" if (checkpoint / "actor").is_dir() else checkpoint
        settings = _settings(folder, scale_format, exclude)
    chosen: dict[str, Any] = {"scale_format": settings.scale_format, "exclude": settings.exclude}
    with display or Display("export") as progress, _reading_or_writing(checkpoint, out):
        done = _export(folder, out, format, chosen, progress)
    _say(done, settings, console)
    return done


@contextlib.contextmanager
def _reading_or_writing(checkpoint: Path, out: Path) -> Iterator[None]:
    """Word an OSError by the place that it names: the export's folder, or its unfinished one beside it, or the checkpoint."""
    try:
        yield
    except OSError as error:
        read = str(error.filename or "").startswith(str(checkpoint))
        with reading(checkpoint) if read else writing(out):
            raise


def _export(folder: Path, out: Path, format: str, chosen: dict[str, Any], progress: Progress) -> Exported:
    """Export the folder, or what verl has written or would merge from it."""
    chosen = {**chosen, "progress": progress}
    if (folder / record.ADAPTERS).is_file():
        raise ConfigError(
            explain(
                f"checkpoint {folder}",
                required="full weights",
                found=f"adapters beside them ({record.ADAPTERS})",
                fix="merge them with verl.model_merger and peft's merge_and_unload, and export the result",
            )
        )
    if not (folder / "fsdp_config.json").is_file():
        return export(folder, out, cast("Format", format), **chosen)
    if any((folder / "huggingface" / name).is_file() for name in (SINGLE, INDEX)):
        return export(folder / "huggingface", out, cast("Format", format), **chosen)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.merged.", dir=out.parent) as merged:
        progress.stage("merging the shards")
        registry.merger().merge(folder, Path(merged))
        return export(Path(merged), out, cast("Format", format), **chosen)


def _settings(folder: Path, scale_format: str | None, exclude: list[str] | None) -> Config:
    """The run's settings if the folder records them, overridden by the command line."""
    recorded = record.read(folder)
    run = Config(scale_format="pow2") if recorded is None else recorded
    given: dict[str, Any] = {} if scale_format is None else {"scale_format": scale_format}
    given |= {"exclude": tuple(exclude)} if exclude else {}
    return dataclasses.replace(run, **given)


def _say(done: Exported, settings: Config, console: Any) -> None:
    console.print(
        f"{done.folder}: {done.tensors} tensors, {done.size / 1e6:,.1f} MB, {len(done.shards)} shard(s), verified"
    )
    if done.layers:
        worst = min(done.sqnr, key=lambda name: done.sqnr[name])
        console.print(
            f"{len(done.layers)} layers in FP8 (blocks of 128x128, {settings.scale_format} scales), "
            f"worst SQNR {done.sqnr[worst]:.1f} dB in {worst}"
        )
        console.print(f"{len(done.left)} layers in BF16: {', '.join(done.left)}")
