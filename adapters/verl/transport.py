"""verl's bucketed transfer with an end: no socket waits for ever for a process that is dead.

verl 0.9.1 sends buckets over a ZMQ REQ/REP pair and waits without a limit on both sides. Here the waiting side looks
at its peer meanwhile (the RPC that runs in the vLLM worker) and at the clock.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from jetrl_patch.errors import JetrlError, NotPatchedError, SyncError
from jetrl_patch.sync import remote

_POLL_MS = 200
_GRACE = 5.0  # seconds between a worker's answer to the RPC and the arrival of its last acknowledgement


class Peer:
    """The RPC that receives on the other side, and how long to wait for it without progress.

    Args:
        call: a ``concurrent.futures.Future`` of the RPC, or None on ranks that did not start it.
        timeout: seconds.
    """

    def __init__(self, call: Any, timeout: float) -> None:
        self.call = call
        self.timeout = timeout
        self._ended: float | None = None

    def check(self, since: float) -> None:
        """Raise SyncError if the peer has failed, is gone, or has been silent for too long."""
        now = time.monotonic()
        if self.call is not None and self.call.done():
            error = self.call.exception()
            if error is not None:
                raise as_sync_error(error) from error
            self._ended = self._ended or now
            if now - self._ended > _GRACE:
                raise SyncError("the vLLM worker ended its part of the weight sync before everything was sent")
        if now - since > self.timeout:
            raise SyncError(
                f"the vLLM worker has not answered for {self.timeout:g} s during a weight sync; it is dead, stuck, or "
                f"slower than JETRL_SYNC_TIMEOUT allows"
            )


class WatchedSocket:
    """A ZMQ REQ socket whose waits look at the peer. Has what ``BucketedWeightSender`` calls."""

    def __init__(self, socket: Any, peer: Peer) -> None:
        self._socket = socket
        self._peer = peer

    def send_pyobj(self, obj: Any) -> None:
        """As ZMQ's; waits for a connected peer."""
        import zmq

        self._wait(zmq.POLLOUT)
        self._socket.send_pyobj(obj)

    def recv(self) -> bytes:
        """As ZMQ's."""
        import zmq

        self._wait(zmq.POLLIN)
        reply: bytes = self._socket.recv()
        return reply

    def close(self) -> None:
        """Drop what was not delivered, so that the process can end."""
        self._socket.close(linger=0)

    def _wait(self, event: int) -> None:
        since = time.monotonic()
        while not self._socket.poll(_POLL_MS, event):
            self._peer.check(since)


def watched_sender(peer: Peer, **kwargs: Any) -> Any:
    """A ``BucketedWeightSender`` (same arguments) that watches its peer."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    class WatchedSender(BucketedWeightSender):
        socket: Any

        def _init_socket(self) -> None:
            super()._init_socket()
            self.socket = WatchedSocket(self.socket, peer)

        def _cleanup(self) -> None:
            try:
                super()._cleanup()
            except FileNotFoundError:  # Python removes the shared memory of a process that died attached to it
                self.shm = None

    return WatchedSender(**kwargs)


def timed_receiver(timeout: float, **kwargs: Any) -> Any:
    """A ``BucketedWeightReceiver`` (same arguments) that gives up after ``timeout`` seconds of silence."""
    import zmq
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

    class TimedReceiver(BucketedWeightReceiver):
        def _init_socket(self) -> None:
            super()._init_socket()
            self.socket.setsockopt(zmq.RCVTIMEO, int(timeout * 1000))
            self.socket.setsockopt(zmq.LINGER, 5000)  # the last acknowledgement, but not for ever

    return TimedReceiver(**kwargs)


async def ending_early(weights: Iterable[Any], sender: Callable[[], Any]) -> AsyncIterator[Any]:
    """Pass the stream on; when it breaks (NaN in a weight, …) tell the receiver that nothing more comes.

    Without that the receiver would wait for the rest until its own time is up.
    """
    try:
        for item in weights:
            yield item
    except Exception:
        socket = getattr(sender(), "socket", None)
        if socket is not None:
            try:
                socket.send_pyobj({"bucket_meta": {}, "is_last": True})
                socket.recv()
            except Exception:
                pass  # the error that broke the stream is the one to report
        raise


def as_sync_error(error: BaseException) -> JetrlError:
    """What a failed RPC into the vLLM worker means. Our own errors come back as text through Ray and vLLM."""
    text = str(error)
    if "unexpected keyword argument 'jetrl'" in text:
        return NotPatchedError(
            "a vLLM worker is not patched: it does not know this project's weight sync. Install jetrl_patch where vLLM "
            "runs, and give its processes the JETRL_* variables (VLLM_PLUGINS must not leave jetrl_patch out)"
        )
    return remote.as_sync_error(error)
