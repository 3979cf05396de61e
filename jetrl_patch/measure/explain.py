"""An explained mismatch as data: what each op adds to it, over the depth of the model and the length of the response."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OPS", "PARTS", "Step"]

#: what exact mode makes equal, in the order in which ``jetrl parity --explain`` makes it so
OPS = ("FP8 linears", "norms", "RoPE", "activation", "router", "attention", "lm_head", "log-softmax")
#: equal parts of a response, from its first token to its last
PARTS = 4


@dataclass(frozen=True)
class Step:
    """The trainer in which ``op`` and those before it are exact, against an exact rollout.

    Attributes:
        op: name in ``OPS``; empty for Hugging Face's model as it is.
        mean: mean of |Δ log-prob| over the sampled tokens.
        max: its largest value.
        equal: share of tokens whose log-probs are equal.
        alone: the mean of a trainer in which this op alone is stock. None in the first step.
        parts: the mean in each part of the responses.
        depth: norm of the difference of hidden states to the exact ones', over theirs, behind each block.
    """

    op: str
    mean: float
    max: float
    equal: float
    alone: float | None
    parts: list[float]
    depth: list[float]
