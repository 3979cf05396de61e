"""Record which tokens each token was drawn from, in both model runners of vLLM.

vLLM has a record of its own, the sampling masks, for engines with the V2 runner in which every request has a top-k. Everything
behind the runner, from the scheduler to ``CompletionOutput.sampling_mask``, serves both; releases without it carry the record as
``carried`` says. Here the runners record the tokens of requests with top-k, top-p or min-p, and nothing for the others. The V1
runner also records what banned tokens leave, as the ids of ``exact.support.Support``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from jetrl_patch.patching.attached import Attached
from jetrl_patch.patching.patch import replacement

if TYPE_CHECKING:
    from torch import Tensor


class Record(NamedTuple):
    """What the tokens of a step's n requests were drawn from: the ids int32 of all, and where each request's begin [n + 1]."""

    ids: Any
    offsets: Any


#: the record of the last step, on the runner's sampler
LAST: Attached[Record | None] = Attached("_jetrl_masks", "what Sampler.forward returns to the runner has no field for them")
#: whether a grammar bans tokens in this step, on the same
_GRAMMAR: Attached[bool] = Attached("_jetrl_grammar", "the runner has applied it to the logits that the sampler gets")
#: whether tokens were banned in any step, on the same. From then on each step has a record, because some bans end early
_BANNED: Attached[bool] = Attached("_jetrl_banned", "of earlier steps, the sampler's arguments do not tell")


@replacement
def scheduler_init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap ``Scheduler.__init__``: it passes on the masks that a runner records."""
    original(self, *args, **kwargs)
    self.return_sampling_mask = True


# ---- The V2 model runner, whose sampler records every request of a batch, or none -----------------

@replacement
def v2_sampler_call(original: Any, self: Any, logits: Tensor, input_batch: Any) -> Any:
    """Wrap V2's ``Sampler.__call__``: record a batch in which a request limits the tokens, and nothing of its other requests."""
    import torch

    if self.return_sampling_mask:  # the user's own setting
        return original(self, logits, input_batch)
    states, requests = self.sampling_states, input_batch.idx_mapping_np
    limited = (states.top_k.np[requests] != states.vocab_size) | (states.top_p.np[requests] != 1)
    limited |= states.min_p.np[requests] != 0
    self.return_sampling_mask = bool(limited.any())
    try:
        output = original(self, logits, input_batch)
    finally:
        self.return_sampling_mask = False
    if (masks := output.sampling_mask_tensors) is not None:
        masks.counts.masked_fill_(torch.from_numpy(~limited).to(masks.counts.device, non_blocking=True), 0)
    return output


# ---- The V1 model runner -------------------------------------------------------------------------

@replacement
def sampler_sample(original: Any, self: Any, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap V1's ``Sampler.sample``: keep the tokens of each request that leaves some out, if it asked for log-probs."""
    limited, bans = _limited(sampling_metadata, logits), _bans(sampling_metadata) or bool(_GRAMMAR.get(self))
    if bans:
        _BANNED.set(self, True)
    sampled, log_probs = original(self, logits, sampling_metadata, *args, **kwargs)
    masks = None
    if log_probs is not None and (limited is not None or bans):
        masks = _masks(log_probs, None if bans else limited)
    elif log_probs is not None and _BANNED.get(self):
        masks = _no_masks(len(log_probs))
    LAST.set(self, masks)
    return sampled, log_probs


@replacement
def sample_tokens(original: Any, self: Any, grammar_output: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap V1's ``GPUModelRunner.sample_tokens``: tell the sampler whether a grammar bans tokens, and forget the last step."""
    LAST.set(self.sampler, None)
    _GRAMMAR.set(self.sampler, grammar_output is not None)
    return original(self, grammar_output, *args, **kwargs)


@replacement
def sample_tokens_with_masks(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap the same once more: its output, which may still be on its way from the GPU, gets the masks."""
    output = original(self, *args, **kwargs)
    if (record := LAST.get(self.sampler)) is not None:
        from vllm.v1.outputs import SamplingMaskLists

        getattr(output, "_model_runner_output", output).sampling_masks = SamplingMaskLists(*record)
    return output


def _bans(metadata: Any) -> bool:
    """Whether a request bans tokens now: bad words, all but allowed ones, or the end before ``min_tokens``."""
    processors = metadata.logitsprocs.non_argmax_invariant
    ends = any(getattr(processor, "min_toks", None) for processor in processors)
    return ends or bool(metadata.bad_words_token_ids) or metadata.allowed_token_ids_mask is not None


def _limited(metadata: Any, logits: Tensor) -> Tensor | None:
    """Which requests bool [n] have top-k, top-p or min-p; None if none has."""
    found = None if metadata.top_k is None else metadata.top_k < logits.shape[-1]
    if metadata.top_p is not None:
        found = metadata.top_p < 1 if found is None else found | (metadata.top_p < 1)
    for processor in metadata.logitsprocs.argmax_invariant:
        if getattr(processor, "min_p_count", 0):
            by_min_p = processor.min_p.reshape(-1) > 0
            found = by_min_p if found is None else found | by_min_p
    return found


def _masks(log_probs: Tensor, limited: Tensor | None) -> Record:
    """The record of log-probs [n, V], which are −inf for tokens left out. The host waits for the device.

    ``limited`` [n]: the requests of which there is anything to record; None for all.
    """
    import numpy as np
    import torch

    kept = log_probs > -float("inf")
    bans = kept.sum(1, keepdim=True) > log_probs.shape[1] // 2  # then those that were left out are fewer
    named = kept ^ bans if limited is None else (kept ^ bans) & limited.unsqueeze(1)
    rows, tokens = named.nonzero().unbind(1)
    offsets = np.zeros(len(named) + 1, dtype=np.int64)
    np.cumsum(named.sum(1).cpu().numpy(), out=offsets[1:])
    return Record(torch.where(bans[rows, 0], ~tokens, tokens).int().cpu().numpy(), offsets)


def _no_masks(requests: int) -> Record:
    """That of a step in which no request leaves out a token."""
    import numpy as np

    return Record(np.zeros(0, dtype=np.int32), np.zeros(requests + 1, dtype=np.int64))
