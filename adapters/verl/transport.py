"""Both ends of a weight sync to a colocated vLLM: where they meet, how long they wait, and what the vLLM worker receives.

verl 0.9.1 sends buckets over a pair of ZMQ sockets (REQ/REP), and both sides wait without a limit. Here a waiting side also
watches the clock, and the sender watches the RPC that runs in the vLLM worker, so no socket waits forever for a dead process.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from multiprocessing.shared_memory import SharedMemory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from jetrl_patch import session
from jetrl_patch.errors import JetrlError, NotPatchedError, SyncError
from jetrl_patch.patching.patch import replacement
from jetrl_patch.sync import protocol
from jetrl_patch.trainer.rules import require_same

if TYPE_CHECKING:
    from jetrl_patch.adapters.verl.state import WorkerState

_POLL_MS = 200
_AHEAD_BYTES = 128 << 20  # read ahead while the worker loads a bucket; extra memory in the trainer
_GRACE = 5.0  # seconds between the answer to a worker's RPC and its last acknowledgement


# ---- Where the trainer and a vLLM worker meet: a socket that no other sync uses ----
# verl names the socket in /tmp by Ray's job number, the replica and the rank. That separates runs that share a Ray cluster
# (https://github.com/verl-project/verl/issues/6233). But every run that starts its own Ray has job 1. If two such runs share a
# machine, the second takes over the first one's socket: one waits for weights in vain, and the other's worker may load them.
#
# Within a run verl uses the same name for every sync. A worker that was frozen or abandoned may still hold a reply to an earlier
# sender. ZeroMQ delivers it, even from a closed socket, to whoever listens at that name now. The new sender mistakes it for its
# own worker's reply, its first message is lost, and both sides wait until they time out.

def run_id() -> str:
    """Return an identity of this process's Ray cluster, unique among running clusters; empty outside a cluster."""
    import ray

    if not ray.is_initialized():
        return ""
    return hashlib.sha256(ray.get_runtime_context().gcs_address.encode()).hexdigest()[:12]


def sync_id(state: WorkerState, step: int | None) -> str:
    """Identify the sync that begins now by the run, the step, and how often this step was synced before.

    All training ranks of a rollout take part in every sync, and so get the same identity.
    """
    last, times = state.synced
    state.synced = step, times + 1 if step == last else 0
    return f"{run_id()}.{step}.{state.synced[1]}"


def own(handle: str, sync: str) -> str:
    """Return the address of this sync alone, made from verl's ``ipc:///tmp/….sock``."""
    return f"{handle.removesuffix('.sock')}-{sync}.sock" if sync else handle


def meet(worker: Any, sync: str) -> None:
    """Make verl's worker extension listen at the address of this sync."""
    handle = own(type(worker)._get_zmq_handle(worker), sync)
    worker._get_zmq_handle = lambda: handle


# ---- The trainer's end ----

class Peer:
    """The RPC that receives on the other side, and how many seconds to wait without progress.

    ``call`` is a ``concurrent.futures.Future`` of the RPC, or None on ranks that did not start it.
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
            raise protocol.silent("the vLLM worker", self.timeout)


class Ahead:
    """A stream of tensors that is read ahead, up to ``_AHEAD_BYTES``, while the worker loads a bucket."""

    def __init__(self, weights: Iterable[Any]) -> None:
        self._weights = iter(weights)
        self._held: collections.deque[Any] = collections.deque()
        self._bytes = 0
        self._error: Exception | None = None
        self._ended = False

    def fill(self) -> bool:
        """Produce one more tensor; False at the end, or if there is no room. An error is raised when its turn comes."""
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
        meanwhile: does a piece of useful work during a wait; returns False if there is none.
        announced: the first message: the buffer through which the tensors travel.
        greeting: the first reply; a worker that keeps the last sync's weights sends their identity in it.
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
        """Close at once and drop undelivered messages, which would keep the process from exiting."""
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
            except BaseException:  # verl records its shared memory only after the worker's reply, so it would not free it
                _remove_buffer(self.socket.announced)
                raise

        def _cleanup(self) -> None:
            try:
                super()._cleanup()
            except FileNotFoundError:  # Python removes shared memory if a process attached to it dies
                self.shm = None

    return WatchedSender(**kwargs)


def _remove_buffer(announced: Any) -> None:
    if isinstance(announced, dict):  # otherwise it is CUDA memory, which lives as long as its tensor
        with contextlib.suppress(FileNotFoundError):  # Python removes shared memory if a process attached to it dies
            memory = SharedMemory(announced["name"])
            memory.close()
            memory.unlink()


async def ending_early(weights: Any, sender: Any, greeted: Callable[[str], None] = lambda held: None) -> AsyncIterator[Any]:
    """Pass the stream on, and read it ahead while the sender waits for the worker. Asynchronous streams are not read ahead.

    If the stream raises (NaN in a weight, …), tell the receiver that nothing more follows, or it would wait until its timeout.
    ``greeted`` is called before the stream is read, with the identity of the weights that the worker keeps.
    Raises the error of the stream, as a SyncError if it is not a JetrlError.
    """
    try:
        if hasattr(weights, "__aiter__"):
            async for item in weights:
                yield item
            return
        ahead = Ahead(weights)
        watched = getattr(sender, "socket", None)
        if isinstance(watched, WatchedSocket):
            greeted((watched.greeting or b"").decode())
            watched.meanwhile = ahead.fill
        for item in ahead:
            yield item
    except Exception as error:
        socket = getattr(sender, "socket", None)
        if socket is not None:
            try:
                socket.send_pyobj({"bucket_meta": {}, "is_last": True})
                socket.recv()
            except Exception:  # the error of the stream matters more
                pass
        if isinstance(error, JetrlError):
            raise
        raise SyncError(f"the trainer could not read its weights for a sync: {type(error).__name__}: {error}") from error


def as_sync_error(error: BaseException) -> JetrlError:
    """Convert a failed RPC into the vLLM worker to an error. Ray and vLLM return the plugin's errors as text."""
    if "unexpected keyword argument 'jetrl'" in str(error):
        return NotPatchedError(
            "a vLLM worker is not patched: it does not know jetrl_patch's weight sync. Install jetrl_patch where vLLM runs, "
            "pass its processes the JETRL_* variables and do not exclude jetrl_patch in VLLM_PLUGINS."
        )
    return protocol.as_sync_error(error)


# ---- The vLLM worker's end. The vLLM adapter attached the receiver to the worker when the model was loaded ----

def _greeter(socket: Any, text: str) -> Any:
    """A ZMQ REP socket that replies with a text where verl replies with nothing."""
    return SimpleNamespace(recv_pyobj=socket.recv_pyobj, send=lambda reply: socket.send(reply or text.encode()))


def timed_receiver(timeout: float, held: str = "", **kwargs: Any) -> Any:
    """Return a ``BucketedWeightReceiver`` (same arguments) that gives up after ``timeout`` seconds of silence.

    Its reply to the sender's first message is ``held``, the identity of the weights of the last sync.
    """
    import zmq
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

    class TimedReceiver(BucketedWeightReceiver):
        socket: Any

        def _init_socket(self) -> None:
            super()._init_socket()
            self.socket.setsockopt(zmq.RCVTIMEO, int(timeout * 1000))
            self.socket.setsockopt(zmq.LINGER, 5000)  # milliseconds to deliver the last acknowledgement

        def _init_buffer(self) -> None:
            socket = self.socket
            self.socket = _greeter(socket, held)
            try:
                super()._init_buffer()
            finally:
                self.socket = socket

    return TimedReceiver(**kwargs)


@replacement
def update_weights_from_ipc(
    original: Any,
    self: Any,
    peft_config: Any = None,
    base_sync_done: bool = False,
    use_shm: bool = False,
    jetrl: dict[str, str] | None = None,
    jetrl_sync: str = "",
) -> Any:
    """Replace ``vLLMColocateWorkerExtension.update_weights_from_ipc``: pass buckets through the receiver's checks.

    The extra argument ``jetrl`` has the settings of a patched trainer; an unpatched worker fails at once on it. ``jetrl_sync``
    says where they meet. An unpatched trainer waits without a limit, so its data is read and dropped before the error.
    """
    if not session.is_active():
        if jetrl is not None:
            raise NotPatchedError("jetrl_patch was disabled in this vLLM worker. Restart the run.")
        return original(self, peft_config=peft_config, base_sync_done=base_sync_done, use_shm=use_shm)
    config = session.active_config()
    if jetrl is None:
        _transport(self, use_shm, config.sync_timeout).receive_weights(lambda weights, is_last: None)
        raise NotPatchedError(
            "the trainer that syncs weights is not patched, but this vLLM worker is. Pass its process the same JETRL_* "
            "variables and do not exclude jetrl_patch in VERL_USE_EXTERNAL_PLUGINS."
        )
    require_same("a vLLM worker", required=jetrl, found=config.to_env())
    meet(self, jetrl_sync)
    if not config.quantized_rollout:
        return original(self, peft_config=peft_config, base_sync_done=base_sync_done, use_shm=use_shm)
    return _receive(self, use_shm, config.sync_timeout)


def _receive(worker: Any, use_shm: bool, timeout: float) -> dict[str, int]:
    import zmq

    receiver = worker.jetrl_receiver
    transport = _transport(worker, use_shm, timeout, receiver.held())
    try:
        transport.receive_weights(on_bucket_received=lambda weights, is_last: receiver.on_bucket(weights))
    except zmq.Again:
        receiver.break_off(f"the trainer sent nothing for {timeout:g} s during a weight sync. Check the trainer's log.")
    except Exception as error:
        receiver.break_off(f"the weight transfer broke off: {type(error).__name__}: {error}")
    report: dict[str, int] = receiver.finish()
    return report


def _transport(worker: Any, use_shm: bool, timeout: float, held: str = "") -> Any:
    import torch
    from verl.utils.device import get_device_name

    if worker.device is None:  # as in verl: vLLM leaves it unset on some platforms
        worker.device = torch.device(f"{get_device_name()}:{worker.local_rank}")
    return timed_receiver(timeout, held, zmq_handle=worker._get_zmq_handle(), device=worker.device, use_shm=use_shm)
