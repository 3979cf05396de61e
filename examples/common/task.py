"""What a run learns, in any framework: questions, a reward, and the initial model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


class Question(Protocol):
    """A question and its correct answer."""

    @property
    def text(self) -> str:
        """The text for the model."""

    @property
    def answer(self) -> int | str:
        """The answer for the reward."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task and its model.

    Attributes:
        name: the name of the data set in the frameworks' metrics.
        title: what the model learns, for readers.
        split: makes ``(train, held_out)``; no question is in both.
        reward: a file with verl's ``compute_score`` and OpenRLHF's ``reward_func``. Both load it by path, so it imports nothing
            from the project.
        model: the folder of the initial model.
        sizes: fields of ``Recipe`` that suit this model better than the defaults.
    """

    name: str
    title: str
    split: Callable[[], tuple[Sequence[Question], Sequence[Question]]]
    reward: Path
    model: Path
    sizes: Mapping[str, Any] = field(default_factory=dict)
