"""A replay buffer for steps of seconds, which verl's ``trainer.v1.sampler.custom_sampler`` loads."""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class PromptSampler(ReplayBuffer):  # type: ignore[misc]
    """verl's own replay buffer. It looks for finished answers every 20 ms; verl's default is 2 s, as long as a step here."""

    def __init__(self, **options: Any) -> None:
        super().__init__(poll_interval=0.02, **options)
