"""verl's own bucketed transfer, watched: whatever happens to the receiver, the sender ends in bounded time.

Each case runs in a separate process on the CPU platform, with verl's receiver in a child process.
"""

from __future__ import annotations

import asyncio
import functools
import textwrap
from pathlib import Path

import pytest
import torch

from jetrl_patch import errors
from jetrl_patch.adapters.verl.transport import Ahead, WatchedSocket, as_sync_error, ending_early
from jetrl_patch.errors import AuditError, NotPatchedError, SyncError
from tests import forks

KINDS = [getattr(errors, name) for name in errors.__all__ if name.endswith("Error")]

PRELUDE = """
import asyncio, multiprocessing, os, sys, time, uuid
from concurrent.futures import Future
import jetrl_patch
jetrl_patch.enable(precision="fp8-unified", platform="cpu")
import torch
from jetrl_patch.adapters.verl.transport import Peer, ending_early, timed_receiver, watched_sender
from jetrl_patch.errors import SyncError
import verl.workers.rollout.vllm_rollout.bucketed_weight_transfer  # a slow import, done before the receiver is forked

PATIENCE = 400  # seconds that a slow machine may need
HANDLE = f"ipc:///tmp/jetrl-test-{uuid.uuid4().hex}.sock"
WEIGHTS = [(f"w{i}", torch.full((200_000,), float(i))) for i in range(12)]  # 0.8 MB each, buckets of 1 MB

def receive(handle, die_after, timeout, queue):
    seen = []
    def on_bucket(weights, is_last):
        seen.extend((name, tensor.sum().item()) for name, tensor in weights)
        if die_after is not None and len(seen) >= die_after:
            os._exit(9)
    try:
        timed_receiver(timeout, zmq_handle=handle, device=torch.device("cpu"), use_shm=True).receive_weights(on_bucket)
    except Exception as error:
        queue.put(type(error).__name__)
        return
    queue.put(seen)

def start(die_after=None, timeout=PATIENCE):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=receive, args=(HANDLE, die_after, timeout, queue), daemon=True)
    process.start()
    return process, queue

def send(peer, weights):
    sender = watched_sender(peer, zmq_handle=HANDLE, bucket_size_mb=1, use_shm=True)
    try:
        asyncio.run(sender.async_send_weights(ending_early(weights, sender)))
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


@pytest.fixture
def run(tmp_path):
    """Runs a script that begins with ``PRELUDE``; returns what it printed."""
    return functools.partial(output_of, tmp_path / "script.py")


def output_of(file: Path, body: str) -> str:
    file.write_text(PRELUDE + textwrap.dedent(body))
    done = forks.run(file, imports=forks.WITH_VLLM)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.e2e
def test_weights_arrive_in_buckets(run):
    run("""
        process, queue = start()
        send(Peer(None, PATIENCE), WEIGHTS)
        assert queue.get(timeout=PATIENCE) == [(name, tensor.sum().item()) for name, tensor in WEIGHTS]
    """)


@pytest.mark.e2e
def test_a_receiver_that_dies_in_the_middle_ends_the_sender(run):
    out = run("""
        process, queue = start(die_after=4)
        send(Peer(None, 3.0), WEIGHTS)
        process.join(PATIENCE)
        assert process.exitcode == 9
    """)
    assert "SyncError: the vLLM worker has not answered for 3 s during a weight sync" in out


@pytest.mark.e2e
def test_a_worker_that_never_answers_leaves_no_shared_memory(run):
    """It refuses the sync, or it takes the first message and dies."""
    run("""
        import glob
        before = set(glob.glob("/dev/shm/verl_weights_*"))
        call = Future()
        call.set_exception(RuntimeError("refused"))
        send(Peer(call, 3600.0), WEIGHTS)
        assert set(glob.glob("/dev/shm/verl_weights_*")) <= before
        import zmq
        reader = zmq.Context.instance().socket(zmq.REP)
        reader.connect(HANDLE)
        send(Peer(call, 3600.0), WEIGHTS)
        assert reader.recv_pyobj()["name"] and set(glob.glob("/dev/shm/verl_weights_*")) <= before
    """)


@pytest.mark.e2e
def test_a_failed_rpc_ends_the_sender_at_once(run):
    out = run("""
        import threading
        call = Future()
        threading.Timer(1.0, lambda: call.set_exception(RuntimeError("EngineCore died"))).start()
        process, queue = start(die_after=4)
        send(Peer(call, 3600.0), WEIGHTS)
    """)
    assert "SyncError: the vLLM worker failed or died during a weight sync: RuntimeError: EngineCore died" in out


@pytest.mark.e2e
def test_a_worker_of_an_earlier_sync_takes_no_message_of_the_next(run):
    """It was frozen: it answers after its sender has left, and connects to whatever listens at that name now."""
    run("""
        import threading, zmq
        from jetrl_patch.adapters.verl import transport as address
        from jetrl_patch.adapters.verl.state import WorkerState
        state, base = WorkerState(), HANDLE
        HANDLE = address.own(base, address.sync_id(state, 1))
        frozen = zmq.Context.instance().socket(zmq.REP)
        frozen.connect(HANDLE)
        send(Peer(None, 2.0), WEIGHTS)
        assert frozen.recv_pyobj()["name"]
        frozen.send(b"")
        HANDLE = address.own(base, address.sync_id(state, 1))
        sender = threading.Thread(target=send, args=(Peer(None, 30.0), WEIGHTS))
        sender.start()
        time.sleep(1)  # the frozen one would be there first
        process, queue = start(timeout=60)
        assert queue.get(timeout=PATIENCE) == [(name, tensor.sum().item()) for name, tensor in WEIGHTS]
        sender.join()
    """)


@pytest.mark.e2e
def test_no_receiver_at_all(run):
    out = run("send(Peer(None, 2.0), WEIGHTS)")
    assert "SyncError: the vLLM worker has not answered for 2 s" in out


@pytest.mark.e2e
def test_a_stream_that_breaks_tells_the_receiver(run):
    out = run("""
        def broken():
            yield from WEIGHTS[:5]
            raise SyncError("w5 holds NaN or Inf")
        process, queue = start(timeout=3600)  # the sender must end its wait, not its own timeout
        send(Peer(None, PATIENCE), broken())
        print("receiver got", len(queue.get(timeout=PATIENCE)))
    """)
    assert "SyncError: w5 holds NaN or Inf" in out


@pytest.mark.e2e
def test_a_receiver_without_a_sender_gives_up(run):
    run("""
        process, queue = start(timeout=1.0)
        assert queue.get(timeout=PATIENCE) == "Again"
    """)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (
            "... TypeError: f() got an unexpected keyword argument 'jetrl'",
            NotPatchedError,
            "a vLLM worker is not patched",
        ),
        ("Worker failed with error 'AuditError: layers differ'", AuditError, "layers differ"),
        ("x\njetrl_patch.errors.SyncError: w missing\nmore", SyncError, "w missing"),
        *((f"RuntimeError: {kind.__name__}: why\nmore", kind, "why") for kind in KINDS),
        ("VersionError: a\nThe above exception was the cause of:\nSyncError: the engine: ModelError: b", SyncError, "the engine"),
        ("EngineDeadError", SyncError, "died during a weight sync"),
        ("", SyncError, "died during a weight sync"),
    ],
)
def test_errors_of_the_worker_come_back_as_what_they_were(text, kind, message):
    error = as_sync_error(RuntimeError(text))
    assert type(error) is kind and message in str(error)


def test_an_error_that_ray_raises_again_is_the_workers_own():
    from ray.exceptions import RayTaskError

    own = AuditError("trainer and rollout do not compute alike")
    again = RayTaskError("call", "Traceback …", own).as_instanceof_cause()
    assert isinstance(again, AuditError) and as_sync_error(again) is own


def test_the_trainers_own_error_is_not_the_workers(run):
    def weights():
        yield "w0", torch.zeros(1)
        raise RuntimeError("no such shard")

    async def read():
        return [item async for item in ending_early(weights(), None)]

    with pytest.raises(SyncError, match="could not read its weights for a sync: RuntimeError: no such shard"):
        asyncio.run(read())


def _stream(log, count=6, broken=False):
    for i in range(count):
        log.append(i)
        yield f"w{i}", torch.zeros(100, dtype=torch.uint8)
    if broken:
        raise SyncError("w6 holds NaN or Inf")


class SlowSocket:
    """Answers the third time."""

    looks = 0

    def poll(self, timeout, event):
        self.looks += 1
        return self.looks % 3 == 0

    def recv(self):
        return b""


def test_the_stream_is_read_ahead_while_the_worker_loads(monkeypatch):
    log = []
    ahead = Ahead(_stream(log))
    socket = WatchedSocket(SlowSocket(), None)
    socket.meanwhile = ahead.fill
    stream = iter(ahead)
    assert next(stream)[0] == "w0" and log == [0]
    socket.recv()
    assert log == [0, 1, 2]  # two looks, two tensors
    assert [name for name, _ in stream] == [f"w{i}" for i in range(1, 6)] and log == list(range(6))


def test_reading_ahead_is_bounded_and_keeps_order(monkeypatch):
    monkeypatch.setattr("jetrl_patch.adapters.verl.transport._AHEAD_BYTES", 250)
    log = []
    ahead = Ahead(_stream(log))
    while ahead.fill():
        pass
    assert log == [0, 1, 2]  # 300 bytes are more than 250
    assert [name for name, _ in ahead] == [f"w{i}" for i in range(6)]


def test_an_error_ahead_is_raised_after_what_came_before_it():
    ahead, names = Ahead(_stream([], broken=True)), []
    while ahead.fill():
        pass
    with pytest.raises(SyncError, match="w6 holds NaN"):
        names.extend(name for name, _ in ahead)
    assert len(names) == 6
