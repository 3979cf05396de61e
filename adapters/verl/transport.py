"""verl's bucketed transfer with timeouts: no socket waits forever for a dead process.

verl 0.9.1 sends buckets over a ZMQ REQ/REP pair and waits without a limit on both sides. Here the waiting side also checks
its peer (the RPC that runs in the vLLM worker) and the clock.
"""

from __future__ import annotations

import collections
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from jetrl_patch.errors import JetrlError, NotPatchedError, SyncError
from jetrl_patch.sync import protocol

_POLL_MS = 200
_AHEAD_BYTES = 128 << 20  # quantized and digested while the worker loads a bucket; extra memory on the trainer's side
_GRACE = 5.0  # seconds from a worker's RPC answer to its last acknowledgement


class Peer:
    """The RPC that receives on the other side, and how long to wait without progress.

    Args:
        call: a ``concurrent.futures.Future`` of the RPC, or None on ranks that did not start it.
        timeout: seconds.
    """

    def __init__(self, call: Any, timeout: float) -> None:
        self.call = call
        self.timeout = timeout
        self._ended: float | None = None

    def check(self, since: float) -> None:
        """Raise SyncError if the peer failed, ended early, or has been silent for too long."""
        now = time.monotonic()
        if self.call is not None and self.call.done():
            error = self.call.exception()
            if error is not None:
                raise as_sync_error(error) from error
            self._ended = self._ended or now
            if now - self._ended > _GRACE:
                raise SyncError("the vLLM worker finished the weight sync before everything was sent. Check its log.")
        if now - since > self.timeout:
            raise SyncError(
                f"the vLLM worker has not answered for {self.timeout:g} s during a weight sync: it is dead, stuck or slow. "
                "Check its log, or raise JETRL_SYNC_TIMEOUT."
            )


class Ahead:
    """A stream of tensors that can be read ahead, up to ``_AHEAD_BYTES``, while the worker loads a bucket."""

    def __init__(self, weights: Iterable[Any]) -> None:
        self._weights = iter(weights)
        self._held: collections.deque[Any] = collections.deque()
        self._bytes = 0
        self._error: Exception | None = None
        self._ended = False

    def fill(self) -> bool:
        """Produce one more tensor; False if there is no more, or no room. An error is raised when its turn comes."""
        if self._ended or self._bytes >= _AHEAD_BYTES:
            return False
        try:
            item = next(self._weights)
        except StopIteration:
            self._ended = True
            return False
        except Exception as error:
            self._error, self._ended = error, True
            return False
        self._held.append(item)
        self._bytes += item[1].nbytes
        return True

    def __iter__(self) -> Iterator[Any]:
        while self._held or self.fill():
            item = self._held.popleft()
            self._bytes -= item[1].nbytes
            yield item
        if self._error is not None:
            raise self._error


class WatchedSocket:
    """A ZMQ REQ socket that checks its peer while it waits. It has the methods that ``BucketedWeightSender`` calls.

    Attributes:
        meanwhile: useful work for a wait, done piece by piece; returns False if there is none.
        announced: the first message: the buffer through which the tensors travel.
        greeting: the first reply; a worker that keeps the last sync's weights says their identity in it.
    """

    def __init__(self, socket: Any, peer: Peer) -> None:
        self._socket = socket
        self._peer = peer
        self.meanwhile: Callable[[], bool] = lambda: False
        self.announced: Any = None
        self.greeting: bytes | None = None

    def send_pyobj(self, obj: Any) -> None:
        """Like ZMQ's; wait for a connected peer."""
        import zmq

        if self.announced is None:
            self.announced = obj
        self._wait(zmq.POLLOUT)
        self._socket.send_pyobj(obj)

    def recv(self) -> bytes:
        """Like ZMQ's."""
        import zmq

        self._wait(zmq.POLLIN)
        reply: bytes = self._socket.recv()
        if self.greeting is None:
            self.greeting = reply
        return reply

    def close(self) -> None:
        """Drop undelivered messages, so that the process can exit."""
        self._socket.close(linger=0)

    def _wait(self, event: int) -> None:
        since = time.monotonic()
        while not self._socket.poll(0, event):
            if not self.meanwhile() and not self._socket.poll(_POLL_MS, event):
                self._peer.check(since)


def watched_sender(peer: Peer, **kwargs: Any) -> Any:
    """Return a ``BucketedWeightSender`` (same arguments) that watches its peer."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    class WatchedSender(BucketedWeightSender):
        socket: Any

        def _init_socket(self) -> None:
            super()._init_socket()
            self.socket = WatchedSocket(self.socket, peer)

        def _init_buffer(self) -> None:
            try:
                super()._init_buffer()
            except BaseException:  # verl itself notes its shared memory only after the worker's reply
                _remove_buffer(self.socket.announced)
                raise

        def _cleanup(self) -> None:
            try:
                super()._cleanup()
            except FileNotFoundError:  # Python removes shared memory whose attached process died
                self.shm = None

    return WatchedSender(**kwargs)


def _remove_buffer(announced: Any) -> None:
    if isinstance(announced, dict):  # else it is CUDA memory, which lives as long as its tensor
        try:
            memory = SharedMemory(announced["name"])
        except FileNotFoundError:  # Python removes shared memory whose attached process died
            return
        memory.unlink()
        memory.close()


class _Greeter:
    """A ZMQ REP socket that replies with a text instead of nothing."""

    def __init__(self, socket: Any, text: str) -> None:
        self._socket = socket
        self._text = text

    def recv_pyobj(self) -> Any:
        return self._socket.recv_pyobj()

    def send(self, reply: bytes) -> None:
        self._socket.send(reply or self._text.encode())


def timed_receiver(timeout: float, held: str = "", **kwargs: Any) -> Any:
    """Return a ``BucketedWeightReceiver`` (same arguments) that gives up after ``timeout`` seconds of silence.

    Args:
        held: identity of the weights of the last sync, the reply to the sender's first message.
    """
    import zmq
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

    class TimedReceiver(BucketedWeightReceiver):
        socket: Any

        def _init_socket(self) -> None:
            super()._init_socket()
            self.socket.setsockopt(zmq.RCVTIMEO, int(timeout * 1000))
            self.socket.setsockopt(zmq.LINGER, 5000)  # deliver the last acknowledgement, within a limit

        def _init_buffer(self) -> None:
            socket = self.socket
            self.socket = _Greeter(socket, held)
            try:
                super()._init_buffer()
            finally:
                self.socket = socket

    return TimedReceiver(**kwargs)


async def ending_early(
    weights: Any, sender: Callable[[], Any], greeted: Callable[[str], None] = lambda held: None
) -> AsyncIterator[Any]:
    """Pass the stream on, and read it ahead while the sender waits for the worker.

    ``greeted`` is called before the stream is read, with the identity of the weights that the worker keeps.

    If it raises (NaN in a weight, …), tell the receiver that nothing more follows. Otherwise the receiver would wait for the
    rest until its timeout. What a checkpoint engine receives is an asynchronous iterator, which is read as it comes.

    Raises JetrlError: what the stream raised, as a SyncError unless it is an error of the plugin.
    """
    try:
        if hasattr(weights, "__aiter__"):
            async for item in weights:
                yield item
            return
        ahead = Ahead(weights)
        watched = getattr(sender(), "socket", None)
        if isinstance(watched, WatchedSocket):
            greeted((watched.greeting or b"").decode())
            watched.meanwhile = ahead.fill
        for item in ahead:
            yield item
    except Exception as error:
        socket = getattr(sender(), "socket", None)
        if socket is not None:
            try:
                socket.send_pyobj({"bucket_meta": {}, "is_last": True})
                socket.recv()
            except Exception:
                pass  # report the error that broke the stream
        if isinstance(error, JetrlError):
            raise
        text = f"the trainer could not read its weights for a sync: {type(error).__name__}: {error}"
        raise SyncError(text) from error


def as_sync_error(error: BaseException) -> JetrlError:
    """Convert a failed RPC into the vLLM worker to an error. Ray and vLLM return the plugin's errors as text."""
    text = str(error)
    if "unexpected keyword argument 'jetrl'" in text:
        return NotPatchedError(
            "a vLLM worker is not patched: it does not know jetrl_patch's weight sync. Install jetrl_patch where vLLM runs, "
            "pass its processes the JETRL_* variables and do not exclude jetrl_patch in VLLM_PLUGINS."
        )
    return protocol.as_sync_error(error)
