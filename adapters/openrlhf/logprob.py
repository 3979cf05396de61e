"""Compute the trainer's log-probs as the rollout does, or reuse the rollout's as the old ones."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from jetrl_patch import session
from jetrl_patch.adapters.openrlhf import support
from jetrl_patch.adapters.openrlhf.state import DRIVER, WORKER
from jetrl_patch.adapters.openrlhf.vision import NEVER
from jetrl_patch.errors import ConfigError, explain
from jetrl_patch.exact.sequences import mark
from jetrl_patch.patching.patch import replacement
from jetrl_patch.trainer.audit import sample

# ---- ``old_log_probs="rollout"``: skip the policy's forward pass while experience is made ---------
# In the driver, ``make_experience`` decides for each step, and ``_dispatch_forward`` answers in place of the policy actors. In a
# step with several updates it has a share of the samples computed, and compares them. In the actor, ``training_step`` compares in
# the first update.

def blank(samples: Sequence[Any]) -> None:
    """Set the rollout's log-probs to 0 where no token counts, as ``Actor.forward`` sets the trainer's.

    OpenRLHF's losses multiply by the mask, and 0 times the NaN or −inf of an environment's token is NaN.
    """
    import torch

    for found in samples:
        if found.rollout_log_probs is not None:
            found.rollout_log_probs = torch.where(found.action_mask.bool(), found.rollout_log_probs, 0.0)


def may_skip(samples: Sequence[Any], are_current: Callable[[Any], Any]) -> bool:
    """Whether the rollout's log-probs are the old ones of a step with these experiences, which have seen no forward pass.

    ``are_current`` returns a bool [B], True for samples made by the trainer's current weights. The others need the pass.
    """
    if not session.active_config().skips_old_pass or DRIVER.audit.failed:
        return False
    return all(found.rollout_log_probs is not None and bool(are_current(found).all()) for found in samples)


@replacement
def dispatch_forward(original: Any, self: Any, group: Any, sync_condition: bool, **kwargs: Any) -> Any:
    """Wrap ``RemoteExperienceMaker._dispatch_forward``: the samples' log-probs serve as the policy's."""
    if DRIVER.skipped is None or group is not self.actor_model_group:
        return original(self, group, sync_condition, **kwargs)
    import ray

    old = [found.rollout_log_probs.clone() for found in DRIVER.skipped]
    chosen = _chosen(DRIVER.skipped, self.args, len(group._actor_handlers))
    if chosen:
        refs = original(self, group, sync_condition, **{name: [of[i] for i in chosen] for name, of in kwargs.items()})
        if not _equal(self._flatten_results(refs, 1), [DRIVER.skipped[i] for i in chosen]):
            DRIVER.skipped = None
            return original(self, group, sync_condition, **kwargs)
    return [ray.put(old)]


def is_frozen(args: Any, step: int) -> bool:
    """Whether this step does not train the policy, or trains it on samples of earlier, frozen steps too."""
    last: int = args.critic.freezing_steps  # the first step is 0; -1 freezes none
    return last >= 0 and step <= last + 1


def _chosen(samples: Sequence[Any], args: Any, actors: int) -> list[int]:
    """The samples to compute (``audit_fraction``); none in a step with one update, which checks all samples."""
    rows = sum(len(found.sequences) for found in samples)
    if rows <= args.train.batch_size and not (DRIVER.frozen or DRIVER.unfinished):
        return []
    return sample(len(samples), session.active_config().audit_fraction, actors)


def _equal(computed: Sequence[Any], samples: Sequence[Any]) -> bool:
    """Compare all samples, even after a difference, for the log's figures. Raises AuditError with ``on_mismatch="stop"``."""
    config = session.active_config()
    found = [
        DRIVER.audit.compare(log_probs, of.rollout_log_probs, of.action_mask, config, names(of))
        for log_probs, of in zip(computed, samples, strict=True)
    ]
    return all(found)


def names(experience: Any) -> list[str]:
    """Names for the samples of an experience in messages: their prompts."""
    return [f"a sample of prompt {prompt!r:.60}" for prompt in experience.prompts or ()]


@replacement
def training_step(original: Any, self: Any, experience: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``ActorPPOTrainer.training_step``: in the first update after a sync, its forward pass checks the old log-probs."""
    if self.actor.model.global_steps == WORKER.synced_at:  # the weights are those that sampled
        WORKER.checked = experience
    WORKER.drawn = deque([getattr(experience, "mm_train_inputs", None)])
    try:
        return original(self, experience, *args, **kwargs)
    finally:
        WORKER.checked, WORKER.drawn = None, deque()


def check_forward(log_probs: Any) -> None:
    """Compare a forward pass [B, A] with the old log-probs of the batch in ``training_step``, before its loss is computed.

    If they differ and the run continues, the batch gets the log-probs of this pass, as if it had not been skipped. Raises
    AuditError.
    """
    experience = WORKER.checked
    if experience is None:
        return
    old, mask = experience.action_log_probs, experience.action_mask
    if not WORKER.audit.compare(log_probs, old, mask, session.active_config(), names(experience)):
        old.copy_(log_probs.detach())


# ---- Compute the trainer's log-probs as the rollout does, in modes with ``same_log_probs`` -------------
# vLLM's sampler casts logits to FP32, divides by the temperature, sets banned tokens to −inf and takes the log-softmax. OpenRLHF
# samples with ``min_tokens=1``, so vLLM bans EOS at the first token of a response, whose log-prob rises by −log(1 − p(EOS)). The
# trainer bans EOS there too.

#: the largest ``min_tokens`` that the trainer reproduces
MIN_TOKENS = 1


@dataclass(frozen=True)
class _Batch:
    """What ``Actor.forward`` does not pass to the functions below.

    Attributes:
        first: bool [B, T], the first tokens of responses.
        packed: mask of tokens [B, T], if the batch is packed.
        temperature: by which the logits are still to be divided.
        alone: whether nothing but log-probs needs the logits.
        sequences: token ids [B, T].
        drawn: the samples' dictionaries, see ``support``; None without any.
    """

    first: Any
    packed: Any
    temperature: float
    alone: bool
    sequences: Any = None
    drawn: Any = None

    def drawn_from(self, rows: int) -> Any:
        """What the tokens that the rows of logits predict were drawn from; None if all were drawn from all tokens."""
        return None if self.drawn is None else support.of_rows(self.drawn, self.sequences, self.packed, rows)


_batch: ContextVar[_Batch | None] = ContextVar("jetrl_batch", default=None)


@replacement
def actor_forward(
    original: Any, self: Any, sequences: Any, action_mask: Any = None, attention_mask: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Wrap ``Actor.forward``: remember where responses begin while it computes log-probs, and check those of an update.

    It also keeps OpenRLHF from dividing the logits by a Python number: CUDA multiplies by the reciprocal, and vLLM divides by a
    tensor, with other bits.
    """
    if action_mask is None or self not in WORKER.sources:
        return original(self, sequences, action_mask, attention_mask, *args, **kwargs)
    batch = _Batch(
        first=first_tokens(action_mask, sequences.shape[1]),
        packed=attention_mask if getattr(self, "packing_samples", False) else None,
        temperature=self.temperature,
        alone=not kwargs.get("return_entropy", False) and len(args) < _RETURN_ENTROPY,
        sequences=sequences,
        drawn=WORKER.drawn.popleft() if WORKER.drawn else None,
    )
    self.temperature, token = 1.0, _batch.set(batch)
    try:
        found = original(self, sequences, action_mask, attention_mask, *args, **kwargs)
        check_forward(found[0] if isinstance(found, tuple) else found)
        return found
    finally:
        self.temperature = batch.temperature
        _batch.reset(token)


@replacement
def unpad_and_slice_tensor(original: Any, sequences: Any, attention_mask: Any, ring_attn_group: Any) -> Any:
    """Wrap ``openrlhf.models.actor.unpad_and_slice_tensor``: token ids [B, T] -> a packed row, its positions, and more."""
    found = original(sequences, attention_mask, ring_attn_group)
    mark(found[1], sequences.shape[0])
    return found


#: index of ``return_entropy`` among the arguments of ``Actor.forward`` after ``attention_mask``
_RETURN_ENTROPY = 6


def first_tokens(action_mask: Any, width: int) -> Any:
    """Mark the rows of the logits [B, T = width] that predict the first token of a response, in each turn.

    ``action_mask`` [B, A] is nonzero at response tokens; its last column belongs to logits row T - 2.
    """
    import torch

    mask = action_mask.bool()
    begins = mask.clone()
    begins[:, 1:] &= ~mask[:, :-1]
    return torch.nn.functional.pad(begins, (width - 1 - mask.shape[1], 1))


@replacement
def log_probs_from_logits(original: Any, logits: Any, labels: Any, temperature: float = 1.0) -> Any:
    """Replace ``log_probs_from_logits`` of ``openrlhf.models.actor``: logits [..., V] FP32, labels [...] -> [...]."""
    batch = _batch.get()
    if batch is None:
        return original(logits, labels, temperature)
    from jetrl_patch.exact.logprob import chained
    from jetrl_patch.exact.ops import token_log_probs

    first = batch.first
    if batch.packed is not None:
        first = packed(first, batch.packed, labels.numel())
    stop = tuple(token for token in WORKER.stop_tokens if token < logits.shape[-1])
    banned = edit_of(first.flatten(), *(_on(tokens, logits.device) for tokens in (stop, WORKER.placeholders)))
    found = batch.drawn_from(labels.numel())
    edit = banned if found is None else chained(banned, found.edit)
    return token_log_probs(logits, labels, batch.temperature, edit=edit, reuse=batch.alone)


@replacement
def compute_entropy(original: Any, logits: Any) -> Any:
    """Wrap ``compute_entropy`` of ``openrlhf.models.actor``: entropies [...] of the distributions that were sampled from.

    That is, of the logits [..., V] divided by the temperature, without the tokens that the rollout left out.
    """
    from jetrl_patch.exact.logprob import divisor, edited

    batch = _batch.get()
    if batch is None:
        return original(logits)
    if (found := batch.drawn_from(logits.shape[:-1].numel())) is not None:
        logits = edited(logits, found.edit)
    if batch.temperature == 1.0:
        return original(logits)
    return original(logits / divisor(batch.temperature, logits))


def packed(values: Any, mask: Any, tokens: int) -> Any:
    """Return the values [B, T] where ``mask`` is nonzero, in order, [tokens], without synchronizing with the host."""
    import torch

    order = torch.sort(mask.flatten().bool(), descending=True, stable=True).indices
    return values.flatten()[order[:tokens]]


def edit_of(first: Any, stop: Any, placeholders: Any) -> Any:
    """Return an edit of logits [rows, V] for ``token_log_probs``; None if there is no token of either kind.

    It bans ``stop`` in the rows that ``first`` [T] marks, and lowers the logits of ``placeholders`` as the rollout does
    (``vision.never_samples``).
    """
    import torch

    from jetrl_patch.exact.support import BANNED

    def edit(block: Any, rows: slice) -> Any:
        block = block.index_copy(1, stop, torch.where(first[rows, None], BANNED, block[:, stop]))
        return block.index_copy(1, placeholders, block[:, placeholders] + NEVER) if placeholders.numel() else block

    return edit if stop.numel() or placeholders.numel() else None


@functools.lru_cache(maxsize=8)
def _on(tokens: tuple[int, ...], device: Any) -> Any:
    """Token ids on a device. Copying them for each batch would synchronize with the host."""
    import torch

    return torch.tensor(tokens, dtype=torch.long, device=device)


@replacement
def process_response(original: Any, self: Any, response: Any, **kwargs: Any) -> Any:
    """Wrap ``SamplesGenerator._process_response_into_experience``, which still has the token range of each turn."""
    check_turns(response["action_ranges"])
    return original(self, response, **kwargs)


def check_turns(ranges: Iterable[tuple[int, int]]) -> None:
    """Raise ConfigError if one of an agent's turns (first token, one past the last) directly follows another.

    vLLM bans EOS at the first token of each turn, but the sample's mask joins the two.
    """
    for (_, end), (start, _) in itertools.pairwise(ranges):
        if start == end:
            what, required = "turns of an OpenRLHF agent with align='exact'", "environment tokens between two turns"
            fix = "return a non-empty environment_feedback unless done=True, or use align='linear'"
            found = f"a turn that begins at token {start}, where the previous one ends"
            raise ConfigError(explain(what, required=required, found=found, fix=fix))


def check_sampling(min_tokens: int) -> None:
    """Raise ConfigError for a ``min_tokens`` that the trainer cannot reproduce in exact mode."""
    if session.active_with(lambda config: config.exact) and min_tokens > MIN_TOKENS:
        required, fix = f"at most {MIN_TOKENS}, which the trainer reproduces", f"set it to {MIN_TOKENS}, or use align='linear'"
        raise ConfigError(explain("min_tokens in exact mode", required=required, found=str(min_tokens), fix=fix))
