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
    SCALE_SUFFIX,
    SECOND_TOKEN,
    SINGLE,
    Chosen,
    Format,
    Source,
    check_error,
    choose,
    convert,
    empty_model,
    names_in,
    open_source,
    quantization_config,
)
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, ModelError, check_target, explain, reading, writing
from jetrl_patch.kernels.formats import ScaleFormat
from jetrl_patch.progress import SILENT, Display, Progress
from jetrl_patch.trainer import record

__all__ = ["SHARD_BYTES", "Exported", "check_free", "command", "export"]



# ---- Write a checkpoint as BF16 or block FP8, shard by shard, verify all of it on disk, and only then give it its name

#: upper bound of the memory held in addition to the current tensor
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
    places = {name: shard for shard in done.shards for name in names_in(folder / shard)}
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
    """Word an OSError by the place that it names: the export's folder, its unfinished sibling, or the checkpoint."""
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
