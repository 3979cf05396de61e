"""State that the patches of one process share, and which weights made a sample."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jetrl_patch.sync.delta import Sent
from jetrl_patch.sync.send import SyncStats
from jetrl_patch.trainer import source
from jetrl_patch.trainer.audit import Audit, Compared
from jetrl_patch.trainer.rules import MARK
from jetrl_patch.trainer.source import Source

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["are_current", "are_of_one", "of_batch", "of_tags"]


# ---- State that the patches of one process share -------------------------------------------------

@dataclass(kw_only=True)
class Prepared(Source):
    """An engine's model as it was before sharding, and the vocabulary of verl's rollout.

    Attributes:
        vocabulary: number of tokens in the tokenizer; verl's rollout samples no token beyond them.
        banned: tokens of the tokenizer that verl's rollout never samples.
        adapters: name of each LoRA layer in peft's model -> scaling; None without LoRA, or where verl serves adapters.
    """

    vocabulary: int | None = None
    banned: list[int] = field(default_factory=list)
    adapters: dict[str, float] | None = None


@dataclass
class WorkerState(source.Worker):
    """State of a training worker.

    Attributes:
        rollout_tp: tensor parallel size of the rollout. rollout_ep: its expert parallel size.
        stats: of the current or last weight sync.
        separate: whether that sync goes over a checkpoint engine, to a rollout with devices of its own.
        broken: what broke the stream of such a sync.
        base: what the last sync sent, if this one may send changes only.
        held: what the engines reported as theirs before a sync over a checkpoint engine.
        saved: digests of the weights that verl has saved to restore them later, by its key and by parameter (``old_weights``).
        measuring: whether the weights have not changed since the last sync, so that a loss can compare log-probs.
        compared: whether a loss of the current mini-batch did.
        measured: in verl's bypass mode, the loss's sums since that sync, one per micro-batch (``correction_bypass``).
        routes: with ``measure_routes``, what was compared since the last sync: routes, how many differ, and how many were
            computed with other experts than the rollout's.
        audit: with ``old_log_probs="rollout"``, what the losses compared (``old_log_probs``).
    """

    measuring: bool = False
    compared: bool = False
    measured: list[Any] = field(default_factory=list)
    routes: list[tuple[int, int, int]] = field(default_factory=list)
    audit: Audit = field(default_factory=Audit)
    rollout_tp: int = 1
    rollout_ep: int = 1
    stats: SyncStats | None = None
    separate: bool = False
    broken: Exception | None = None
    base: Sent | None = None
    held: str = ""
    saved: dict[Any, dict[str, int]] = field(default_factory=dict)


@dataclass(kw_only=True)
class DriverState(source.Driver):
    """State of the trainer loop, with what ``old_log_probs="rollout"`` needs (``old_log_probs``).

    Attributes:
        version: training steps of the weights of the last sync, by which verl tags samples; None before the first.
        compared: log-probs of the samples since the last log line.
        current: where the losses compare them instead, of each batch which samples are of that version, and their tokens.
        fresh: whether the policy has not been updated since the last sync.
        given_up: whether a token differed, so that the pass runs until the end of the run.
        audit: comparisons of the samples that went through the pass; None if this step's old log-probs are the pass's.
        corrected: metrics of the correction that verl applied to the step.
        unknown: keys of verl's log whose values a step without the pass does not have.
    """

    version: int | None = None
    compared: Compared = field(default_factory=Compared)
    current: list[tuple[Any, list[int]]] = field(default_factory=list)
    fresh: bool = False
    given_up: bool = False
    audit: Audit | None = None
    corrected: dict[str, float] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()


WORKER = WorkerState()
DRIVER = DriverState()


def report_key(rank: int) -> str:
    """The key under which a training worker reports a sync. verl merges the dictionaries of all ranks."""
    return f"{MARK}.{rank}"


def reset() -> None:
    """Restore the initial state. Called by ``disable()``."""
    source.reset(WORKER, DRIVER)


# ---- Which weights made a sample: verl tags each with the training steps of the last weight sync at its first and last token
# In an asynchronous run a sample may be older than the trainer's weights, or a partial rollout that spans a sync.

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
