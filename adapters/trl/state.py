"""What the patches of this process share: the trainers that they serve, and what each of them has sampled and compared."""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jetrl_patch.errors import NotPatchedError, explain
from jetrl_patch.trainer.audit import Audit
from jetrl_patch.trainer.precision import LossScale
from jetrl_patch.trainer.source import Source

if TYPE_CHECKING:
    from jetrl_patch.exact.support import Support
    from jetrl_patch.trainer.server import Server

#: module -> class of each trainer that is patched
TRAINERS = {"trl.trainer.grpo_trainer": "GRPOTrainer", "trl.trainer.rloo_trainer": "RLOOTrainer"}
#: keys of a batch: the policy's log-probs before its first update and the rollout's [B, C]. RLOO has neither
OLD, ROLLOUT = "old_per_token_logps", "sampling_per_token_logps"


@dataclass
class Sampled:
    """The rollout's log-probs of a batch in ``_generate_and_score_completions``, for the policy's pass to return.

    Attributes:
        log_probs: a list for each completion; None where the rollout had none.
        model_tokens: lists of 1 for the model's own tokens and 0 for a tool's; None without tools.
        compared: whether the pass has been reached: it ran and was compared, or was left out.
        left_out: whether the pass was left out.
    """

    log_probs: list[list[float | None]]
    model_tokens: list[list[int]] | None = None
    compared: bool = False
    left_out: bool = False


#: prompts of a call of the engine, what it returned for each, and what these tokens were drawn from
Call = tuple[list[list[int]], list[list[int]], "list[Support]"]


@dataclass(kw_only=True, eq=False)
class Run:
    """One trainer.

    Attributes:
        args: its ``GRPOConfig`` or ``RLOOConfig``, which its constructor passes on before anything is built; None without one.
        tools: the names of the arguments by which it has tools.
        source: what a weight sync sends of the policy; None if the rollout is not quantized.
        server: the vLLM server that gets it, on the rank that talks to it; None with an engine in this process.
        followers: the reference model, which follows the precision guard.
        sampled: in ``_generate_and_score_completions``, if it computes the policy's log-probs.
        sampled_at: "train" or "eval" -> the trainer's step when its last batch was sampled.
        checked: the batch in ``_compute_loss``, if the weights are those that sampled it.
        keeps_log_probs: whether the engine's log-probs are kept where it returns them, because the trainer drops them.
        compares: whether updates compare the batch, because no pass over it has run.
        unchecked: whether a pass was left out and no update has compared anything since.
        audit: the comparisons since the last log line.
        calls: in ``_generate_and_score_completions``, those of the engine, one for each turn; none if it draws from all.
        drawn: there, what each completion's tokens were drawn from; None if from all tokens.
        batch: the batch in ``_compute_loss``.
        loss_scale: that of a half-precision run.
        corrected: what the correction did to batches since the last log line, if it has a name here.
        synced: the figures of the weight syncs since the last log line.
    """

    args: Any = None
    tools: Sequence[str] = ()
    source: Source | None = None
    server: Server | None = None
    followers: list[Source] = field(default_factory=list)
    sampled: Sampled | None = None
    sampled_at: dict[str, int] = field(default_factory=dict)
    checked: dict[str, Any] | None = None
    keeps_log_probs: bool = False
    compares: bool = False
    unchecked: bool = False
    audit: Audit = field(default_factory=Audit)
    calls: list[Call] = field(default_factory=list)
    drawn: list[Support] | None = None
    batch: dict[str, Any] | None = None
    loss_scale: LossScale = field(default_factory=LossScale)
    corrected: list[Any] = field(default_factory=list)
    synced: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Building:
    """The trainer whose constructor runs: TRL builds its models and its engine there, without passing them the trainer."""

    trainer: Any = None


#: trainer -> its run, and ``VLLMGeneration`` -> the run of its trainer
RUNS: MutableMapping[Any, Run] = weakref.WeakKeyDictionary()
ENGINES: MutableMapping[Any, Run] = weakref.WeakKeyDictionary()
BUILDING = Building()


def run_of(owner: Any) -> Run:
    """The run of a trainer or of its ``VLLMGeneration``. Raises NotPatchedError if it was built before ``enable()``."""
    found = RUNS.get(owner) or ENGINES.get(owner)
    if found is None:
        required, words = "a trainer that is built after jetrl_patch.enable()", f"a {type(owner).__name__} from before it"
        raise NotPatchedError(explain("TRL", required=required, found=words, fix="build the trainer after enable()"))
    return found


def kind_of(trainer: Any) -> str:
    """The trainer of TRL that an object is, "GRPOTrainer" for instance; empty if it is none of them."""
    kinds = type(trainer).__mro__
    return next((TRAINERS[kind.__module__] for kind in kinds if TRAINERS.get(kind.__module__) == kind.__name__), "")


def mode_of(trainer: Any) -> str:
    """The kind of step, "train" or "eval", as TRL's trainers tell them apart."""
    return "train" if trainer.model.training else "eval"


def reset() -> None:
    """Restore the initial state. Called by ``disable()``."""
    RUNS.clear()
    ENGINES.clear()
    BUILDING.trainer = None
