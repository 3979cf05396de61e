"""The receiver under any order of messages: what it serves is always one whole version."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jetrl_patch.errors import JetrlError, SyncError
from jetrl_patch.sync.receive import Receiver, State
from jetrl_patch.sync.send import SyncStats, quantized_stream
from tests.sync.fake_engine import LAYERS, SHAPES, TERMS, Engine, weights

VERSIONS = 3


@functools.cache
def messages(version: int) -> tuple[tuple[str, torch.Tensor], ...]:
    """The messages of one sync: a manifest, five tensors, a commit."""
    stream = quantized_stream(iter(weights(version).items()), terms=TERMS, layers=LAYERS, shapes=SHAPES, stats=SyncStats())
    return tuple((name, tensor.clone()) for name, tensor in stream)


@functools.cache
def memory(version: int) -> dict[str, bytes]:
    """The engine's memory after an undisturbed sync."""
    engine = Engine()
    receiver = Receiver(engine, TERMS)
    receiver.on_bucket(messages(version))
    receiver.finish()
    return held(engine)


def held(engine: Engine) -> dict[str, bytes]:
    return {name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in engine.tensors.items()}


def flipped(tensor: torch.Tensor, bit: int) -> torch.Tensor:
    changed = tensor.clone()
    flat = changed.view(-1).view(torch.uint8)
    if len(flat):
        flat[bit // 8 % len(flat)] ^= 1 << bit % 8
    return changed


#: a fault: its kind, its message, and a second number that it reads
FAULTS = st.tuples(st.sampled_from(("lose", "swap", "repeat", "mix", "flip", "cut")), st.integers(0, 6), st.integers(0, 2**20))


def disturbed(version: int, faults: list[tuple[str, int, int]]) -> list[tuple[str, torch.Tensor]]:
    """The messages of a sync after the faults."""
    stream = list(messages(version))
    for fault, place, number in faults:
        if not stream:
            break
        i = place % len(stream)
        name, tensor = stream[i]
        if fault == "lose":
            del stream[i]
        elif fault == "swap":
            j = number % len(stream)
            stream[i], stream[j] = stream[j], stream[i]
        elif fault == "repeat":
            stream.insert(number % len(stream), stream[i])
        elif fault == "mix":  # the message at this place in another version's sync
            stream[i] = messages(number % VERSIONS)[place]
        elif fault == "flip":
            stream[i] = (name, flipped(tensor, number))
        else:
            stream[i] = (name, tensor.reshape(-1)[: number % (tensor.numel() + 1)])
    return stream


class Syncs(RuleBasedStateMachine):
    """A sender whose messages are disturbed, and an engine that may lose what it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine()
        self.receiver = Receiver(self.engine, TERMS)
        self.served: dict[str, bytes] = {}

    @rule(version=st.integers(0, VERSIONS - 1), faults=st.lists(FAULTS, max_size=2), bucket=st.integers(1, 8))
    def messages_arrive(self, version: int, faults: list[tuple[str, int, int]], bucket: int) -> None:
        stream = disturbed(version, faults)
        for first in range(0, len(stream), bucket):
            self.receiver.on_bucket(stream[first : first + bucket])

    @precondition(lambda self: self.receiver.state is State.RECEIVING and self.engine.tensors)
    @rule(which=st.integers(0, 6), bit=st.integers(0, 2**20))
    def the_loader_breaks_a_quantized_weight(self, which: int, bit: int) -> None:
        names = [layer + ".weight" for layer in LAYERS if layer + ".weight" in self.engine.tensors]
        if names:
            name = names[which % len(names)]
            self.engine.tensors[name] = flipped(self.engine.tensors[name], bit)

    @rule()
    def the_transfer_breaks(self) -> None:
        self.receiver.break_off("the transfer broke")

    @rule()
    def the_sync_ends(self) -> None:
        try:
            self.receiver.finish()
        except JetrlError:
            assert self.receiver.state is State.FAILED
        else:
            self.served = held(self.engine)
            assert self.served in [memory(version) for version in range(VERSIONS)]

    @rule(version=st.integers(0, VERSIONS - 1))
    def an_undisturbed_sync_heals(self, version: int) -> None:
        self.the_transfer_breaks()
        self.the_sync_ends()
        self.messages_arrive(version, [], 3)
        self.the_sync_ends()
        assert self.served == memory(version) and self.receiver.state is State.SERVING

    @invariant()
    def only_a_whole_version_is_served(self) -> None:
        if self.receiver.state is State.SERVING:
            self.receiver.check_serving()
            assert held(self.engine) == self.served
        else:
            with pytest.raises(SyncError):
                self.receiver.check_serving()


Syncs.TestCase.settings = settings(max_examples=200, stateful_step_count=20, deadline=None)
TestSyncs: Any = Syncs.TestCase
