"""Log-probs under top-p: bring what the rollout drew from to the policy actors, and leave out the rest.

OpenRLHF's samples have a place for a dictionary of their own, ``mm_train_inputs``, which is None without images and reaches every
forward pass of the policy and of the reference model. It carries the supports of a sample's tokens too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jetrl_patch.adapters.openrlhf.state import WORKER
from jetrl_patch.errors import AuditError, explain
from jetrl_patch.patching.patch import replacement
from jetrl_patch.trainer.support import KEY

if TYPE_CHECKING:
    from torch import Tensor

    from jetrl_patch.exact.support import Support


def add_to(sample: dict[str, Any], drawn: Sequence[Sequence[Sequence[int]] | None]) -> None:
    """Add to an agent's sample what the tokens of its turns were drawn from, with None for a turn that may draw every token.

    Raises AuditError if they are those of other tokens.
    """
    import torch

    from jetrl_patch.exact.support import Support

    if not any(row for turn in drawn for row in turn or ()):
        return
    tokens, turns = sample["observation_tokens"], sample["action_ranges"]
    lengths = [end - start for start, end in turns]
    rows: list[Sequence[int]] = [[] for _ in tokens]
    filled = [[[]] * length if turn is None else turn for turn, length in zip(drawn, lengths)]
    if (given := [len(turn) for turn in filled]) != lengths:
        what, fix = "the sampling supports of an agent's turns", "let each turn be one request, or set top_p to 1"
        raise AuditError(explain(what, required=f"turns of {lengths} tokens", found=str(given), fix=fix))
    for (start, end), turn in zip(turns, filled, strict=True):
        rows[start:end] = turn
    found = Support.of(rows).require(torch.tensor(tokens), "an agent's sample")
    sample["mm_train_inputs"] = {**(sample["mm_train_inputs"] or {}), KEY: found.pack()}


@replacement
def execute_batch(original: Any, self: Any, method_name: str, all_data: Any, start_idx: int, end_idx: int) -> Any:
    """Wrap ``BaseModelActor.execute_batch``, which calls a method for each item: keep their dictionaries for ``Actor.forward``.

    OpenRLHF's own methods pass them on for vision-language models only.
    """
    WORKER.drawn = deque(all_data.get("mm_train_inputs_list", ())[start_idx:end_idx])
    try:
        return original(self, method_name, all_data, start_idx, end_idx)
    finally:
        WORKER.drawn = deque()


@replacement
def merge_mm_train_inputs(original: Any, mm_train_inputs_list: Sequence[Any], device: Any) -> Any:
    """Wrap ``merge_mm_train_inputs``, which joins what the forward of a vision-language model gets: leave the supports out."""

    def of_images(one: Any) -> Any:
        if isinstance(one, list):
            return [of_images(sample) for sample in one]
        return one and {name: value for name, value in one.items() if name != KEY}

    return original(of_images(mm_train_inputs_list), device)


def of_rows(given: Any, sequences: Tensor, packed: Tensor | None, rows: int) -> Support | None:
    """What the tokens that the rows of logits predict were drawn from; None if every one was drawn from all tokens.

    Args:
        given: the samples' dictionaries, in lists.
        sequences: token ids [B, T], padded on the right.
        packed: mask of tokens [B, T], if the rows are those of a packed batch.
        rows: their number.
    """
    from jetrl_patch.exact.support import placed

    every = list(_dictionaries(given))
    if not any(every):
        return None
    lengths = [sequences.shape[1]] * len(sequences) if packed is None else packed.sum(1).tolist()
    return placed(_pieces(every, lengths), rows).to(sequences.device)


def _pieces(every: Sequence[dict[str, Any]], lengths: Sequence[int]) -> Iterator[tuple[int, Support]]:
    """The supports of each sample's tokens but the first, and the row of logits that predicts the second."""
    from jetrl_patch.exact.support import Support

    start = 0
    for one, length in zip(every, lengths, strict=True):
        if one:
            yield start, Support.unpack(one[KEY]).part(1, length)
        start += length


def _dictionaries(given: Any) -> Iterator[dict[str, Any]]:
    """The samples' dictionaries, empty where there is none, from lists of lists of them."""
    for one in given or ():
        if isinstance(one, (list, tuple)):
            yield from _dictionaries(one)
        else:
            yield one if one and KEY in one else {}
