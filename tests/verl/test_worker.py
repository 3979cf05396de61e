"""The vLLM worker's side of the weight sync, with unpatched, different and failing trainers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from jetrl_patch import session
from jetrl_patch.adapters.verl import transport
from jetrl_patch.adapters.verl.state import WorkerState
from jetrl_patch.adapters.verl.transport import own
from jetrl_patch.config import Config
from jetrl_patch.errors import ConflictError, NotPatchedError, SyncError
from jetrl_patch.sync.receive import Receiver
from jetrl_patch.sync.send import SyncStats, quantized_stream
from tests.sync.fake_engine import LAYERS, SHAPES, TERMS, Engine, Ranks, weights

MINE = Config().resolved()


class Transport:
    def __init__(self, buckets, error=None):
        self.buckets, self.error, self.read = buckets, error, 0

    def receive_weights(self, on_bucket_received):
        for i, bucket in enumerate(self.buckets):
            self.read += 1
            on_bucket_received(bucket, i == len(self.buckets) - 1)
        if self.error:
            raise self.error


class Counter:
    """A receiver that only counts."""

    def __init__(self):
        self.got, self.broken = [], None

    def on_bucket(self, weights):
        self.got += weights

    def held(self):
        return ""

    def finish(self):
        if self.broken:
            raise SyncError(self.broken)
        return {"tensors": len(self.got)}

    def break_off(self, reason):
        self.broken = reason


class Worker:
    def __init__(self, receiver=None):
        self.jetrl_receiver = receiver or Counter()

    def _get_zmq_handle(self):
        return "ipc:///tmp/rl-colocate-zmq-01000000-replica-0-rank-0.sock"


@pytest.fixture
def call(monkeypatch):
    monkeypatch.setattr(session, "is_active", lambda: True)
    monkeypatch.setattr(session, "active_config", lambda: MINE)

    def run(buckets, **kwargs):
        monkeypatch.setattr(transport, "_transport", lambda *_: buckets)
        replacement = transport.update_weights_from_ipc(lambda self, **kw: "verl's own")
        return replacement(kwargs.pop("worker", None) or Worker(), use_shm=True, **kwargs)

    return run


def test_buckets_go_through_the_receiver(call):
    assert call(Transport([[("a", 1)], [("b", 2)]]), jetrl=MINE.to_env()) == {"tensors": 2}


def test_an_unpatched_trainer_is_read_to_the_end_so_that_it_does_not_hang(call):
    buckets = Transport([[("a", 1)], [("b", 2)]])
    with pytest.raises(NotPatchedError, match="trainer that syncs weights is not patched"):
        call(buckets)
    assert buckets.read == 2


def test_a_trainer_in_other_settings(call):
    with pytest.raises(ConflictError, match="settings of a vLLM worker"):
        call(Transport([]), jetrl=Config(precision="fp8-rollout").to_env())


def test_silence_and_breaks_are_sync_errors(call):
    import zmq

    with pytest.raises(SyncError, match="sent nothing for 300 s"):
        call(Transport([], zmq.Again()), jetrl=MINE.to_env())
    with pytest.raises(SyncError, match="broke off: BufferError"):
        call(Transport([], BufferError()), jetrl=MINE.to_env())


def test_a_transfer_that_breaks_on_one_rank_is_an_error_on_both(monkeypatch):
    """The executor reads the answer of rank 0 first, and rank 0 has received everything."""
    ranks = Ranks()
    workers = [Worker(Receiver(Engine(rank, 2), TERMS, ranks.gather(rank))) for rank in range(2)]
    stream = list(quantized_stream(iter(weights().items()), terms=TERMS, layers=LAYERS, shapes=SHAPES, stats=SyncStats()))
    arriving = dict(zip(workers, (Transport([stream]), Transport([stream[:3]], BufferError("gone"))), strict=True))
    monkeypatch.setattr(transport, "_transport", lambda worker, *_: arriving[worker])
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(transport._receive, worker, True, 300.0) for worker in workers]
    for answer in answers:
        with pytest.raises(SyncError, match="the weight transfer broke off: BufferError: gone"):
            answer.result()


def test_bf16_is_verls_own(call, monkeypatch):
    bf16 = Config(precision="bf16")
    monkeypatch.setattr(session, "active_config", lambda: bf16)
    assert call(Transport([]), jetrl=bf16.to_env()) == "verl's own"


def test_a_worker_that_lost_its_patches(call, monkeypatch):
    monkeypatch.setattr(session, "is_active", lambda: False)
    with pytest.raises(NotPatchedError, match="disabled in this vLLM worker"):
        call(Transport([]), jetrl=MINE.to_env())
    assert call(Transport([])) == "verl's own"


def test_a_worker_listens_to_its_own_run_and_sync(call):
    """Two runs with a Ray each have job 01000000 both, and so the same address in verl."""
    mine, other = Worker(), Worker()
    for sync in ("0123.1.0", "0123.2.0"):
        call(Transport([]), jetrl=MINE.to_env(), jetrl_sync=sync, worker=mine)
        assert mine._get_zmq_handle() == f"ipc:///tmp/rl-colocate-zmq-01000000-replica-0-rank-0-{sync}.sock"
    call(Transport([]), jetrl=MINE.to_env(), jetrl_sync="4567.2.0", worker=other)
    assert other._get_zmq_handle() == own(Worker()._get_zmq_handle(), "4567.2.0") != mine._get_zmq_handle()
    assert own("ipc:///x.sock", "") == "ipc:///x.sock"


def test_no_two_syncs_have_one_address(monkeypatch):
    monkeypatch.setattr(transport, "run_id", lambda: "0123")
    ranks = [WorkerState(), WorkerState()]
    found = [[transport.sync_id(rank, step) for step in (None, 0, 1, 1, 1, 2, 1)] for rank in ranks]
    assert found[0] == found[1]  # ranks meet where the first of them says
    assert found[0][2:6] == ["0123.1.0", "0123.1.1", "0123.1.2", "0123.2.0"] and len(set(found[0][:6])) == 6
