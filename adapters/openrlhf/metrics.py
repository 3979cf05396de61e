"""Add mismatch and sync metrics to OpenRLHF's log, in every mode, and record which weights made a sample."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from jetrl_patch import session
from jetrl_patch.adapters.openrlhf import correction, logprob, support, sync
from jetrl_patch.adapters.openrlhf.logprob import check_sampling
from jetrl_patch.adapters.openrlhf.settings import check_mark, sampling_of
from jetrl_patch.adapters.openrlhf.startup import ask_actors, require_patched
from jetrl_patch.adapters.openrlhf.state import DRIVER, ENGINE
from jetrl_patch.patching.patch import replacement
from jetrl_patch.sync.orders import decode
from jetrl_patch.trainer.audit import Compared, hold, say_if_nothing, step_metrics, sync_metrics
from jetrl_patch.trainer.support import marks

# ---- Record which weights made a sample: the number of the engine's last weight sync at the first and last token
# This runs in OpenRLHF's ``RolloutRayActor``, whose vLLM client gets both weight syncs and requests. The end of a sync sets the
# version, and each request records it as its tokens arrive. A sample with two versions is a partial rollout.

#: keys of a sample's logs, and so of OpenRLHF's ``Experience.info``
FIRST, LAST = "jetrl/version_first", "jetrl/version_last"


@dataclass
class Seen:
    """What the requests of one sample have in common.

    Attributes:
        first: first version of the weights that served them, 0 before the first sync. last: the last one.
        drawn: what the tokens of each request were drawn from; None for one that may draw every token.
    """

    first: int = 0
    last: int = 0
    drawn: list[Any] = field(default_factory=list)

    def note(self, version: int) -> None:
        """Record that a request began, or received tokens, under this version."""
        self.first = self.first or version
        self.last = version


_sample: ContextVar[Seen | None] = ContextVar("jetrl_sample", default=None)


@replacement
async def collective_rpc(original: Any, self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
    """Wrap ``AsyncLLM.collective_rpc``: the end of a weight sync starts a new version."""
    result = await original(self, method, timeout, args, kwargs)
    order = decode(args[0]) if method == "update_weight" and args else None
    if order is not None and order["op"] == "end":
        ENGINE.version = int(order["version"])
    return result


@replacement
async def generate(original: Any, self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
    """Wrap ``AsyncLLM.generate``: an output belongs to the version that is current when it arrives."""
    seen = _sample.get()
    if seen is not None:
        seen.note(ENGINE.version)
    masks: Any = None
    async for output in original(self, *args, **kwargs):
        if seen is not None:
            seen.note(ENGINE.version)
            masks = getattr(output.outputs[0], "sampling_mask", None) if output.outputs else None
        yield output
    if seen is not None:
        seen.drawn.append(None if masks is None else masks.token_ids)


@replacement
async def execute(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap the agent executors' ``execute``, which makes one sample from one or more requests."""
    seen = Seen()
    token = _sample.set(seen)
    try:
        sample = await original(self, *args, **kwargs)
    finally:
        _sample.reset(token)
    if session.active_with(lambda config: config.exact):
        support.add_to(sample, seen.drawn)
    if seen.last:  # 0 if the plugin has never synced this engine
        sample["extra_logs"] = {**(sample.get("extra_logs") or {}), FIRST: seen.first, LAST: seen.last}
    return sample


# ---- Add mismatch and sync metrics to OpenRLHF's log, in every mode, with or without a correction

logger = logging.getLogger(__name__)


@replacement
def create_vllm_engines(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``create_vllm_engines``: engines return processed log-probs even without a correction."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.arguments["logprobs_mode"] = "processed_logprobs"  # after the sampler's processing, which the trainer reproduces
    return original(*bound.args, **bound.kwargs)


@replacement
def sampling_params(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace the name ``SamplingParams`` in ``samples_generator``: request the sampled token's log-prob."""
    if kwargs.get("logprobs") is None:
        kwargs["logprobs"] = 0
    check_sampling(int(kwargs.get("min_tokens") or 0))
    return original(*args, **kwargs)


@replacement
def trainer_init(original: Any, self: Any, strategy: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap ``BasePPOTrainer.__init__``: require the driver's settings in the trainer loop."""
    check_mark(strategy.args, "OpenRLHF's trainer loop")
    original(self, strategy, *args, **kwargs)


@replacement
def make_experience(original: Any, self: Any, samples_list: Any) -> Any:
    """Wrap ``RemoteExperienceMaker.make_experience``, the first place that has both log-probs of every sample."""
    import torch

    logprob.blank(samples_list)
    may_skip = logprob.may_skip(samples_list, lambda experience: _current(experience, self.args))
    DRIVER.skipped = samples_list if may_skip else None
    try:
        experiences = original(self, samples_list)
        if DRIVER.skipped is None:
            note_mismatch(experiences, self.args)
        else:
            mask = _rows([e.action_mask for e in experiences])
            ratios = torch.zeros(mask.shape)  # of 1: the old log-probs are the rollout's
            DRIVER.corrected = correction.figures(self.args.algo.advantage, session.active_config(), ratios, mask)
        return experiences
    finally:
        DRIVER.skipped = None


def note_mismatch(experiences: Sequence[Any], args: Any) -> None:
    """Compare the log-probs of a step's samples and keep the metrics for its log line.

    Raises AuditError in exact mode if a token of the trainer's weights differs and ``on_mismatch="stop"``.
    """
    import torch

    with_both = [e for e in experiences if e.rollout_log_probs is not None]
    if not with_both:
        _warn("the samples have no rollout log-probs, so this step reports no mismatch")
        return
    fields = ("action_log_probs", "rollout_log_probs", "action_mask")
    trainer, rollout, mask = (_rows([getattr(e, field) for e in with_both]) for field in fields)
    current = torch.cat([_current(e, args) for e in with_both])
    compared = Compared()
    compared.add(trainer, rollout, mask, current)
    found, of_current = compared.figures()
    corrected = correction.figures(args.algo.advantage, session.active_config(), trainer - rollout, mask)
    corrected |= marks(sampling_of(args), session.active_config())
    DRIVER.metrics.update(step_metrics(found, corrected, of_current))
    names = [name for e in with_both for name in logprob.names(e)]
    hold(trainer, rollout, mask, current, session.active_config(), names)


def _warn(line: str) -> None:
    logger.warning("jetrl_patch: %s", line)


def _current(experience: Any, args: Any) -> Any:
    """Bool [B]: True for samples made only by the trainer's current weights.

    Samples without a version count as current, because BF16 mode uses OpenRLHF's own sync. In an asynchronous run in exact mode
    they do not: they come from the user's own executor, from unknown weights.
    """
    import torch

    versions = [experience.info.get(name) for name in (FIRST, LAST)]
    if any(found is None for found in versions):
        unknown = session.active_config().exact and args.train.async_enable
        return torch.full((len(experience.action_mask),), not unknown)
    first, last = (found.cpu().flatten() for found in versions)
    return (first == DRIVER.version) & (last == DRIVER.version)


def _rows(parts: Sequence[Any]) -> Any:
    """Concatenate the rows of all parts [B, A], padded with zeros to one width."""
    import torch

    width = max(part.shape[1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part.cpu(), (0, width - part.shape[1])) for part in parts])


@replacement
def broadcast_to_vllm(original: Any, self: Any) -> None:
    """Wrap ``BasePPOTrainer.broadcast_to_vllm``: collect a report from every policy actor."""
    original(self)
    reports = ask_actors(self.actor_model_group, "sync")
    note_sync(reports)
    sync.tell(self, reports[0]["guarded"])


def note_sync(reports: Sequence[dict[str, Any]]) -> None:
    """Keep the metrics of a sync, and of a step without the policy's pass, from the policy actors' reports, rank 0 first."""
    DRIVER.metrics.update(sync_metrics(reports))
    DRIVER.version = reports[0]["version"]
    DRIVER.unfinished = any(report["unfinished"] for report in reports)
    found = DRIVER.audit.merged(reports)
    if DRIVER.corrected is not None and found is not None:
        figures, counts = found
        DRIVER.metrics.update(step_metrics(figures, DRIVER.corrected, figures) | counts)
    DRIVER.corrected = None
    for line in reports[0]["lines"]:
        _warn(line)


@replacement
def train_step(original: Any, self: Any, rollout_samples: Any, global_step: int) -> Any:
    """Wrap ``BasePPOTrainer.train_step``: add the plugin's metrics to the step's status, which OpenRLHF logs."""
    if DRIVER.audited is not self:  # before the first step
        reports = require_patched(self)
        DRIVER.version = max((report["version"] for report in reports), default=0)
        sync.tell(self, next((report["guarded"] for report in reports if report["role"] == "policy actor"), []))
        DRIVER.audited = self
    DRIVER.frozen = logprob.is_frozen(self.args, global_step)
    status, step = original(self, rollout_samples, global_step)
    status.update(say_if_nothing(DRIVER.take(), _warn))
    return status, step
