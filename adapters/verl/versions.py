"""Which weights made a sample: verl tags each with the training steps of the last weight sync at its first and last token.

In an asynchronous run a sample may be older than the trainer's weights, or a partial rollout that spans a sync.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jetrl_patch.adapters.verl.state import DRIVER

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["are_current", "are_of_one", "of_batch", "of_tags"]

_NAMES = ("min_global_steps", "max_global_steps")
_Versions = list[tuple[Any, Any]]


def are_of_one(verl_config: Any) -> bool:
    """Whether the trainer is synchronous, so that the weights of the last sync made all samples, also those without versions."""
    from omegaconf import OmegaConf

    mode = OmegaConf.select(verl_config, "trainer.v1.trainer_mode", default="sync")
    return bool(mode == "sync" and OmegaConf.select(verl_config, "actor_rollout_ref.hybrid_engine", default=True))


def of_batch(batch: Any) -> _Versions:
    """Return first and last version of each sample of a ``DataProto`` (V0); None where an agent loop records none."""
    columns = [batch.non_tensor_batch.get(name) for name in _NAMES]
    missing = [None] * len(batch.batch["response_mask"])
    first, last = (missing if column is None else column for column in columns)
    return list(zip(first, last, strict=True))


def of_tags(tags: Iterable[Mapping[str, Any]]) -> _Versions:
    """The same for the tags of the TransferQueue (V1). Copies that fill a batch up count with any version."""
    return [
        (DRIVER.version, DRIVER.version) if tag.get("is_padding", False) else (tag.get(_NAMES[0]), tag.get(_NAMES[1]))
        for tag in tags
    ]


def are_current(made: _Versions, unknown: bool) -> Tensor:
    """Bool [B]: True for samples that the weights of the last sync made alone.

    Args:
        made: first and last version of each of the B samples.
        unknown: the answer for a sample without versions.
    """
    import torch

    now = DRIVER.version
    rows = [unknown if first is None or last is None or now is None else first == last == now for first, last in made]
    return torch.tensor(rows, dtype=torch.bool)
