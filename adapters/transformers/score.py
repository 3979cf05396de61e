"""The trainer's log-probs of given tokens, for ``jetrl parity``, without gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jetrl_patch.adapters.transformers.prepare import prepare_model
from jetrl_patch.exact.ops import token_log_probs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jetrl_patch.parity.modes import Job
    from jetrl_patch.parity.sample import Sample

__all__ = ["score", "score_batch"]

_MICRO_BATCH = 8


def score(job: Job, samples: Sequence[Sample]) -> Tensor:
    """Load the checkpoint, convert it for the mode, and score all response tokens.

    Returns:
        FP32 [tokens], in the order of the samples. Sequences run in padded micro-batches of 8, so that they are batched
        differently than in the rollout.
    """
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, job.config.compute_dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype).to(device).eval()
    prepare_model(model, job.config, job.tp, device)
    parts = [
        score_batch(model, samples[start : start + _MICRO_BATCH], job.temperature)
        for start in range(0, len(samples), _MICRO_BATCH)
    ]
    return torch.cat(parts).cpu()


@torch.no_grad()
def score_batch(model: Any, samples: Sequence[Sample], temperature: float) -> Tensor:
    """Return FP32 log-probs [tokens] of the responses of one right-padded batch."""
    rows = [[*s.prompt, *s.response[:-1]] for s in samples]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=model.device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=model.device)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    found = []
    for row, s in enumerate(samples):
        first = len(s.prompt) - 1
        labels = torch.tensor(s.response, device=model.device)
        found.append(token_log_probs(logits[row, first : first + len(s.response)], labels, temperature))
    return torch.cat(found)
