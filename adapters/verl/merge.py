"""Merge shards of verl's FSDP engine into a Hugging Face folder with verl's own merger, which holds the whole model in memory."""

from __future__ import annotations

from pathlib import Path

from jetrl_patch.errors import ConfigError, explain

__all__ = ["merge"]


def merge(checkpoint: Path, target: Path) -> None:
    """Write a BF16 Hugging Face folder. Raises ConfigError if verl is missing or its merger fails."""
    try:
        from verl.model_merger.base_model_merger import ModelMergerConfig
        from verl.model_merger.fsdp_model_merger import FSDPModelMerger
    except ImportError as error:
        raise ConfigError(
            explain(f"checkpoint {checkpoint}", required="verl, to merge its shards", found=error, fix="install verl")
        ) from error
    config = ModelMergerConfig(
        operation="merge",
        backend="fsdp",
        local_dir=str(checkpoint),
        hf_model_config_path=str(checkpoint / "huggingface"),
        target_dir=str(target),
    )
    try:
        FSDPModelMerger(config).merge_and_save()
    except Exception as error:  # verl raises various types for a missing or broken shard
        found = f"{type(error).__name__}: {error}"
        raise ConfigError(
            explain(
                f"checkpoint {checkpoint}", required="shards that verl can merge", found=found, fix="copy the complete checkpoint"
            )
        ) from error
