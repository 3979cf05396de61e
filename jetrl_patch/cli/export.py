"""``jetrl export``: write a checkpoint as BF16 or block FP8 in the layout of DeepSeek's checkpoints, verified on disk."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from jetrl_patch import registry
from jetrl_patch.cli.checkpoint import (
    INDEX,
    SINGLE,
    Chosen,
    Format,
    Source,
    check_error,
    choose,
    convert,
    new_config,
    open_source,
    shapes_in,
)
from jetrl_patch.config import Config
from jetrl_patch.config.formats import ScaleFormat
from jetrl_patch.errors import ConfigError, ModelError, check_target, explain, reading, writing
from jetrl_patch.progress import SILENT, Display, Progress
from jetrl_patch.trainer import record

# ---- Write a checkpoint as BF16 or block FP8, shard by shard, verify all of it on disk, and only then give it its name

#: upper bound of the memory held in addition to the current tensor
SHARD_BYTES = 4 << 30
#: copied unchanged: tokenizer, generation settings, chat template
_COPIED = (".json", ".txt", ".jinja", ".model", ".tiktoken", ".py")
_NOT_COPIED = ("config.json", "jetrl.json")


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
        found, fix = "a folder with files" if out.is_dir() else "a file", "choose another folder"
        raise ConfigError(explain(f"export to {out}", required="a new or empty folder", found=found, fix=fix))


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
        out: a new or empty folder; it appears only after all of its contents have been read back and verified.
        exclude: patterns of layers that stay in BF16, as in ``Config``.
        progress: counts the source's tensors twice, first as they are written, then as they are read back.

    Raises:
        ConfigError: ``out`` is not empty, or ``checkpoint`` cannot be exported.
        ModelError: a tensor is missing, not finite, or differs from what was written.
    """
    check_free(out)
    progress.stage("checking the checkpoint")
    source = open_source(checkpoint)
    chosen = choose(source, format, scale_format, exclude)
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        done = Exported(out, layers=list(chosen.layers), left=chosen.left)
        _write(source, unfinished, chosen, shard_bytes, done, progress)
        config = new_config(source, format == "fp8", chosen.left)
        (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for file in sorted(source.folder.iterdir()):
            others = file.name not in _NOT_COPIED and "index.json" not in file.name
            if file.is_file() and file.suffix in _COPIED and others:
                shutil.copyfile(file, unfinished / file.name)
        _read_again(source, unfinished, chosen, done, progress)
        unfinished.chmod(0o755)
        if out.exists():
            out.rmdir()
        unfinished.rename(out)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return done


def _write(
    source: Source, folder: Path, chosen: Chosen, shard_bytes: int, done: Exported, progress: Progress
) -> None:
    from safetensors.torch import save_file

    progress.stage("writing", len(source.files), "tensors")
    parts: list[list[str]] = []
    for held in _shards(source, chosen, shard_bytes, progress):
        save_file(held, folder / f"part-{len(parts)}", metadata={"format": "pt"})
        parts.append(list(held))
        done.size += sum(tensor.nbytes for tensor in held.values())
        done.tensors += len(held)
    weight_map: dict[str, str] = {}
    for at, names in enumerate(parts):
        shard = SINGLE if len(parts) == 1 else f"model-{at + 1:05d}-of-{len(parts):05d}.safetensors"
        (folder / f"part-{at}").rename(folder / shard)
        done.shards.append(shard)
        weight_map |= dict.fromkeys(names, shard)
    if len(parts) > 1:
        index = {"metadata": {"total_size": done.size}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(source: Source, chosen: Chosen, shard_bytes: int, progress: Progress) -> Iterator[dict[str, Tensor]]:
    """The converted tensors, as many at a time as fit in a shard. The next shard reuses the dict: do not keep it."""
    held: dict[str, Tensor] = {}
    size = 0
    for count, (name, tensor) in enumerate(source.tensors()):
        progress.done(count)
        new = {written: value.contiguous() for written, value in convert(name, tensor, chosen).items()}
        added = sum(value.nbytes for value in new.values())
        if held and size + added > shard_bytes:
            yield held
            held.clear()
            size = 0
        held |= new
        size += added
    yield held
    progress.done(len(source.files))


def _read_again(source: Source, folder: Path, chosen: Chosen, done: Exported, progress: Progress) -> None:
    """Compare every tensor on disk with a fresh conversion of its source, bit for bit, and FP8 values with their source."""
    progress.stage("verifying", len(source.files), "tensors")
    places = {name: folder / shard for shard in done.shards for name in shapes_in(folder / shard)}
    seen = 0
    for count, (name, tensor) in enumerate(source.tensors()):
        progress.done(count)
        found: dict[str, Tensor] = {}
        for written, expected in convert(name, tensor, chosen).items():
            if written not in places or not _same(_tensor(places[written], written), expected):
                required = "the tensor as written"
                raise ModelError(explain(f"{written} on disk", required=required, found="another", fix="check the disk"))
            found[written] = expected
        seen += len(found)
        layer = name.removesuffix(".weight")
        if layer in chosen.layers:
            done.sqnr[layer] = check_error(name, tensor, *found.values())
    progress.done(len(source.files))
    if seen != len(places) or done.sqnr.keys() != chosen.layers.keys():
        raise ModelError(explain("the export on disk", required=f"{seen} tensors", found=len(places), fix="check the disk"))


def _same(a: Tensor, b: Tensor) -> bool:
    as_bytes = [tensor.reshape(-1).view(torch.uint8) for tensor in (a, b)]
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*as_bytes)


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

    Raises:
        ConfigError: as ``export``, the checkpoint has LoRA adapters, or the system refuses to read or write a file.
        ModelError: as ``export``.
    """
    if format not in ("bf16", "fp8"):
        raise ConfigError(f"--format {format!r} must be 'bf16' or 'fp8'")
    with writing(out):
        check_free(out)
    check_target(out, folder=True)
    with reading(checkpoint):
        folder = checkpoint / "actor" if (checkpoint / "actor").is_dir() else checkpoint
        settings = record.read(folder) or Config(scale_format="pow2")
    given: dict[str, Any] = {} if scale_format is None else {"scale_format": scale_format}
    given |= {"exclude": tuple(exclude)} if exclude else {}
    settings = dataclasses.replace(settings, **given)
    with display or Display("export") as progress, _reading_or_writing(checkpoint, out):
        done = _export(folder, out, cast("Format", format), settings, progress)
    console.print(f"{out}: {done.tensors} tensors, {done.size / 1e6:,.1f} MB, {len(done.shards)} shard(s), verified")
    if done.layers:
        worst = min(done.sqnr, key=lambda name: done.sqnr[name])
        fp8 = f"{len(done.layers)} layers in FP8 (blocks of 128x128, {settings.scale_format} scales)"
        console.print(f"{fp8}, worst SQNR {done.sqnr[worst]:.1f} dB in {worst}")
        console.print(f"{len(done.left)} layers in BF16: {', '.join(done.left)}")
    return done


@contextlib.contextmanager
def _reading_or_writing(checkpoint: Path, out: Path) -> Iterator[None]:
    """Turn an OSError into an error about the checkpoint if it names a file there, else about the export's folder."""
    try:
        yield
    except OSError as error:
        read = str(error.filename or "").startswith(str(checkpoint))
        with reading(checkpoint) if read else writing(out):
            raise


def _export(folder: Path, out: Path, format: Format, settings: Config, progress: Progress) -> Exported:
    """Export the folder itself, or for verl's FSDP engine the Hugging Face folder in it or the merged shards."""
    chosen: dict[str, Any] = {"scale_format": settings.scale_format, "exclude": settings.exclude, "progress": progress}
    if (folder / record.ADAPTERS).is_file():
        found = f"adapters next to them ({record.ADAPTERS})"
        fix = "merge them with verl.model_merger and peft's merge_and_unload, and export the result"
        raise ConfigError(explain(f"checkpoint {folder}", required="full weights", found=found, fix=fix))
    if not (folder / "fsdp_config.json").is_file():
        return export(folder, out, format, **chosen)
    if any((folder / "huggingface" / name).is_file() for name in (SINGLE, INDEX)):
        return export(folder / "huggingface", out, format, **chosen)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.merged.", dir=out.parent) as merged:
        progress.stage("merging the shards")
        registry.merger().merge(folder, Path(merged))
        return export(Path(merged), out, format, **chosen)
