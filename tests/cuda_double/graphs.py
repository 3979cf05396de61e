"""Doubles of streams, events and CUDA graphs. A capture records no kernel: it checks what a GPU would refuse, or get wrong.

Refused while a stream captures: whatever makes the host wait, work on a stream that is not part of the capture, and a stream
that does not join it again. Refused later: to replay a graph whose inputs were freed since, or to read outside of graphs what a
capture allocated and only a replay fills.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.cuda_double.checks import need
from tests.cuda_wheels.h100_double import GPUS, MEMORY


class Stream:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device, self.cuda_stream = torch.device("cuda", State.device), id(self)

    def wait_stream(self, other: Stream) -> None:
        State.joined(self, other)
        if (capture := State.capture) is not None:
            capture.waits(self, other)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if event.stream is not None:
            self.wait_stream(event.stream)

    def synchronize(self) -> None:
        host_waits("a stream")

    def query(self) -> bool:
        return True


class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or State.stream

    def wait(self, stream: Stream | None = None) -> None:
        (stream or State.stream).wait_event(self)

    def synchronize(self) -> None:
        host_waits("an event")

    def query(self) -> bool:
        host_waits("an event")
        return True

    def elapsed_time(self, end: Event) -> float:
        return 1.0


class Capture:
    """One capture: its streams, and the storages that its kernels use."""

    def __init__(self, stream: Stream) -> None:
        need(stream is not State.default, "CUDA graphs must be captured on a non-default stream")
        self.stream, self.forked = stream, {stream}
        self.unjoined: set[Stream] = set()
        self.inputs: dict[int, StorageWeakRef] = {}
        self.made: dict[int, StorageWeakRef] = {}

    def waits(self, stream: Stream, other: Stream) -> None:
        if other in self.forked and stream not in self.forked:
            self.forked.add(stream)
            self.unjoined.add(stream)
        elif stream in self.forked:
            need(other in self.forked, "the capture waits for a stream outside of it")
            self.unjoined.discard(other)

    def uses(self, read: list[Tensor], made: list[Tensor]) -> None:
        need(State.stream in self.forked, "work on a stream that is not captured, while another one is")
        for known, tensors in ((self.inputs, read), (self.made, made)):
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if (key := storage._cdata) not in self.made and key not in self.inputs:
                    known[key] = StorageWeakRef(storage)


class State:
    """The process's device and current stream, and the capture that goes on."""

    device = 0
    default: Stream
    stream: Stream
    capture: Capture | None = None
    #: storages that captures allocated and whose contents only a replay writes, without the outputs of graphs
    unwritten: ClassVar[dict[int, StorageWeakRef]] = {}
    #: more than 0 where the host must not wait
    busy = 0
    #: how often the host has waited, and for all streams
    waits = synchronized = 0
    #: called when a stream waits for another one, and before a replay
    joined: Callable[[Stream, Stream], None] = staticmethod(lambda stream, other: None)
    replayed: Callable[[], None] = staticmethod(lambda: None)


State.default = State.stream = Stream()


def host_waits(what: object) -> None:
    """The host waits for the device."""
    need(State.capture is None, "cudaErrorStreamCaptureUnsupported: the host waits for", what)
    need(not State.busy, "the host waits for", what)
    State.waits += 1
    State.synchronized += what == "the device"


def used(read: list[Tensor], made: list[Tensor] = []) -> None:  # noqa: B006
    """Kernels use these tensors of the device."""
    if State.capture is not None:
        State.capture.uses(read, made)
    elif State.unwritten:
        for tensor in read:
            need(tensor.untyped_storage()._cdata not in State.unwritten, "reads what only a graph's replay writes:", tensor)


def is_output(tensor: Tensor) -> None:
    """A graph's output may be read after a replay."""
    key = tensor.untyped_storage()._cdata
    State.unwritten.pop(key, None)
    if State.capture is not None:
        State.capture.made.pop(key, None)


class Graph:
    """``torch.cuda.CUDAGraph``."""

    capture: Capture | None = None
    #: how many were captured and replayed, and the storages that they read
    captured = replays = 0
    read: ClassVar[set[int]] = set()

    def replay(self) -> None:
        need(State.capture is None, "a replay in a capture")
        State.replayed()
        assert self.capture is not None
        freed = sum(ref.expired() for ref in self.capture.inputs.values())
        need(not freed, "a graph reads", freed, "tensors that were freed since its capture")
        Graph.replays += 1


class capturing:
    """``torch.cuda.graph``."""

    def __init__(self, graph: Graph, pool: Any = None, stream: Stream | None = None, **named: Any) -> None:
        self.graph, self.context = graph, torch.cuda.stream(stream or Stream())  # type: ignore[arg-type]

    def __enter__(self) -> None:
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()
        self.context.__enter__()
        State.capture = self.graph.capture = Capture(State.stream)

    def __exit__(self, *error: Any) -> None:
        State.capture, capture = None, self.graph.capture
        self.context.__exit__(*error)
        assert capture is not None
        if error[0] is None:
            need(not capture.unjoined, "streams did not join the capture again")
            Graph.captured += 1
            Graph.read |= capture.inputs.keys()
            State.unwritten |= {key: ref for key, ref in capture.made.items() if not ref.expired()}


class on_stream:
    """``torch.cuda.stream``."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.before = State.stream
        if self.stream is not None:
            torch.cuda.set_stream(self.stream)  # type: ignore[arg-type]  # vLLM follows it

    def __exit__(self, *error: Any) -> None:
        torch.cuda.set_stream(self.before)  # type: ignore[arg-type]


def set_stream(stream: Stream) -> None:
    State.stream = stream


def set_device(device: Any) -> None:
    State.device = device if isinstance(device, int) else torch.device(device).index
    State.default.device = torch.device("cuda", State.device)


def install() -> None:
    """Put the doubles into ``torch.cuda``. vLLM's modules keep some of them, so call it before vLLM is imported."""
    doubles = {
        "Stream": Stream, "Event": Event, "CUDAGraph": Graph, "graph": capturing, "stream": on_stream, "set_stream": set_stream,
        "current_stream": lambda device=None: State.stream, "default_stream": lambda device=None: State.default,
        "is_current_stream_capturing": lambda: State.capture is not None, "graph_pool_handle": lambda: (0, 1),
    }  # fmt: skip
    for name, double in doubles.items():
        setattr(torch.cuda, name, double)
    torch.cuda.memory.get_allocator_backend = lambda: "none"  # vLLM 0.32 would change settings of the native one
    torch.Event = Event  # type: ignore[misc, assignment]  # in vLLM 0.24
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]  # which takes torch's streams alone
    memory = {
        "empty_cache": None, "empty_host_cache": None, "get_memory_info": (MEMORY, MEMORY), "memory_stats": {},
        "memory_reserved": 0, "memory_allocated": 0, "max_memory_allocated": 0, "reset_peak_memory_stats": None,
        "mem_get_info": (MEMORY, MEMORY), "device_count": GPUS, "current_blas_handle": 0, "manual_seed_all": None,
        "manual_seed": None, "is_initialized": True, "get_sync_debug_mode": 0, "set_sync_debug_mode": None,
    }  # fmt: skip
    for module in (torch.cuda, torch.accelerator):
        for name, value in memory.items():
            if hasattr(module, name):
                setattr(module, name, lambda *args, value=value, **named: value)
        module.synchronize = lambda device=None: host_waits("the device")
    torch.cuda.set_device = torch.accelerator.set_device_index = set_device
    torch.cuda.current_device = torch.accelerator.current_device_index = lambda: State.device
