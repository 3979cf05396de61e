"""top-p in OpenRLHF: from an agent's requests to the rows of a batch, and whole runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jetrl_patch.adapters.openrlhf import support
from jetrl_patch.errors import AuditError
from jetrl_patch.exact.logprob import chained
from jetrl_patch.exact.support import Support
from jetrl_patch.trainer.support import KEY
from tests import fp64
from tests.openrlhf.run_openrlhf import Run, make_task
from tests.openrlhf.test_e2e import DYNAMIC, TIMEOUT, UNIFIED, assert_exact, finish


def sample_of(tokens: list[int], turns: list[tuple[int, int]]) -> dict[str, Any]:
    return {"observation_tokens": tokens, "action_ranges": turns, "mm_train_inputs": None}


#: a sample of two turns, with a token of the environment between them, and one of a single turn
TURNS = sample_of([11, 12, 3, 5, 13, 7], [(2, 4), (5, 6)])
DRAWN = [[[3, 4], [5]], [[7, 8, 9]]]
SINGLE = sample_of([11, 6], [(1, 2)])


def held(sample: dict[str, Any], drawn: Any) -> dict[str, Any]:
    found = dict(sample)
    support.add_to(found, drawn)
    return found


def test_a_sample_gets_what_the_tokens_of_its_turns_were_drawn_from() -> None:
    sizes, ids = held(TURNS, DRAWN)["mm_train_inputs"][KEY]
    assert sizes.tolist() == [0, 0, 2, 1, 0, 3] and ids.tolist() == [3, 4, 5, 7, 8, 9] and sizes.dtype == ids.dtype == "int32"
    assert held(TURNS, [[[], []], None]) == held(TURNS, []) == TURNS
    assert held(TURNS, [None, DRAWN[1]])["mm_train_inputs"][KEY][0].tolist() == [0, 0, 0, 0, 0, 3]
    with pytest.raises(AuditError, match=r"required turns of \[2, 1\] tokens, found \[2\]"):
        held(TURNS, DRAWN[:1])
    with pytest.raises(AuditError, match="found 1 of 6 tokens that are not in theirs"):
        held(TURNS, [DRAWN[0], [[8, 9]]])


def test_a_sample_with_images_keeps_them_and_a_model_gets_nothing_else() -> None:
    from openrlhf.utils.vlm_utils import merge_mm_train_inputs

    pixels = torch.randn(3, 4)
    seen = held({**SINGLE, "mm_train_inputs": {"pixel_values": pixels}}, [[[6, 2]]])["mm_train_inputs"]
    assert seen["pixel_values"] is pixels and seen[KEY][0].tolist() == [0, 2]
    unseen = held(SINGLE, [[[6, 2]]])["mm_train_inputs"]
    merge = support.merge_mm_train_inputs(merge_mm_train_inputs)
    for samples, count in (([[seen, None], [unseen, seen]], 6), ([seen, unseen, None], 3)):
        assert {name: tensor.shape for name, tensor in merge(samples, "cpu").items()} == {"pixel_values": (count, 4)}
    assert merge([[unseen], [None]], "cpu") == {}


@pytest.mark.parametrize("packed", [False, True])
def test_each_row_gets_the_support_of_the_token_that_it_predicts(packed: bool) -> None:
    """Batches are lists of lists, samples are padded on the right, and a packed batch may be padded behind its last token."""
    given = [[held(TURNS, DRAWN)["mm_train_inputs"]], [None], [held(SINGLE, [[[6, 2]]])["mm_train_inputs"]]]
    mask = torch.tensor([[1] * 6, [1] * 3 + [0] * 3, [1] * 2 + [0] * 4])
    found = support.of_rows(given, torch.zeros(3, 6).long(), mask if packed else None, 13 if packed else 18)
    assert found is not None
    first = [[], [3, 4], [5], [], [7, 8, 9], []]
    last = [[6, 2], []]
    expected = [*first, *[[]] * 3, *last, [], []] if packed else [*first, *[[]] * 6, *last, *[[]] * 4]
    assert [row.tolist() for row in found.ids.split(found.counts.tolist())] == expected


def test_a_truncated_sample_loses_the_supports_of_its_last_tokens() -> None:
    found = support.of_rows([held(TURNS, DRAWN)["mm_train_inputs"]], torch.zeros(1, 4).long(), None, 4)
    assert found is not None and found.ids.tolist() == [3, 4, 5]


def test_nothing_to_leave_out() -> None:
    ids = torch.zeros(2, 3).long()
    assert support.of_rows(None, ids, None, 6) is support.of_rows([[None], [{"pixel_values": 1}]], ids, None, 6) is None
    logits = torch.randn(6, 9)
    left_out = Support.of([[1], [], [2], [], [], []]).edit
    assert chained(None, left_out) == left_out
    edit = chained(lambda block, part: block + 1, left_out)
    assert torch.equal(edit(logits, slice(0, 6))[1], logits[1] + 1) and edit(logits, slice(0, 6))[0, 0] < -1e29


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 100)
@pytest.mark.parametrize("extra", [["--train.batch_size", "4"], [*DYNAMIC, "--rollout.temperature", "0.8"]])
def test_runs_that_leave_out_tokens_are_exact(tmp_path: Any, extra: list[str]) -> None:
    """A reference model; two updates in each step, and packed rows in dynamic batches."""
    environ = {**UNIFIED, "JETRL_AUDIT_FRACTION": "1.0", **fp64.environ(tmp_path)}
    assert_exact(finish(Run(make_task(tmp_path), "--rollout.top_p", "0.95", *extra, environ=environ, steps=3), 3))
    of_updates = fp64.seen(tmp_path)
    assert of_updates.rows > 500 and of_updates.kept < 360 and of_updates.apart < 1e-5, of_updates  # of 384
