"""What a run learns, independent of the framework: questions, a reward, and the model that starts with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


class Question(Protocol):
    """One question and its right answer."""

    @property
    def text(self) -> str:
        """What the model is asked."""

    @property
    def answer(self) -> int | str:
        """What the reward compares with."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task and its model.

    Attributes:
        name: the name of the data set in the frameworks' metrics.
        title: what the model learns, for people.
        split: makes ``(train, held_out)``; no question is in both.
        reward: a file with the reward in verl's form, ``compute_score``, and in OpenRLHF's, ``reward_func``. Both load it by
            path, so it imports nothing of the project.
        model: the folder of the model that training starts with.
        sizes: the fields of ``Recipe`` that suit this model better than the defaults.
    """

    name: str
    title: str
    split: Callable[[], tuple[Sequence[Question], Sequence[Question]]]
    reward: Path
    model: Path
    sizes: Mapping[str, Any] = field(default_factory=dict)
