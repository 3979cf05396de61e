"""Carry what each token was drawn from to the outputs of releases without sampling masks: beside the ids of its log-probs.

vLLM returns, for each token, the ids [1 + k] of the log-probs that a request asked for, and these log-probs. Here further ids
follow, which have no log-prob, through the device's copy, the scheduler and the wire. Where outputs are made they are taken off.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from jetrl_patch.adapters.vllm.support import LAST
from jetrl_patch.patching.attached import Attached
from jetrl_patch.patching.patch import Patch, replacement

#: fills the rows of requests with fewer ids; no id, and the complement of none
_NONE = -(2**31)
#: the ids of each token of a request so far, None for one without a record, on its processor of log-probs
_ROWS: Attached[list[list[int] | None]] = Attached(
    "_jetrl_supports", "vLLM makes the outputs of a request from its text and this object alone"
)


@replacement
def sampler_forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap V1's ``Sampler.forward``: put the record of this step behind the ids of its log-probs."""
    import numpy as np
    import torch

    LAST.set(self, None)
    output = original(self, *args, **kwargs)
    record, tensors = LAST.get(self), output.logprobs_tensors
    if record is None or tensors is None or tensors.logprob_token_ids.dim() != 2:  # those of the whole vocabulary have no ids
        return output
    counts = np.diff(record.offsets)
    rows = np.full((len(counts), int(counts.max(initial=0))), _NONE, dtype=np.int32)
    rows[np.arange(rows.shape[1]) < counts[:, None]] = record.ids
    ids = tensors.logprob_token_ids
    behind = torch.from_numpy(rows).to(ids.device, ids.dtype, non_blocking=True)
    output.logprobs_tensors = tensors._replace(logprob_token_ids=torch.cat([ids, behind], dim=1))
    return output


@replacement
def update_sample_logprobs(original: Any, self: Any, logprobs_lists: Any) -> None:
    """Wrap ``LogprobsProcessor._update_sample_logprobs``: take off what stands behind the ids of log-probs."""
    width = logprobs_lists.logprobs.shape[1]
    ids = logprobs_lists.logprob_token_ids
    rows = _ROWS.get(self) or []
    rows += [[token for token in row if token != _NONE] if row else None for row in ids[:, width:].tolist()]
    _ROWS.set(self, rows)
    original(self, logprobs_lists._replace(logprob_token_ids=ids[:, :width]))


@replacement
def new_completion_output(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``RequestState._new_completion_output``: the output gets the field that later releases have."""
    output = original(self, *args, **kwargs)
    rows = _ROWS.get(self.logprobs_processor) or []
    if any(row is not None for row in rows):
        output.sampling_mask = SimpleNamespace(token_ids=[row or [] for row in rows[len(rows) - len(output.token_ids) :]])
    return output


_MASKS = "the plugin supports no vLLM before 0.28, whose CompletionOutput has no sampling_mask"
PATCHES: tuple[Patch, ...] = (
    Patch(
        "vllm.v1.sample.sampler", "Sampler.forward", sampler_forward,
        reason="nothing of what a runner returns has a place for what each token was drawn from, which the trainer must know",
        remove_when=_MASKS,
    ),
    Patch(
        "vllm.v1.engine.logprobs", "LogprobsProcessor._update_sample_logprobs", update_sample_logprobs,
        reason="it would take the ids behind those of the log-probs for tokens of the vocabulary",
        remove_when=_MASKS,
    ),
    Patch(
        "vllm.v1.engine.output_processor", "RequestState._new_completion_output", new_completion_output,
        reason="the outputs of a request have no field for what its tokens were drawn from",
        remove_when=_MASKS,
    ),
)  # fmt: skip
