"""The FP32 sums of an engine's ranks: in one shot where vLLM's kernel adds in rank order, large ones by slices, else gathered."""

from __future__ import annotations

import importlib.util
import inspect
import logging
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

from jetrl_patch.adapters.vllm import ranks as original

from .all_reduce_double import AllReduceDouble, Threads

CPU = torch.device("cpu")


def module_of(threads: Threads) -> ModuleType:
    """The module as a process of its own has it, in the group of the thread that calls it."""
    spec = importlib.util.spec_from_file_location("ranks_of_a_process", original.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: Any = module
    made.get_tp_group, made.gathered = threads.group, threads.exchange
    made.tensor_model_parallel_all_gather = lambda x, dim: torch.cat(threads.exchange(x), dim)
    made.current_platform = SimpleNamespace(is_cuda=lambda: True, device_type="cuda")
    return module


class Engine:
    """Ranks that have chosen their sum, and what they said."""

    def __init__(self, ranks: int, odd: dict[int, dict[str, Any]] | None = None, **settings: Any) -> None:
        self.threads = Threads(ranks, **settings)
        for rank, changes in (odd or {}).items():
            self.threads.doubles[rank].__dict__.update(changes)
        self.modules: list[Any] = [module_of(self.threads) for _ in range(ranks)]
        self.said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self.said.append(record.getMessage())  # type: ignore[method-assign]
        before = original.logger.level
        original.logger.addHandler(handler)
        original.logger.setLevel(logging.INFO)
        try:
            self.threads.run(lambda rank: self.modules[rank].choose_sum(CPU))
        finally:
            original.logger.removeHandler(handler)
            original.logger.setLevel(before)
        self.tried = [len(double.kernels) for double in self.threads.doubles]
        for double in self.threads.doubles:
            double.kernels.clear()

    @property
    def one_shot(self) -> bool:
        """The same on all ranks."""
        (found,) = {module._proven is not None for module in self.modules}
        return found

    def add(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        return self.threads.run(lambda rank: self.modules[rank].sum_over_ranks(parts[rank]))

    def launched(self) -> list[int]:
        """The stages of each kernel, the same on all ranks."""
        (found,) = {tuple(double.kernels) for double in self.threads.doubles}
        return list(found)


def parts_of(ranks: int, *shape: int) -> list[torch.Tensor]:
    values = torch.tensor((1.0, 2.0**-24, 2.0**24, -(2.0**24), -1.0))
    return [values[torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(rank))] for rank in range(ranks)]


def in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(torch.bfloat16)


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
def test_small_sums_are_added_in_one_shot_and_others_gathered(ranks: int) -> None:
    engine = Engine(ranks)
    assert engine.one_shot and min(engine.tried) == max(engine.tried) == 4 * 3
    assert all("are added in one shot" in line for line in engine.said) and len(engine.said) == ranks
    most = {2: 8 << 20, 4: 512 << 10, 6: 256 << 10, 8: 256 << 10}[ranks] // 4  # values of FP32
    for shape, taken in (((3, 20), True), ((1, most - 4), True), ((1, most), False), ((3, 21), False), ((0, 20), False)):
        parts = parts_of(ranks, *shape)
        expected = in_order(parts)
        assert ranks == 2 or not shape[0] or not torch.equal(expected, in_order(parts[1:] + parts[:1]))
        for found in engine.add(parts):
            assert found.dtype == torch.bfloat16 and torch.equal(found, expected)
        assert engine.launched() == [1] * taken, shape
        for double in engine.threads.doubles:
            double.kernels.clear()


def test_a_sum_whose_rows_are_apart_is_gathered() -> None:
    engine = Engine(2)
    parts = [part[:, ::2] for part in parts_of(2, 3, 40)]
    assert all(torch.equal(found, in_order(parts)) for found in engine.add(parts)) and engine.launched() == []


def gloo(store: dist.Store, rank: int, ranks: int) -> dist.ProcessGroup:
    """A group of this thread, outside of torch's default group."""
    group = dist.ProcessGroup(store, rank, ranks)
    backend = dist.ProcessGroupGloo(dist.PrefixStore("sums", store), rank, ranks, timedelta(seconds=60))
    group._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, backend)
    return group


@pytest.mark.parametrize("ranks", [2, 4])
def test_large_sums_are_added_by_slices(ranks: int) -> None:
    """Each rank receives a slice of all parts and adds it: the bits of adding all parts, in fewer bytes."""
    threads, store = Threads(ranks), dist.HashStore()
    modules: Any = [module_of(threads) for _ in range(ranks)]
    saved = 4 * (ranks - 1) - 6 * (ranks - 1) / ranks  # bytes for each element: of all other parts; of slices, and of their sums
    cases = [
        ((25, 16), True),
        ((5, 80), True),  # slices that end within a row
        ((24, 16), False),  # too small
        ((27, 17), False),  # as many slices of one size do not exist
        ((400, 2 * ranks), True),
    ]
    moved: list[list[int]] = [[] for _ in range(ranks)]

    def add(rank: int) -> list[torch.Tensor]:
        module, plain = modules[rank], modules[rank].tensor_model_parallel_all_gather
        threads.group().device_group = gloo(store, rank, ranks)
        module.SAVED = 400 * saved

        def all_gather(mine: torch.Tensor, dim: int) -> torch.Tensor:
            moved[rank].append(mine.nbytes)
            return plain(mine, dim)

        module.tensor_model_parallel_all_gather = all_gather
        return [module.sum_over_ranks(parts_of(ranks, *shape)[rank][:, :: step_of(shape)]) for shape, _ in cases]

    def step_of(shape: tuple[int, int]) -> int:
        return 2 if shape[0] == 400 else 1  # rows that are apart

    for rank, sums in enumerate(threads.run(add)):
        for (shape, by_slices), found, sent in zip(cases, sums, moved[rank], strict=True):
            expected = in_order([part[:, :: step_of(shape)] for part in parts_of(ranks, *shape)])
            assert found.dtype == torch.bfloat16 and torch.equal(found, expected)
            assert sent == (2 * expected.numel() // ranks if by_slices else 4 * expected.numel()), shape


@pytest.mark.parametrize(
    ("ranks", "odd", "settings", "says"),
    [
        (2, {}, {"disabled": True}, "vLLM's custom all-reduce is off (rank 0)"),
        (4, {3: {"disabled": True}}, {}, "vLLM's custom all-reduce is off (rank 3)"),
        (4, {}, {"fully_connected": False}, "serves more than two GPUs only if NVLink connects them all (rank 0)"),
        (2, {}, {"mnnvl_only": True}, "the ranks are on several nodes (rank 0)"),
        (3, {}, {}, "vLLM's custom all-reduce has no kernel for 3 ranks (rank 0)"),
        (2, {1: {"flips": True}}, {}, "4 values of one magnitude (results that differ: 1) (rank 1)"),
        (2, {1: {"max_size": 1024}}, {}, "the buffers of the ranks have [8388608, 1024] bytes (rank 0)"),
    ],
)
def test_one_rank_that_cannot_makes_all_gather(ranks: int, odd: Any, settings: dict[str, Any], says: str) -> None:
    engine = Engine(ranks, odd, **settings)
    assert not engine.one_shot and len(engine.said) == ranks
    words = f"the FP32 sums of {ranks} ranks are not added in one shot: "
    assert all(words in line and says in line for line in engine.said)
    parts = parts_of(ranks, 3, 20)
    assert all(torch.equal(found, in_order(parts)) for found in engine.add(parts)) and engine.launched() == []


def test_no_communicator_and_other_devices() -> None:
    threads = Threads(2)
    for rank in range(2):
        threads.groups[rank].device_communicator.ca_comm = None
    modules: Any = [module_of(threads) for _ in range(2)]
    threads.run(lambda rank: modules[rank].choose_sum(CPU))
    assert [module._proven for module in modules] == [None, None]
    comm = threads.doubles[0]
    assert modules[0]._unfit(None, 2) == "vLLM's custom all-reduce is off" and modules[0]._unfit(comm, 2) == ""
    modules[0].current_platform = SimpleNamespace(is_cuda=lambda: False, device_type="rocm")
    assert modules[0]._unfit(comm, 2) == "the device is rocm, not CUDA"


def test_an_algorithm_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(original.ALGORITHM, "oneshot")
    assert Engine(4).one_shot
    monkeypatch.setenv(original.ALGORITHM, "2stage")
    assert not (engine := Engine(4)).one_shot and "VLLM_CUSTOM_ALLREDUCE_ALGO=2stage" in engine.said[0]


@pytest.mark.parametrize("ranks", [4, 8])
def test_the_trial_sees_another_order(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's other kernel, for all sums or only for the largest that are taken."""
    monkeypatch.setattr(original, "_unfit", lambda *_: "")
    plain = AllReduceDouble._sum
    for first in (1, ranks - 1):
        monkeypatch.setattr(AllReduceDouble, "_sum", staticmethod(lambda parts, _, at, f=first: plain(parts, f, at)))
        assert not (engine := Engine(ranks)).one_shot and "results that differ" in engine.said[0]
    monkeypatch.undo()

    def late(parts: Any, first: int, at: slice) -> torch.Tensor:
        return plain(parts, 1 if parts[0].numel() > 5 * 1024 else first, at)

    monkeypatch.setattr(AllReduceDouble, "_sum", staticmethod(late))
    assert not Engine(ranks).one_shot


def test_the_trial_sees_flushed_subnormals(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = AllReduceDouble._sum

    def flushed(*args: Any) -> torch.Tensor:
        total = plain(*args)
        return torch.where(total.abs() < 2.0**-126, torch.zeros_like(total), total)

    monkeypatch.setattr(AllReduceDouble, "_sum", staticmethod(flushed))
    assert not (engine := Engine(2)).one_shot and "subnormal values (" in engine.said[0]


def test_the_parts_of_the_trial() -> None:
    for rank in range(8):
        for what, part in original._parts(1000, rank):
            assert part.dtype == torch.float32 and part.isfinite().all(), what
    kinds = [dict(original._parts(40_000, rank)) for rank in range(4)]
    exponents = torch.frexp(kinds[0]["values with any exponent"])[1]
    assert exponents.min() < -120 and exponents.max() == 128 and (kinds[0]["subnormal values"].abs() < 2.0**-126).all()
    for what in ("values of one magnitude", "values that cancel"):
        parts = [kind[what] for kind in kinds]
        assert not torch.equal(in_order(parts), in_order(parts[1:] + parts[:1])), what


def test_the_communicator_of_another_engine_is_not_used() -> None:
    engine = Engine(2)
    for group in engine.threads.groups:
        group.device_communicator.ca_comm = AllReduceDouble(engine.threads.exchange, 0, 2)
    parts = parts_of(2, 3, 20)
    assert all(torch.equal(found, in_order(parts)) for found in engine.add(parts)) and engine.launched() == []


def test_a_captured_launch_reads_the_part_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own ``custom_all_reduce``: inside of a capture no copy, in its warm-up no launch."""
    seen: list[bool] = []

    def all_reduce(self: Any, inp: torch.Tensor, *, out: Any = None, registered: bool = False) -> torch.Tensor:
        seen.append(registered)
        return inp + 1

    monkeypatch.setattr(AllReduceDouble, "all_reduce", all_reduce)
    comm, part = AllReduceDouble(lambda x: [x, x], 0, 2), torch.zeros(3, 4)
    for capturing, recording, expected in ((False, False, [False]), (True, True, [True]), (True, False, [])):
        comm._IS_CAPTURING = capturing
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda r=recording: r)
        assert original._one_shot(comm, part).shape == (3, 4)
        assert seen == expected
        seen.clear()


def test_what_vllm_decides_in_python() -> None:
    """The installed class: which ranks it serves, which sums it takes, and how it is called. The kernels' limits are in C++."""
    assert set(original.ONE_STAGE) <= set(CustomAllreduce._SUPPORTED_WORLD_SIZES)
    assert list(inspect.signature(CustomAllreduce.custom_all_reduce).parameters) == ["self", "input"]
    assert inspect.signature(CustomAllreduce.__init__).parameters["max_size"].default == 8192 * 1024
    for name in ("disabled", "max_size", "fully_connected", "world_size", "rank"):
        assert f"self.{name} = " in inspect.getsource(CustomAllreduce.__init__)
    comm = AllReduceDouble(lambda x: [x], 0, 4, max_size=64)
    for shape, taken in (((1, 12), True), ((1, 16), False), ((1, 3), False), ((3, 4), True)):
        assert comm.should_custom_ar(torch.zeros(shape)) is taken
    assert not comm.should_custom_ar(torch.zeros(2, 8)[:, ::2])
    comm.fully_connected = False
    assert not comm.should_custom_ar(torch.zeros(1, 4))
    comm.world_size = 2
    assert comm.should_custom_ar(torch.zeros(1, 4))
