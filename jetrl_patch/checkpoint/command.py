"""``jetrl export``: identify the given folder, export it, and print what was written."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from jetrl_patch import registry
from jetrl_patch.checkpoint import record
from jetrl_patch.checkpoint.export import Exported, check_free, export
from jetrl_patch.checkpoint.formats import Format
from jetrl_patch.checkpoint.source import INDEX, SINGLE
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, explain
from jetrl_patch.places import check_target, reading, writing
from jetrl_patch.progress import Display, Progress

__all__ = ["command"]


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
