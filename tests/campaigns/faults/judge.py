"""One cell: inject the fault, then ask the five questions."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import ray
import torch

from jetrl_patch.errors import JetrlError
from jetrl_patch.sync.digest import digest
from tests.campaigns.faults.cells import TIMEOUT, Cell, disturb
from tests.campaigns.faults.roads import ROADS, Trainer
from tests.campaigns.faults.rollout import start

QUESTIONS = ("ended in time", "one error that names the cause", "whole weights, or none", "works again", "nothing left behind")
#: seconds that a machine may need beyond the timeout, to answer and to clean up
SLACK = 20.0


@dataclass
class Verdict:
    """Answers to ``QUESTIONS``, with the reason for each no.

    Attributes:
        seconds: from the start of the sync to its end.
        error: what the user sees.
    """

    seconds: float = 0.0
    error: str = ""
    answers: dict[str, bool] = field(default_factory=dict)
    why: list[str] = field(default_factory=list)

    def answer(self, question: str, good: bool, why: str) -> None:
        self.answers[question] = self.answers.get(question, True) and good
        if not good:
            self.why.append(f"{question}: {why}")

    @property
    def good(self) -> bool:
        return all(self.answers.get(question, False) for question in QUESTIONS)


def left_behind() -> set[str]:
    """Shared memory and sockets of weight transfers on this machine."""
    shared = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if name.startswith("verl_weights_")}
    return shared | {str(path) for path in Path(tempfile.gettempdir()).glob("rl-colocate-zmq-*.sock")}


def settled(read: Callable[[], int], most: int) -> int:
    """Read a number until it is at most ``most`` or ``SLACK`` is over, because ZeroMQ closes its files in a thread."""
    end = time.monotonic() + SLACK
    while (found := read()) > most and time.monotonic() < end:
        time.sleep(0.1)
    return found


class Stage:
    """A trainer and an engine of one framework, and their weights after an undisturbed sync."""

    def __init__(self, framework: str, model: str, config: Any, environ: dict[str, str]) -> None:
        self.framework, self.model, self.environ = framework, model, environ
        self.trainer = Trainer(model, config)
        self.start()
        self.memory: list[dict[str, int]] = []
        self.answers: list[Any] = []
        for version in (0, 1):
            self.trainer.take(version)
            self.road.sync()
            sent = dict(self.trainer.messages(version))
            held = ray.get(self.rollout.quantized.remote())
            assert held and all(value == digest(sent[name]) for name, value in held.items()), "the undisturbed sync is wrong"
            self.memory.append(ray.get(self.rollout.memory.remote()))
            self.answers.append(ray.get(self.rollout.generate.remote()))
        assert self.memory[0] != self.memory[1] and self.answers[0] != self.answers[1]
        self.served = 1

    def start(self) -> None:
        """Start the engine's process and the transport to it."""
        self.rollout = start(self.framework, self.model, self.environ)
        self.pid = ray.get(self.rollout.pid.remote())
        self.road = ROADS[self.framework](self.rollout, self.trainer)

    def judge(self, cell: Cell) -> Verdict:
        verdict, version = Verdict(), 1 - self.served
        names, other = [name for name, _ in self.trainer.messages(version)], self.trainer.messages(self.served)
        self.trainer.take(version)
        before, files = left_behind(), len(os.listdir("/proc/self/fd"))
        begin = time.monotonic()
        try:
            with self._injected(cell, names, other):
                self.road.sync()
        except JetrlError as error:
            verdict.error = str(error)
        except Exception as error:  # the trainer's own
            verdict.error = f"{type(error).__name__}: {error}"
        verdict.seconds = time.monotonic() - begin
        verdict.answer(QUESTIONS[0], verdict.seconds < TIMEOUT + SLACK, f"{verdict.seconds:.0f} s")
        self._check_error(cell, verdict)
        if not cell.fatal:
            self._check_weights(cell, verdict, version)
        self._check_recovery(cell, verdict)
        leaks = left_behind() - before
        verdict.answer(QUESTIONS[4], not leaks, ", ".join(sorted(leaks)))
        more = settled(lambda: len(os.listdir("/proc/self/fd")) - files, 2)
        verdict.answer(QUESTIONS[4], cell.fatal or more <= 2, f"{more} more open files in the trainer")
        return verdict

    @contextmanager
    def _injected(self, cell: Cell, names: list[str], other: Any) -> Iterator[None]:
        if cell.point == "engine's loader":
            ray.get(self.rollout.break_loader.remote(cell.fault, 1))
            try:
                yield
            finally:
                ray.get(self.rollout.mend_loader.remote())
        elif cell.point == "digests":
            with mock.patch("jetrl_patch.sync.send.read", side_effect=RuntimeError("injected: a digest fails")):
                yield
        elif cell.point == "buffer":
            full = OSError(28, "No space left on device")
            with mock.patch("multiprocessing.shared_memory.SharedMemory", side_effect=full):
                yield
        elif cell.point == "before the manifest":
            config = self.trainer.config.replace(scale_format="fp32")
            active = mock.patch("jetrl_patch.session.active_config", return_value=config)
            with active, mock.patch.object(self.trainer, "config", config):
                yield
        elif cell.point == "weights":
            with torch.no_grad():
                next(p for name, p in self.trainer.model.named_parameters() if "down_proj" in name)[3, 5] = float("nan")
            yield
        else:
            self.trainer.disturb = disturb(cell, names, other, self.pid)
            try:
                yield
            finally:
                self.trainer.disturb = iter

    def _check_error(self, cell: Cell, verdict: Verdict) -> None:
        if not verdict.error:
            verdict.answer(QUESTIONS[1], cell.cause is None or cell.harmless, f"no error, required {cell.cause!r}")
        elif cell.cause is None:
            verdict.answer(QUESTIONS[1], False, f"the sync should have succeeded: {verdict.error}")
        else:
            named = re.search(cell.cause, verdict.error) is not None and "\n" not in verdict.error
            verdict.answer(QUESTIONS[1], named, f"required {cell.cause!r}, found {verdict.error!r}")

    def _check_weights(self, cell: Cell, verdict: Verdict, version: int) -> None:
        """A finished sync serves its version. A failed one serves nothing, or the old version if refused before it began."""
        wanted = self.served if verdict.error else version
        try:
            answer = ray.get(self.rollout.generate.remote(), timeout=TIMEOUT + SLACK)
        except Exception as error:
            refused = bool(verdict.error) and "does not generate" in str(error)
            verdict.answer(QUESTIONS[2], refused, f"generate: {type(error).__name__}: {error}")
            return
        whole = ray.get(self.rollout.memory.remote()) == self.memory[wanted] and answer == self.answers[wanted]
        verdict.answer(QUESTIONS[2], whole, f"the engine serves something that is not version {wanted}")

    def _check_recovery(self, cell: Cell, verdict: Verdict) -> None:
        """The next sync, into the same engine or a new one, installs a whole version."""
        if cell.fatal:
            verdict.answer(QUESTIONS[2], True, "")
            ray.kill(self.rollout)
            self.start()
        self.served = 1 - self.served
        self.trainer.take(self.served)
        try:
            self.road.sync()
        except Exception as error:
            verdict.answer(QUESTIONS[3], False, f"the next sync: {type(error).__name__}: {error}")
            ray.kill(self.rollout)
            self.start()
            self.road.sync()
            return
        whole = ray.get(self.rollout.memory.remote()) == self.memory[self.served]
        same = ray.get(self.rollout.generate.remote()) == self.answers[self.served]
        verdict.answer(QUESTIONS[3], whole and same, "the next sync left other weights")
