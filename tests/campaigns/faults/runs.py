"""Faults in whole runs of verl and OpenRLHF: where they are injected, the required outcome, and the five questions.

Each cell is a run of three steps with a checkpoint after each, over samples that are the same in every run. A run that ends is
resumed, and must reach the end of an undisturbed one. Where it left the same files, byte for byte, as another that has been
resumed, that one's answer counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.campaigns.faults.hook import HOOK
from tests.campaigns.faults.judge import QUESTIONS, Verdict
from tests.process_run import ProcessRun
from tests.seeded_runs import SeededRuns

STEPS = 3
#: seconds of a whole run, and from the stroke to the end of a run that it ends
WHOLE, BOUND = 1200.0, 180.0
#: seconds in which the processes of an ended run must exit
GONE = 60.0

#: points that every process of either framework passes
_STARTS = {
    "enable() in the driver": ("jetrl_patch.session", "enable", 1),
    "enable() in a worker": ("jetrl_patch.adapters.ray.worker", "start", 1),
    "check of the nodes": ("jetrl_patch.adapters.ray.nodes", "require_nodes", 1),
}
_ENGINE = ("vllm.v1.engine.core", "EngineCore.__init__", 1)
_DECODING = ("vllm.v1.engine.core", "EngineCore.step", 25)
_RECEIVER = ("jetrl_patch.sync.receive", "Receiver.on_bucket", 3)
_VERL = "verl.workers.engine_workers"
_OPENRLHF, _DEEPSPEED = "openrlhf.trainer.ray.ppo_actor", "openrlhf.utils.deepspeed.deepspeed"
#: framework -> point -> module, function, the call that is struck
POINTS: dict[str, dict[str, tuple[str, str, int]]] = {
    "verl": {
        "start of the trainer": (_VERL, "ActorRolloutRefWorker.init_model", 1),
        "start of the engine": _ENGINE,
        "rollout, engine": _DECODING,
        "rollout, agent loop": ("verl.experimental.agent_loop.agent_loop", "AgentLoopWorker._run_agent_loop", 20),
        "driver": ("verl.trainer.ppo.ray_trainer", "compute_advantage", 2),
        "training step": (_VERL, "ActorRolloutRefWorker.update_actor", 2),
        "optimizer step": ("verl.workers.engine.fsdp.transformer_impl", "FSDPEngine.optimizer_step", 2),
        "weight sync, trainer": (_VERL, "ActorRolloutRefWorker.update_weights", 3),
        "weight sync, engine": _RECEIVER,
        "checkpoint": (_VERL, "ActorRolloutRefWorker.save_checkpoint", 2),
        **_STARTS,
    },
    "openrlhf": {
        "start of the trainer": (_DEEPSPEED, "DeepspeedStrategy.prepare", 1),
        "start of the engine": _ENGINE,
        "rollout, engine": _DECODING,
        "driver": ("openrlhf.trainer.ppo_utils.experience_maker", "RemoteExperienceMaker.make_experience", 2),
        "training step": (_OPENRLHF, "ActorPPOTrainer.training_step", 3),
        "weight sync, trainer": ("jetrl_patch.adapters.openrlhf.sync", "send", 2),
        "weight sync, engine": _RECEIVER,
        "checkpoint": (_DEEPSPEED, "DeepspeedStrategy.save_ckpt", 2),
        **_STARTS,
    },
}
_DEAD = r"died|dead|killed|SIGKILL|crashed|was lost|unexpected|exited|terminated"
#: fault -> the cause in the log; None if the run must continue undisturbed
FAULTS: dict[str, str | None] = {
    "raises": "injected by the test",
    "SIGINT": "KeyboardInterrupt|SIGINT",
    "SIGTERM": "SIGTERM|Terminated|SystemExit",
    "killed": _DEAD,
    "frozen briefly": None,
    "out of memory": rf"MemoryError|[Cc]annot allocate|bad_alloc|out of memory|{_DEAD}",
    "node lost": _DEAD,
    "clock jumps": None,
    "full disk": r"No space left|errno 28|\[enforce fail at inline_container|PytorchStreamWriter",
}
#: faults for which the start of a process is no point of its own
_LATER = ("frozen briefly", "out of memory")
_WORKING = ("rollout, engine", "training step")
#: fault -> its points; other faults are injected at all points
ONLY_AT = {
    "SIGINT": _WORKING, "SIGTERM": _WORKING,  # the driver gets the signal while the others work
    "node lost": _WORKING, "clock jumps": (*_WORKING, "weight sync, trainer"), "full disk": ("checkpoint",),
}  # fmt: skip
DISK = 512 * 2**20


@dataclass(frozen=True)
class RunCell:
    """One fault at one point of a run."""

    framework: str
    point: str
    fault: str

    @property
    def name(self) -> str:
        return f"run of {self.framework} / {self.point} / {self.fault}"

    def spec(self, mark: Path) -> str:
        return "|".join((*map(str, POINTS[self.framework][self.point]), self.fault, str(mark)))


def run_cells(framework: str) -> Iterator[RunCell]:
    for fault in FAULTS:
        for point in ONLY_AT.get(fault, POINTS[framework]):
            if not (fault in _LATER and point in _STARTS):
                yield RunCell(framework, point, fault)


class Setting(SeededRuns):
    """A framework's task, and the checkpoints of a run that nothing disturbs."""

    def __init__(self, framework: str, folder: Path) -> None:
        super().__init__(framework, folder, STEPS, save_every=1, hook=HOOK)
        out = folder / "undisturbed"
        run = self.run(out)
        assert run.wait(WHOLE) == 0, run.failure
        self.expected = {step: self.checkpoint(out, step) for step in range(1, STEPS + 1)}
        assert all(self.expected.values())
        #: digest of a run's files -> whether it could resume from them; without files it can
        self.goes_on = {left_on_disk(folder / "none"): (True, "")}

    def run(self, out: Path, *extra: str, **environ: str) -> Any:
        return super().run(out, *extra, JETRL_SYNC_TIMEOUT="30", **environ)

    def resumed(self, out: Path) -> tuple[bool, str]:
        """Whether the run in ``out`` goes on and reaches the undisturbed end. From the same files that is tried once."""
        left, done = left_on_disk(out), self.completed(out)
        if done == STEPS:  # the fault came too late: verl would run one step more than requested
            return self.same(out, STEPS), "its last checkpoint differs"
        if left not in self.goes_on:
            again = self.run(out)
            good = again.wait(WHOLE) == 0 and self.completed(out) == STEPS and self.same(out, STEPS)
            self.goes_on[left] = good, f"resumed after step {done}: {again.text[-300:]!r}"
        return self.goes_on[left]

    def same(self, out: Path, step: int) -> bool:
        found = self.checkpoint(out, step)
        return len(found) == len(self.expected[step]) and all(map(torch.equal, found, self.expected[step]))


def judge(setting: Setting, cell: RunCell) -> Verdict:
    verdict, out = Verdict(), setting.folder / re.sub(r"\W+", "-", cell.name)
    mark, before = out / "struck", shared_memory()
    out.mkdir()
    with small_disk(out) if cell.fault == "full disk" else contextlib.nullcontext():
        answer(verdict, setting, cell, out, mark, before)
    return verdict


def answer(verdict: Verdict, setting: Setting, cell: RunCell, out: Path, mark: Path, before: set[str]) -> None:
    """Run the cell, and answer the five questions."""
    run = setting.run(out, FAULT_AT=cell.spec(mark))
    Path(f"{mark}.driver").write_text(str(run.process.pid))
    code = ended(run, mark)
    text, goes_on = run.text, FAULTS[cell.fault] is None
    if not mark.exists():
        verdict.answer(QUESTIONS[0], False, "the fault never struck")
        run.stop()
        return
    verdict.seconds = time.time() - float(mark.read_text().split()[1])
    verdict.answer(QUESTIONS[0], code is not None, f"still there after {verdict.seconds:.0f} s")
    left = wait_until_gone(str(out))
    run.stop()
    verdict.answer(QUESTIONS[4], not left, f"processes {left}")
    leaks = shared_memory() - before
    verdict.answer(QUESTIONS[4], not leaks, ", ".join(sorted(leaks)))
    verdict.error = cause(text.replace(out.name, ""), FAULTS[cell.fault])  # whose name says what the fault is
    if code == -signal.SIGKILL and int(mark.read_text().split()[0]) == run.process.pid:
        verdict.error = "the run's own process was killed, which leaves its exit status"
    good = code == 0 if goes_on else code not in (0, None) and bool(verdict.error)
    verdict.answer(QUESTIONS[1], good, f"exit status {code}: {text[-300:]!r}")
    steps = [step["jetrl/bit_equal_fraction"] for step in run.metrics()]
    verdict.answer(QUESTIONS[2], all(share == 1.0 for share in steps), f"bit-equal {steps}")
    done = setting.completed(out)
    whole = (done == STEPS or not goes_on) and all(setting.same(out, step) for step in range(1, done + 1))
    verdict.answer(QUESTIONS[2], whole, f"checkpoints up to step {done} differ from those of an undisturbed run")
    if goes_on:
        verdict.answer(QUESTIONS[3], whole, "it did not go on")
    else:
        Path(f"{mark}.fill").unlink(missing_ok=True)
        verdict.answer(QUESTIONS[3], *setting.resumed(out))


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[None]:
    """Mount a disk of DISK bytes there, which needs root."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def left_on_disk(out: Path) -> str:
    """A digest of every file that a run left, with its name."""
    files = sorted(file for file in out.rglob("*") if file.is_file() and not file.name.startswith("struck"))
    found = hashlib.sha256()
    for file in files:
        found.update(f"{file.relative_to(out)}\0{file.stat().st_size}\0".encode())
        found.update(file.read_bytes())
    return found.hexdigest()


def ended(run: ProcessRun, mark: Path) -> int | None:
    """The exit status of a run that ends within BOUND of the fault; None if it does not end."""
    end = time.monotonic() + WHOLE
    while (code := run.process.poll()) is None and time.monotonic() < end:
        if mark.exists() and time.time() - mark.stat().st_mtime > BOUND:
            return None
        time.sleep(0.5)
    return code


def cause(text: str, pattern: str | None) -> str:
    """The last line of a log that names the cause."""
    if pattern is None:
        return ""
    plain = re.sub(r"(?:\x1b\[\d+m|\(\w+ pid=\d+\))+ ?", "", text)  # without Ray's colours and prefixes
    said = (line for line in plain.splitlines() if "[state-dump]" not in line)  # which Ray's raylet writes when it ends
    lines = [line for line in said if re.search(pattern, line)]
    named = [line for line in lines if re.search(r"\w(Error|Exception|Interrupt)\b", line)]
    return (named or lines or [""])[-1].strip()


def wait_until_gone(mark: str) -> list[str]:
    """Wait for the processes whose environment names the run. Returns those that stay."""
    end = time.monotonic() + GONE
    while (found := processes(mark)) and time.monotonic() < end:
        time.sleep(0.5)
    return found


def processes(mark: str) -> list[str]:
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (place / "environ").read_bytes():
                found.append((place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:60])
        except OSError:  # ended meanwhile, or another user's
            continue
    return [name for name in found if name]


def shared_memory() -> set[str]:
    """Files of shared memory that no process has mapped."""
    found = set(os.listdir("/dev/shm"))
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            found -= set(re.findall(r"/dev/shm/(\S+)", maps.read_text()))
    return found
