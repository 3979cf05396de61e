"""What a response of several turns was drawn from."""

from __future__ import annotations

import pytest

from jetrl_patch.errors import AuditError
from jetrl_patch.exact.support import Support
from jetrl_patch.trainer.support import Turn, of_turns

#: two turns that draw from few tokens, one that draws from all, and one more
TURNS: list[Turn] = [([5, 6], Support.of([[5, 9], [6]])), ([7], None), ([8, 3], Support.of([[8], [3, 4]]))]


@pytest.mark.parametrize(
    ("response", "mask", "expected"),
    [
        ([5, 6, 7, 8, 3], [1, 1, 1, 1, 1], [[5, 9], [6], [], [8], [3, 4]]),
        ([5, 6, 1, 2, 7, 0, 8, 3, 1], [1, 1, 0, 0, 1, 0, 1, 1, 0], [[5, 9], [6], [], [], [], [], [8], [3, 4], []]),
        ([5, 6, 1, 7, 8], [1, 1, 0, 1, 1], [[5, 9], [6], [], [], [8]]),  # a response that was cut
        ([1, 2], [0, 0], [[], []]),
    ],
)
def test_a_response_of_several_turns(response: list[int], mask: list[int], expected: list[list[int]]) -> None:
    found = of_turns(response, mask, iter(TURNS))
    assert [row.tolist() for row in found.ids.split(found.counts.tolist())] == expected


@pytest.mark.parametrize(
    ("response", "mask"),
    [
        ([5, 9, 7], [1, 1, 1]),  # a token was changed
        ([6, 7], [1, 1]),  # one is missing
        ([5, 6, 7, 8, 3, 4], [1] * 6),  # one is not the model's
        ([5, 1, 6], [1, 0, 1]),  # a turn was taken apart
    ],
)
def test_a_response_of_other_tokens_is_an_error(response: list[int], mask: list[int]) -> None:
    with pytest.raises(AuditError, match="required those that the engine returned, in order, found other tokens"):
        of_turns(response, mask, iter(TURNS))
