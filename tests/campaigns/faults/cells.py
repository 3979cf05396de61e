"""What goes wrong, where, and the required outcome."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from jetrl_patch.sync.protocol import SCALE_SUFFIX, encode_json
from jetrl_patch.sync.send import NamedTensor

#: seconds without progress after which either side gives up
TIMEOUT = 8.0
SHORT = 2.0  # a freeze that a run must survive

#: place in the stream -> index of its message, of n messages with these names
POINTS: dict[str, Callable[[list[str]], int]] = {
    "manifest": lambda names: 0,
    "first tensor": lambda names: 1,
    "scales": lambda names: next(i for i, name in enumerate(names) if name.endswith(SCALE_SUFFIX)),
    "middle": lambda names: len(names) // 2,
    "last tensor": lambda names: len(names) - 2,
    "commit": lambda names: len(names) - 1,
}


@dataclass(frozen=True)
class Cell:
    """One fault at one point of a sync in one framework.

    Attributes:
        cause: regular expression that the error must match; None if the sync must succeed.
        fatal: whether the engine's process is gone afterwards.
        harmless: whether the transfer itself may repair the fault, and the sync succeed.
    """

    framework: str
    point: str
    fault: str
    cause: str | None
    fatal: bool = False
    harmless: bool = False

    @property
    def name(self) -> str:
        return f"{self.framework} / {self.point} / {self.fault}"


#: fault on a message -> the error, by the kind of message
_CHANGED = "changed on the way|not valid JSON|malformed|announced|computes? alike|different layers|protocol|before the commit"
_MESSAGES: dict[str, str | None] = {
    "raises": "injected",
    "lost": "missing from the sync|arrived before jetrl.manifest|before the commit",
    "repeated": "arrived twice|second manifest|after the end",
    "swapped": "arrived before jetrl.manifest|missing from the sync|after the end",
    "replaced by another version's": "changed on the way",
    "a bit flipped": _CHANGED,
    "cut short": _CHANGED,
    "slow": None,
    "trainer frozen briefly": None,
    "trainer frozen": "sent nothing|has not answered|before the commit|broke off",
}
_PROCESS: dict[str, tuple[str | None, bool]] = {
    "engine killed": ("died|dead|killed|failed", True),
    "engine frozen briefly": (None, False),
    "engine frozen": ("has not answered|did not finish", False),
}
_LOADER = {
    "raises": "no memory to load a weight",
    "drops tensors": "unwritten|not those that the trainer sent|NaN",
    "flips a bit of an FP8 weight": "not those that the trainer sent",
    "flips a bit of a BF16 weight": "not those that the trainer sent",
}


def _is_harmless(framework: str, point: str, fault: str) -> bool:
    """Whether a sync with this fault may succeed with the correct bytes."""
    if fault == "swapped":  # tensors come in any order, and verl delivers a bucket's by name
        return point in ("first tensor", "scales", "middle") or framework == "verl"
    if fault == "repeated":
        return framework == "verl"  # two of one name in a bucket are one
    return fault == "trainer frozen" and framework == "openrlhf"  # its engines wait for calls, not for the trainer


def cells(framework: str) -> Iterator[Cell]:
    """All cells of a framework, those that end its engine last."""
    for point in POINTS:
        for fault, cause in _MESSAGES.items():
            if point == "commit" and fault == "swapped":
                continue  # nothing comes after it
            if point == "manifest" and fault == "replaced by another version's":
                continue  # every version has the same manifest
            yield Cell(framework, point, fault, cause, harmless=_is_harmless(framework, point, fault))
        for fault, (cause, fatal) in _PROCESS.items():
            if not fatal:
                yield Cell(framework, point, fault, cause)
    for how, cause in _LOADER.items():
        yield Cell(framework, "engine's loader", how, cause)
    yield Cell(framework, "manifest", "another protocol", "protocol: required")
    yield Cell(framework, "digests", "raises", "injected")
    yield Cell(framework, "before the manifest", "other settings", "settings of a vLLM worker|Give every process")
    yield Cell(framework, "weights", "NaN", "holds NaN or Inf")
    if framework == "verl":
        yield Cell(framework, "buffer", "shared memory full", "No space left")
    for point in POINTS:
        cause, _ = _PROCESS["engine killed"]
        yield Cell(framework, point, "engine killed", cause, fatal=True)


def flipped(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(-1).view(torch.uint8)[changed.nbytes // 2] ^= 1
    return changed


def disturb(cell: Cell, names: list[str], other: list[NamedTensor], pid: int) -> Callable[[Iterable[NamedTensor]], Any]:
    """Return the function through which the stream of a sync passes.

    Args:
        names: of the messages of an undisturbed sync.
        other: the messages of another version.
        pid: the engine's process.
    """
    index = POINTS[cell.point](names)

    def stream(messages: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        held: NamedTensor | None = None
        for i, (name, tensor) in enumerate(messages):
            if cell.fault == "slow":
                time.sleep(0.05)
            if i != index:
                yield name, tensor
                if held is not None:
                    yield held
                    held = None
                continue
            if cell.fault == "raises":
                raise RuntimeError("injected: the trainer's stream breaks")
            if cell.fault.startswith("trainer frozen"):
                time.sleep(SHORT if "briefly" in cell.fault else TIMEOUT + 4)
            elif cell.fault == "engine killed":
                os.kill(pid, signal.SIGKILL)
            elif cell.fault.startswith("engine frozen"):
                os.kill(pid, signal.SIGSTOP)
                wake = SHORT if "briefly" in cell.fault else TIMEOUT + 6
                threading.Timer(wake, os.kill, (pid, signal.SIGCONT)).start()
            if cell.fault == "lost":
                continue
            if cell.fault == "swapped":
                held = (name, tensor.clone())
                continue
            if cell.fault == "replaced by another version's":
                tensor = other[i][1]
            elif cell.fault == "a bit flipped":
                tensor = flipped(tensor)
            elif cell.fault == "cut short":
                tensor = tensor.reshape(-1)[: tensor.numel() // 2].clone()
            elif cell.fault == "another protocol":
                text = json.loads(tensor.numpy().tobytes())
                tensor = encode_json({**text, "version": 99})
            yield name, tensor
            if cell.fault == "repeated":
                yield name, tensor

    return stream
