"""How verl's trainer finds out what the engines hold before a delta sync."""

from __future__ import annotations

import asyncio
import importlib
import queue
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

pytest.importorskip("verl")

from verl.checkpoint_engine import CheckpointEngineRegistry

from jetrl_patch import session
from jetrl_patch.adapters.verl import metrics, state, transport
from jetrl_patch.adapters.verl import sync as delta
from jetrl_patch.adapters.verl.state import WORKER
from jetrl_patch.config import Config
from jetrl_patch.errors import SyncError
from jetrl_patch.sync.delta import Sent

DELTA = Config(sync="delta", sync_timeout=1.0)


@pytest.fixture(autouse=True)
def clean():
    state.reset()
    yield
    state.reset()


def manager(*replicas, ranks=2, answer=None):
    """A manager of engines that hold these bases, one for each tensor-parallel worker."""

    def server(held):
        async def rpc(method, args):
            assert (method, args) == ("jetrl_report", (False,))
            return [{"held": one} for one in held] if answer is None else await answer()

        return SimpleNamespace(servers=[SimpleNamespace(collective_rpc=SimpleNamespace(remote=rpc))])

    told = []

    def execute(methods, held):
        told.extend(zip(methods, held, strict=True))
        return []

    group = SimpleNamespace(world_size=ranks, execute_checkpoint_engine=execute)
    return SimpleNamespace(replicas=[server(held) for held in replicas], actor_wg=group), told


@pytest.mark.parametrize(
    ("replicas", "common"),
    [
        ([["a", "a"]], "a"),
        ([["a", "a"], ["a", "a"]], "a"),
        ([["a", "b"]], ""),
        ([["a"], [""]], ""),
        ([["a"], ["b"]], ""),
        ([[""]], ""),
    ],
)
def test_every_training_worker_is_told_what_all_engines_hold(replicas, common, monkeypatch):
    monkeypatch.setattr("ray.get", lambda refs: refs)
    found, told = manager(*replicas)
    asyncio.run(delta.announce(found, DELTA))
    assert told == [("jetrl_offer", common)] * 2


@pytest.mark.parametrize(("method", "answer"), [("jetrl_report", ["the engine's"]), ("sleep", None)])
def test_the_server_returns_what_the_workers_answer(method, answer, monkeypatch):
    monkeypatch.setattr(session, "is_active", lambda: True)
    monkeypatch.setattr(session, "active_config", lambda: DELTA)

    async def original(self, method, timeout=None, args=(), kwargs=None):
        await self.engine.collective_rpc(method, timeout, args, kwargs)

    async def rpc(method, timeout, args, kwargs):
        return ["the engine's"]

    server = SimpleNamespace(engine=SimpleNamespace(collective_rpc=rpc))
    assert asyncio.run(delta.collective_rpc(original)(server, method, args=(False,))) == answer


def test_an_engine_that_does_not_answer_stops_the_sync(monkeypatch):
    monkeypatch.setattr("ray.get", lambda refs: refs)

    async def never():
        await asyncio.sleep(60)

    found, told = manager(["a"], answer=never)
    with pytest.raises(SyncError, match=r"did not say within 0\.1 s which weights they hold"):
        asyncio.run(delta.announce(found, DELTA.replace(sync_timeout=0.1)))
    assert not told


@pytest.mark.parametrize(("sync", "backend", "asked"), [("delta", "nccl", 1), ("full", "nccl", 0), ("delta", "naive", 0)])
def test_engines_are_asked_before_a_delta_sync_over_a_checkpoint_engine(sync, backend, asked, monkeypatch):
    monkeypatch.setattr(session, "is_active", lambda: True)
    monkeypatch.setattr(session, "active_config", lambda: Config(sync=sync).resolved())
    calls = []

    async def announce(manager, config):
        calls.append("announce")

    async def original(self, global_steps):
        calls.append("sync")
        return {}

    monkeypatch.setattr(delta, "announce", announce)
    monkeypatch.setattr(metrics, "note_sync", lambda results: None)
    monkeypatch.setattr("ray.get", lambda refs: refs)
    group = SimpleNamespace(world_size=0, update_weights=lambda **_: [])
    update = metrics._collected(original)
    asyncio.run(update(SimpleNamespace(backend=backend, actor_wg=group), 3))
    assert calls == ["announce"] * asked + ["sync"] * (backend != "naive")


def test_a_training_worker_takes_what_it_is_told(monkeypatch):
    monkeypatch.setattr(session, "active_config", lambda: DELTA)
    worker = SimpleNamespace(checkpoint_engine=SimpleNamespace())
    delta.attach(worker)
    worker.checkpoint_engine.jetrl_offer("a")
    assert WORKER.held == "a"
    delta.attach(SimpleNamespace())  # a worker without one: the reference's


@pytest.mark.parametrize(("sync", "ranks"), [("full", [0, 1]), ("delta", [0, -1])])
def test_no_rank_relays_the_buckets_of_a_delta_sync(sync, ranks, monkeypatch):
    """verl's NCCL engine lets ranks on the sender's node join each broadcast, with sizes from their own, whole weights."""
    monkeypatch.setattr(CheckpointEngineRegistry, "_registry", {})
    monkeypatch.setitem(sys.modules, "cupy", MagicMock())  # needs a GPU
    nccl = importlib.import_module("verl.checkpoint_engine.nccl_checkpoint_engine")
    monkeypatch.delitem(sys.modules, nccl.__name__)
    if not hasattr(nccl.NCCLCheckpointEngine, "_multi_sender_ranks"):
        pytest.skip("this verl has one sender")
    monkeypatch.setattr(session, "active_config", lambda: Config(sync=sync))
    monkeypatch.setattr(nccl.NCCLCheckpointEngine, "get_node_id", staticmethod(lambda: "node"))
    monkeypatch.setattr(nccl.NCCLCheckpointEngine, "_start_zmq_server", lambda self: setattr(self, "listen_port", 1))
    monkeypatch.setattr(nccl.NCCLCheckpointEngine, "ip", "", raising=False)
    engine = nccl.NCCLCheckpointEngine(1 << 20, is_master=True)
    delta.attach(SimpleNamespace(checkpoint_engine=engine))
    actors, _ = engine.build_topology(2, 1, [engine.prepare()] * 3)
    assert actors["rank"] == ranks


def test_the_greeting_of_a_colocated_engine_is_the_offer():
    WORKER.base = Sent()
    WORKER.base.identity = "a"
    delta.greeted("a")
    assert WORKER.base.begin() == "a"
    WORKER.base.identity = "a"
    WORKER.separate = True  # another process then sends the greeting, and this one knows
    delta.greeted("a")
    assert WORKER.base.begin() == ""
    WORKER.base = None
    delta.greeted("a")


@pytest.mark.parametrize("rank", [0, 1])
def test_over_a_checkpoint_engine_only_the_rank_that_sends_keeps_a_base(rank, monkeypatch):
    monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
    source = SimpleNamespace(base=Sent())
    source.base.identity = WORKER.held = "a"
    delta.choose_base(source)
    assert WORKER.base is source.base and source.base.begin() == ""  # colocated: the engine says what it holds
    source.base.identity, WORKER.separate = "a", True
    delta.choose_base(source)
    assert WORKER.base is source.base and (source.base is None) == (rank == 1)
    assert rank == 1 or source.base.begin() == "a"


class Pipe:
    """One end of a pair of sockets."""

    def __init__(self, inbox, outbox):
        self.inbox, self.outbox = inbox, outbox

    def recv_pyobj(self):
        return self.inbox.get(timeout=10)

    recv = recv_pyobj

    def send(self, reply):
        self.outbox.put(reply)

    send_pyobj = send

    def poll(self, timeout, event):
        return True


def test_the_first_reply_of_a_worker_is_the_identity_of_its_weights():
    to, back = queue.Queue(), queue.Queue()
    watched = transport.WatchedSocket(Pipe(back, to), transport.Peer(None, 10.0))
    worker = Pipe(to, back)
    greeter = transport._greeter(worker, "identity")
    watched.send_pyobj("handle")
    assert greeter.recv_pyobj() == "handle"
    greeter.send(b"")
    assert watched.recv() == b"identity"
    watched.send_pyobj("bucket")
    worker.recv_pyobj()
    worker.send(b"")
    assert watched.recv() == b"" and watched.greeting == b"identity"


def test_the_stream_is_read_after_the_greeting():
    order = []

    def weights():
        order.append("read")
        yield "a", SimpleNamespace(nbytes=1)

    socket = transport.WatchedSocket(Pipe(queue.Queue(), queue.Queue()), transport.Peer(None, 10.0))
    socket.greeting = b"abc"

    async def collect():
        return [
            item async for item in transport.ending_early(weights(), SimpleNamespace(socket=socket), order.append)
        ]

    asyncio.run(collect())
    assert order == ["abc", "read"]
