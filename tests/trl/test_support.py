"""top-k, top-p and min-p in TRL: from the engine's outputs to the rows of the head. Whole runs are in ``test_runs``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jetrl_patch.adapters.trl import support
from jetrl_patch.adapters.trl.state import Run
from jetrl_patch.errors import AuditError, ConfigError
from jetrl_patch.exact.support import Support

#: what the tokens of two completions were drawn from
DRAWN = [[[3, 4], [5]], [[6, 7, 8], [9], [2, 1]]]
#: two samples [B, T] with prompts of 1 and 2 tokens, padded to 2 on the left, and completions of 2 and 3, padded on the right
IDS = torch.tensor([[0, 11, 3, 5, 0], [12, 13, 7, 9, 1]])
MASK = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]])


def run_of(**settings: Any) -> Run:
    return Run(args=SimpleNamespace(use_vllm=True, **settings))


def outputs(masks: list[Any]) -> list[Any]:
    return [SimpleNamespace(outputs=[SimpleNamespace(sampling_mask=mask)]) for mask in masks]


def rows_of(found: Support) -> list[list[int]]:
    return [row.tolist() for row in found.ids.split(found.counts.tolist())]


def test_completions_bring_their_supports() -> None:
    masks = [SimpleNamespace(token_ids=rows) for rows in DRAWN]
    _, returned = support.extract_logprobs(lambda outputs: ([], ["ids"]))(outputs(masks))
    assert [rows_of(one) for one in returned] == DRAWN
    found = support.of_completions(run_of(top_p=0.9), [[3, 5], [7, 9, 1]], returned)
    assert found == returned
    assert support.of_completions(run_of(top_p=1.0, top_k=-1, min_p=None), [[3, 5]], returned) is None
    with pytest.raises(AuditError, match=r"the sampling supports of TRL's completions: .*found 1 of 2 tokens"):
        support.of_completions(run_of(top_k=2), [[3, 6], [7, 9, 1]], returned)


def test_an_engine_without_them_is_an_error() -> None:
    _, ids = support.extract_logprobs(lambda outputs: ([], [[[3], [5]]]))(outputs([None]))
    assert ids == [[[3], [5]]]
    with pytest.raises(ConfigError, match=r"top_p and top_k in exact mode: required an engine that .*found none in its outputs"):
        support.of_completions(run_of(top_p=0.9, top_k=3), [[3, 5]], ids)


@pytest.mark.parametrize("made", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_the_head_gets_every_position_or_the_tokens_that_count(monkeypatch: pytest.MonkeyPatch, made: bool, size: int) -> None:
    """While a batch is made, and in its update; ``size`` samples at a time, in reverse order."""
    run = run_of(top_p=0.9)
    if made:
        run.drawn = [Support.of(rows) for rows in DRAWN]
    else:
        run.batch = {"completion_ids": IDS[:, 2:]}
        support.add_to(run.batch, [Support.of(rows) for rows in DRAWN])
    order = [1, 0]
    for compact in (False, True):
        with support.drawn_from(run, IDS[order], MASK[order], 3, order):
            drawn = support._drawn.get()
            assert drawn is not None
            tokens, positions = ([3, 2], [4, 4]) if size == 1 else ([5], [8])
            found = [row for rows in (tokens if compact else positions) for row in rows_of(drawn.take(rows, compact))]
        if compact:
            assert found == [*DRAWN[1], *DRAWN[0]]
        else:  # a head's row is a position: the last token of the prompt, and those of the completion but the last
            assert found == [[], *DRAWN[1], [], *DRAWN[0], []]
    assert support._drawn.get() is None


def test_requests_that_may_draw_every_token_change_nothing() -> None:
    with support.drawn_from(run_of(), IDS, MASK, 3):
        assert support._drawn.get() is None
    batch: dict[str, Any] = {"completion_ids": IDS}
    support.add_to(batch, None)
    assert batch.keys() == {"completion_ids"}
