"""State that the patches of one process share, and which weights made a sample."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jetrl_patch.patching.attached import Attached
from jetrl_patch.sync.delta import Sent
from jetrl_patch.sync.send import SyncStats
from jetrl_patch.trainer import source
from jetrl_patch.trainer.audit import Audit, Compared
from jetrl_patch.trainer.rules import MARK
from jetrl_patch.trainer.source import Source

if TYPE_CHECKING:
    from torch import Tensor

    from jetrl_patch.measure.routes import Recorder, Replay


# ---- State of an engine, of a training worker and of the trainer loop ----

@dataclass(kw_only=True, eq=False)
class Prepared(Source):
    """An engine's model as it was before sharding, and the vocabulary of verl's rollout.

    Attributes:
        vocabulary: number of tokens in the tokenizer; verl's rollout samples no token beyond them.
        banned: tokens of the tokenizer that verl's rollout never samples.
        recorder: records the routes of the policy's model; None if the settings need no routes.
        replay: with ``router_replay``, makes the policy's model use the rollout's routes.
    """

    vocabulary: int | None = None
    banned: list[int] = field(default_factory=list)
    recorder: Recorder | None = None
    replay: Replay | None = None


#: the record of an engine's model: a ``Prepared``, with Megatron a ``megatron_model.MegatronSource``; None for critics
RECORD: Attached[Any] = Attached("_jetrl", "verl's engine builds its model in one call and sends its weights in another")


@dataclass
class WorkerState(source.Worker):
    """State of a training worker.

    Attributes:
        measuring: whether the weights are still those of the last sync, so that a loss can compare log-probs.
        compared: whether a loss of the current mini-batch has compared log-probs.
        measured: in verl's bypass mode, the loss's sums since the last sync, one per micro-batch.
        routes: per forward pass since the last sync, how many routes were compared, how many differ from the rollout's, and how
            many were computed with other experts than the rollout's.
        audit: with ``old_log_probs="rollout"``, what the losses compared.
        rollout_tp: tensor-parallel size of the rollout. rollout_ep: its expert-parallel size.
        stats: of the current or last weight sync.
        separate: whether that sync goes over a checkpoint engine, to a rollout on its own devices.
        broken: the error that broke the stream of such a sync.
        base: what the last sync sent, if this one may send only changes.
        held: the weights that the engines reported before a sync over a checkpoint engine.
        saved: digests of the weights that verl has saved to restore later, by verl's key and by parameter.
        synced: step of the last sync to a colocated engine, and how often that step had been synced before.
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
    synced: tuple[Any, int] = ("", 0)


@dataclass(kw_only=True)
class DriverState(source.Driver):
    """State of the trainer loop.

    Attributes:
        version: number of training steps of the last sync's weights; verl tags samples with it. None before the first sync.
        compared: the comparisons since the last log line.
        current: if the losses compare instead: for each batch, which samples are of ``version``, and their numbers of tokens.
        fresh: whether the policy has not been updated since the last sync.
        given_up: whether a token differed, so that the pass runs until the end of the run.
        audit: comparisons of the samples that went through the pass; None if the pass made this step's old log-probs.
        corrected: metrics of the correction that verl applied to the step.
        unknown: keys of verl's log that have no value in a step without the pass.
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
    """Return a training worker's own key for its report of a sync, because verl merges the dictionaries of all ranks."""
    return f"{MARK}.{rank}"


def reset() -> None:
    """Restore the initial state. Called by ``disable()``."""
    source.reset(WORKER, DRIVER)


# ---- Which weights made a sample: verl tags each sample with the version of the weights at its first and last token ----
# In an asynchronous run a sample may be older than the trainer's weights, or span a sync (a partial rollout).

_NAMES = ("min_global_steps", "max_global_steps")
_Versions = list[tuple[Any, Any]]


def are_of_one(verl_config: Any) -> bool:
    """Whether the trainer is synchronous. Then the last sync's weights made all samples, even those without versions."""
    from omegaconf import OmegaConf

    mode = OmegaConf.select(verl_config, "trainer.v1.trainer_mode", default="sync")
    return bool(mode == "sync" and OmegaConf.select(verl_config, "actor_rollout_ref.hybrid_engine", default=True))


def of_batch(batch: Any) -> _Versions:
    """Return the first and last version of each sample of a ``DataProto`` (V0); None if an agent loop records none."""
    columns = [batch.non_tensor_batch.get(name) for name in _NAMES]
    missing = [None] * len(batch.batch["response_mask"])
    first, last = (missing if column is None else column for column in columns)
    return list(zip(first, last, strict=True))


def of_tags(tags: Iterable[Mapping[str, Any]]) -> _Versions:
    """Return the first and last versions in tags of the TransferQueue (V1). Copies that pad the batch count as current."""
    return [
        (DRIVER.version, DRIVER.version) if tag.get("is_padding", False) else (tag.get(_NAMES[0]), tag.get(_NAMES[1]))
        for tag in tags
    ]


def are_current(made: _Versions, unknown: bool) -> Tensor:
    """Return a bool [B]: True for samples made only by the weights of the last sync, ``unknown`` for those without versions."""
    import torch

    now = DRIVER.version
    rows = [unknown if first is None or last is None or now is None else first == last == now for first, last in made]
    return torch.tensor(rows, dtype=torch.bool)
