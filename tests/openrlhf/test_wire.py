"""Remote calls of a weight sync are counted and end in time, and a worker's error keeps its type."""

from __future__ import annotations

import threading
import time

import pytest
import ray
import torch

from jetrl_patch.adapters.openrlhf.transport import RayOrders, take_shared
from jetrl_patch.errors import AuditError, NotPatchedError, SyncError
from jetrl_patch.sync.orders import GroupWire, decode, encode, entries_of, send_all
from jetrl_patch.sync.send import Bucket

#: seconds that an answer may take on a busy machine
PATIENCE = 500


@pytest.fixture(scope="module", autouse=True)
def local_ray(tmp_path_factory):
    import tempfile

    with tempfile.TemporaryDirectory(prefix="jw", dir="/tmp", ignore_cleanup_errors=True) as folder:
        ray.init(num_cpus=4, include_dashboard=False, _temp_dir=folder, object_store_memory=80_000_000)
        yield
        ray.shutdown()


@ray.remote(num_cpus=0)
class Engine:
    """An engine with OpenRLHF's method, whose answer depends on the order."""

    def update_weight(self, name, dtype, shape, empty_cache=False):
        order = decode(name)
        if order is None or order["op"] == "stock":
            raise AssertionError("mismatch dtype: src torch.uint8, dst torch.bfloat16")
        if order["op"] == "audit":
            raise AuditError("trainer and rollout do not compute alike: a; b")
        if order["op"] == "die":
            import os

            os._exit(1)
        if order["op"] == "hang":
            time.sleep(3600)
        return [{"op": order["op"], "n": shape[0]}]


def started():
    """Two running engines; later silence is ordered by the test."""
    made = [Engine.remote() for _ in range(2)]
    RayOrders(made, PATIENCE).ask("begin")
    yield made
    for engine in made:
        ray.kill(engine)


@pytest.fixture(scope="module")
def engines(local_ray):
    yield from started()


@pytest.fixture
def lost_engines():
    """Engines for one test."""
    yield from started()


def test_orders_travel_as_names():
    order = decode(encode("bucket", entries=[("w", "float32", [2, 3], 16)]))
    assert order is not None and order["op"] == "bucket" and entries_of(order) == [("w", "float32", [2, 3], 16)]
    assert decode("model.layers.0.mlp.down_proj.weight") is None and decode(None) is None


@pytest.mark.e2e
def test_answers_come_from_every_engine_and_calls_are_counted(engines):
    orders = RayOrders(engines, PATIENCE)
    assert orders.ask("begin") == [[{"op": "begin", "n": 0}]] * 2
    send_all(GroupWire(orders, lambda flat: None), [Bucket(torch.zeros(7, dtype=torch.uint8), [])])
    assert orders.calls == 4


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("op", "error", "says"),
    [
        ("audit", AuditError, "do not compute alike: a; b"),
        ("stock", NotPatchedError, "a vLLM worker is not patched"),
    ],
)
def test_what_a_worker_raises(engines, op, error, says):
    with pytest.raises(error, match=says):
        RayOrders(engines, PATIENCE).ask(op)


@pytest.mark.e2e
def test_a_worker_that_dies(lost_engines):
    with pytest.raises(SyncError, match="failed or died"):
        RayOrders(lost_engines, PATIENCE).ask("die")


@pytest.mark.e2e
def test_a_silent_worker_ends_the_sync_also_while_the_trainer_blocks(lost_engines):
    with pytest.raises(SyncError, match="has not answered for 2 s"):
        RayOrders(lost_engines, 2).ask("hang")
    wire = GroupWire(RayOrders(lost_engines, 1), lambda flat: threading.Event().wait())
    with pytest.raises(SyncError, match="has not answered for 1 s"):
        send_all(wire, [Bucket(torch.zeros(7, dtype=torch.uint8), [])])


@pytest.mark.e2e
def test_a_broken_group_is_a_sync_error(engines):
    def broken(flat):
        raise RuntimeError("connection reset by peer")

    with pytest.raises(SyncError, match="connection reset by peer"):
        send_all(GroupWire(RayOrders(engines, PATIENCE), broken), [Bucket(torch.zeros(7, dtype=torch.uint8), [])])


class Road:
    """A wire that records its calls."""

    def __init__(self, breaks=None):
        self.log, self.travels, self.breaks = [], None, breaks

    def start(self, bucket):
        assert self.travels is None
        self.travels = bucket
        self.log.append(("start", bucket.entries[0][0]))

    def finish(self):
        name, self.travels = self.travels.entries[0][0], None
        self.log.append(("finish", name))
        if name == self.breaks:
            raise SyncError("a worker died")


def buckets(road, names, broken=False):
    for name in names:
        road.log.append(("make", name))
        yield Bucket(torch.zeros(1, dtype=torch.uint8), [(name, "uint8", [1], 0)])
    if broken:
        raise SyncError("w holds NaN or Inf")


def test_the_next_bucket_is_made_while_one_travels():
    road = Road()
    send_all(road, buckets(road, "abc"))
    made = [("make", "a"), ("start", "a"), ("make", "b"), ("finish", "a"), ("start", "b")]
    assert road.log == [*made, ("make", "c"), ("finish", "b"), ("start", "c"), ("finish", "c")]
    send_all(road, [])


def test_a_broken_stream_or_wire_ends_at_once():
    road = Road()
    with pytest.raises(SyncError, match="w holds NaN"):
        send_all(road, buckets(road, "ab", broken=True))
    assert road.log[-1] == ("finish", "b") and road.travels is None  # nothing is pending
    road = Road(breaks="a")
    with pytest.raises(SyncError, match="a worker died"):
        send_all(road, buckets(road, "abc"))
    assert ("start", "b") not in road.log and road.log.count(("finish", "a")) == 1
    road = Road(breaks="b")
    with pytest.raises(SyncError, match="w holds NaN"):  # the first error is the one to report
        send_all(road, buckets(road, "ab", broken=True))


def test_shared_bytes_on_a_cpu():
    flat = torch.arange(9, dtype=torch.uint8)
    assert torch.equal(take_shared({"cpu": flat.numpy().tobytes()}, None), flat)
