"""The five ways of docs/architecture.md, walked on a CPU: the page lists the files that they visit, in order of the first visit.

``python -m tests.test_ways`` writes the lists anew.
"""

from __future__ import annotations

import itertools
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import nn

import jetrl_patch
from jetrl_patch import session
from jetrl_patch.adapters.openrlhf import logprob, state
from jetrl_patch.config import Config
from jetrl_patch.fp8.convert import swap_linears
from jetrl_patch.sync.digest import Rect, digest
from jetrl_patch.sync.receive import Receiver
from jetrl_patch.sync.send import SyncStats
from jetrl_patch.trainer import audit
from jetrl_patch.trainer.source import Source, convert
from tests.models import build

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
EXACT = Config(precision="fp8-unified", backend="torch")
LINEAR = EXACT.replace(align="linear")


# ---- The tracer ----------------------------------------------------------------------------------

@contextmanager
def visited(apart: str = "") -> Iterator[list[str]]:
    """The project's files whose functions are called here, in order of the first call. Imports do not count.

    Nor does what is called from the folder ``apart``, if one is given.
    """
    found: dict[str, None] = {}
    known: dict[CodeType, str] = {}

    def place(code: CodeType) -> str:
        if code.co_qualname.startswith("replacement."):  # what every patch puts around its replacement
            return ""
        path = Path(code.co_filename)
        inside = path.is_relative_to(ROOT / "jetrl_patch") or path.is_relative_to(ROOT / "adapters")
        return path.relative_to(ROOT).as_posix() if inside else ""

    def left_out(frame: FrameType | None) -> bool:
        while frame is not None and frame.f_code is not walked.__code__:
            if frame.f_code.co_name == "<module>" or (apart and known.get(frame.f_code, "").startswith(apart)):
                return True
            frame = frame.f_back
        return False

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            code = frame.f_code
            if code not in known:
                known[code] = place(code)
            file = known[code]
            if file and file not in found and not left_out(frame):
                found[file] = None

    threading.setprofile(note)
    sys.setprofile(note)
    order: list[str] = []
    try:
        yield order
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        order += found


def walked(action: Callable[[], object], after: Callable[[], object] = lambda: None, apart: str = "") -> list[str]:
    """The files of an action, called once before, so that nothing is loaded or built for the first time."""
    action()
    after()
    with visited(apart) as order:
        action()
    after()
    return order


# ---- The ways ------------------------------------------------------------------------------------

def enabling() -> list[str]:
    """``enable()``. The files of the frameworks' adapters, and what they call, are left out."""
    return walked(lambda: jetrl_patch.enable(EXACT), jetrl_patch.disable, apart="adapters/")


class Engine:
    """An ``Installer`` that keeps what it gets: what vLLM's does in ``adapters/vllm/install.py``, without vLLM."""

    def __init__(self, layers: Sequence[str]) -> None:
        self.layers = layers
        self.tensors: dict[str, torch.Tensor] = {}

    def quantized_layers(self) -> Sequence[str]:
        return self.layers

    def to_bf16(self, layers: Sequence[str]) -> None:
        raise AssertionError

    def poison(self) -> None:
        for tensor in self.tensors.values():
            tensor.view(torch.uint8).fill_(255)

    def load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.tensors.update((name, tensor.clone()) for name, tensor in weights)

    def finish(self) -> None: ...

    def installed(self, plain: Mapping[str, Any]) -> Sequence[Rect]:
        return [Rect(name, 0, t.shape[0], 0, t[0].numel(), digest(t)) for name, t in self.tensors.items() if name not in plain]


def converted() -> tuple[Source, dict[str, torch.Tensor]]:
    """A model as the trainer's adapters convert it before it is sharded."""
    model = build("qwen3").bfloat16()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    return convert(model, LINEAR, shapes, rollout_tp=1, device_type="cpu"), weights


def syncing() -> Callable[[], None]:
    """A weight's way from the trainer into an engine: quantized, sent, received, compared."""
    source, weights = converted()
    receiver = Receiver(Engine(source.layers), source.terms)

    def sync() -> None:
        for item in source.stream(weights.items(), SyncStats()):
            receiver.on_bucket([item])
        receiver.finish()
        receiver.check_serving()

    return sync


class Actor:
    """What OpenRLHF's ``Actor.forward`` does around the functions that the plugin replaces."""

    packing_samples = False
    temperature = 1.0

    def __init__(self) -> None:
        self.x = torch.randn(2, 6, 64, dtype=torch.bfloat16, requires_grad=True)
        self.head = torch.randn(32, 64, dtype=torch.bfloat16)

    def forward(self, sequences: torch.Tensor, action_mask: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        from jetrl_patch.exact.ops import linear

        return score(linear(self.x, self.head), torch.roll(sequences, -1, 1))[:, :-1] * action_mask


score = logprob.log_probs_from_logits(lambda *_: None)
forward = logprob.actor_forward(Actor.forward)


def log_prob() -> object:
    """A log-prob: from the last hidden state to the comparison with the rollout's, and the step's metrics."""
    actor = Actor()
    state.WORKER.sources[actor] = None  # type: ignore[assignment, index]
    mask = torch.ones(2, 5)
    sequences = torch.arange(12).view(2, 6)
    found = forward(actor, sequences, mask, torch.ones(2, 6))
    found.sum().backward()
    compared = audit.Compared()
    compared.add(found, found.detach().clone(), mask, torch.ones(2, dtype=torch.bool))
    everything, current = compared.figures()
    audit.hold(found, found.detach().clone(), mask, torch.ones(2, dtype=torch.bool), session.active_config())
    return audit.step_metrics(everything, {}, current)


def linear() -> Callable[[], None]:
    """A linear's forward and backward."""
    model = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleDict({"q_proj": nn.Linear(256, 128, dtype=torch.bfloat16)})])
    swap_linears(model, backend="torch")

    def step() -> None:
        model.layers[0]["q_proj"](torch.randn(4, 256, dtype=torch.bfloat16, requires_grad=True)).sum().backward()

    return step


def ways() -> dict[str, Callable[[], list[str]]]:
    """Title on the page -> the files of the way."""
    return {
        "`enable()`": enabling,
        "A model is converted": lambda: walked(converted),
        "A weight": lambda: walked(syncing()),
        "A log-prob": lambda: walked(log_prob),
        "A linear": lambda: walked(linear()),
    }


# ---- The page ------------------------------------------------------------------------------------

#: an item of a list: the file, and what happens there
ITEM = re.compile(r"^\d+\. `([^`]+)`(.*(?:\n   .*)*)\n", re.M)


def section(text: str, title: str) -> str:
    """The list under a title."""
    return re.split(r"\n#", text.split(f"\n### {title}\n", 1)[1], maxsplit=1)[0]


@pytest.fixture
def patched() -> Iterator[None]:
    jetrl_patch.enable(EXACT)
    yield
    jetrl_patch.disable()


@pytest.mark.parametrize("title", [title for title in ways() if title != "`enable()`"])
def test_the_page_lists_the_files_of_a_way_in_order(title: str, patched: None) -> None:
    found = ways()[title]()
    assert [file for file, _ in ITEM.findall(section(PAGE.read_text(), title))] == found, _ADVICE


def test_the_page_lists_the_files_of_enable_in_order() -> None:
    found = enabling()
    assert [file for file, _ in ITEM.findall(section(PAGE.read_text(), "`enable()`"))] == found, _ADVICE


def test_every_item_says_what_happens_there_and_every_count_is_right() -> None:
    text = PAGE.read_text()
    for title in ways():
        items = ITEM.findall(section(text, title))
        assert items and all(len(words.strip(" :\n")) > 10 for _, words in items), title
        assert f"{len(items)} files" in section(text, title), title


@pytest.mark.parametrize(("title", "most"), [("`enable()`", 9), ("A weight", 14), ("A log-prob", 9), ("A linear", 6)])
def test_the_ways_stay_short(title: str, most: int) -> None:
    assert len(ITEM.findall(section(PAGE.read_text(), title))) <= most


def test_a_weight_never_returns_to_a_folder() -> None:
    files = [file for file, _ in ITEM.findall(section(PAGE.read_text(), "A weight"))]
    folders = [folder for folder, _ in itertools.groupby(file.rpartition("/")[0] for file in files)]
    assert len(folders) == len(set(folders)), folders


_ADVICE = "the page is wrong: run `python -m tests.test_ways`, which writes the lists, and describe the new files"


def written(text: str, title: str, files: Sequence[str]) -> str:
    """The page with these files under a title. A file keeps its description."""
    old = section(text, title)
    known = dict(ITEM.findall(old))
    first = next(ITEM.finditer(old)).start()
    last = max(found.end() for found in ITEM.finditer(old))
    items = "".join(f"{i}. `{file}`{known.get(file, ':')}\n" for i, file in enumerate(files, 1))
    head = re.sub(r"\d+ files", f"{len(files)} files", old[:first])
    return text.replace(old, head + items + old[last:])


if __name__ == "__main__":
    page = PAGE.read_text()
    for name, way in ways().items():
        if name != "`enable()`":
            jetrl_patch.enable(EXACT)
        page = written(page, name, way())
    PAGE.write_text(page)
