"""Weight syncs with workers that are reached by calls of plain values: orders in JSON, and bytes over a group.

A patched worker executes an order (``obey``); an unpatched one raises at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from jetrl_patch.errors import SyncError
from jetrl_patch.sync.protocol import as_sync_error
from jetrl_patch.sync.receive import Receiver, State
from jetrl_patch.sync.send import Bucket, Entry, unpack

if TYPE_CHECKING:
    from torch import Tensor

    from jetrl_patch.config import Config

_PREFIX = "jetrl:"
#: seconds between two looks at what is awaited
POLL = 0.2


def encode(op: str, **fields: Any) -> str:
    """An order as text."""
    return _PREFIX + json.dumps({"op": op, **fields}, separators=(",", ":"))


def decode(text: Any) -> dict[str, Any] | None:
    """The order in a text; None if there is none."""
    if not isinstance(text, str) or not text.startswith(_PREFIX):
        return None
    order: dict[str, Any] = json.loads(text[len(_PREFIX) :])
    return order


def entries_of(order: Mapping[str, Any]) -> list[Entry]:
    """The entries of the bucket that an order describes."""
    return [(str(name), str(dtype), list(shape), int(start)) for name, dtype, shape, start in order["entries"]]


# ---- The trainer's end ---------------------------------------------------------------------------

class Task:
    """A call that runs beside this thread, in one that ends with the process.

    Attributes:
        ended: set when the call has returned or raised.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self.ended = threading.Event()
        self._found: Any = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, args=(call,), daemon=True).start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._found = call()
        except BaseException as error:  # ``result`` raises it in the thread that waits
            self._error = error
        finally:
            self.ended.set()

    def result(self) -> Any:
        """What the call has returned, once it has ended. Raises a JetrlError for what it has raised."""
        if self._error is not None:
            raise as_sync_error(self._error) from self._error
        return self._found


class Orders(Protocol):
    """Calls of all workers."""

    def start(self, order: str, size: int = 0, /) -> Any:
        """Send an order that is followed by ``size`` bytes over the group. Returns what ``wait`` takes."""

    def wait(self, started: Any, moved: threading.Event | None = None, /) -> list[Any]:
        """The workers' answers. Raises a worker's own error, or SyncError if a worker is dead or silent too long.

        ``moved`` is set when the trainer's own part, which may block, is done.
        """


class Group(Protocol):
    """Processes that are joined for weight syncs alone."""

    def broadcast(self, tensor: Tensor, /, src: int, stream: Any = None) -> None:
        """Fill ``tensor`` from rank ``src``. On a GPU, when the stream reaches it."""


class Wire(Protocol):
    """A transport for buckets from this rank to the workers, one at a time."""

    def start(self, bucket: Bucket) -> None:
        """Begin to send a bucket. Where nothing blocks, return before it has arrived."""

    def finish(self) -> None:
        """Return when all workers have loaded the bucket that was started. Raises what went wrong with it."""


def send_all(wire: Wire, buckets: Iterable[Bucket]) -> None:
    """Send buckets. While one travels, the next is gathered, quantized and digested."""
    travels = False
    try:
        for bucket in buckets:
            if travels:
                travels = False
                wire.finish()
            wire.start(bucket)
            travels = True
    except Exception:
        if travels:  # the stream broke: let the workers finish the bucket on its way, and ignore its result
            with contextlib.suppress(Exception):
                wire.finish()
        raise
    if travels:
        wire.finish()


class GroupWire:
    """Transport over a collective group of the trainer's rank 0 and all workers.

    ``broadcast`` sends a tensor to the group; it may block until all members have it.
    """

    def __init__(self, orders: Orders, broadcast: Callable[[Any], None]) -> None:
        self._orders = orders
        self._broadcast = broadcast
        self._started: Any = None
        self._moving: Task | None = None

    def start(self, bucket: Bucket) -> None:
        size = bucket.flat.numel()
        self._started = self._orders.start(encode("bucket", entries=bucket.entries, size=size), size)
        if bucket.flat.is_cuda:  # enqueued on the stream: does not block
            self._moving = None
            self._broadcast(bucket.flat)
        else:  # gloo blocks until every worker joins; a thread keeps this one free to prepare the next bucket
            self._moving = Task(lambda: self._broadcast(bucket.flat))

    def finish(self) -> None:
        self._orders.wait(self._started, None if self._moving is None else self._moving.ended)
        if self._moving is not None:
            self._moving.result()


# ---- The worker's end ----------------------------------------------------------------------------

def where() -> str:
    """Name the host, and the raylet that started this process: several Ray nodes may share a host."""
    raylet = os.environ.get("RAY_RAYLET_PID")
    return f"{socket.gethostname()} (raylet {raylet})" if raylet else socket.gethostname()


def obey(
    order: Mapping[str, Any], receiver: Receiver, config: Config, received: Callable[[], Tensor]
) -> dict[str, Any] | None:
    """Execute an order of a weight sync in a worker with this ``config``, and return its answer.

    ``received`` returns a bucket's bytes, uint8 [n].

    Raises what the sync raises when it ends, and SyncError for an unknown order.
    """
    if order["op"] == "bucket":
        receiver.on_bucket(unpack(received(), entries_of(order)))
        return None
    if order["op"] == "begin":
        answer = {
            "pid": os.getpid(),
            "node": where(),
            "config": config.to_env(),
            "serves": receiver.state is State.SERVING,
            "held": receiver.held(),
            "version": receiver.version,
        }
        receiver.restart()
        return answer
    if order["op"] == "end":
        receiver.version = 0  # no version until the sync is complete
        report: dict[str, Any] = {**receiver.finish()}
        receiver.version = order["version"]
        return report
    raise SyncError(
        f"the vLLM worker does not know the command {order['op']!r}. Install the same version of jetrl_patch on both sides."
    )
