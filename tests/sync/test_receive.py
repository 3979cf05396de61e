"""The receiver: one sequence succeeds; every other ends in an error and in an engine that refuses to generate."""

import dataclasses
import re
import threading
from multiprocessing import shared_memory

import pytest
import torch

from jetrl_patch.errors import AuditError, NotPatchedError, SyncError
from jetrl_patch.sync.digest import digest
from jetrl_patch.sync.protocol import COMMIT, MANIFEST, PROTOCOL, Manifest, encode_json
from jetrl_patch.sync.receive import Receiver, State
from jetrl_patch.sync.send import SyncStats, quantized_stream
from tests.sync.fake_engine import LAYERS, SHAPES, TERMS, Engine, Ranks, weights

Q = "layers.0.self_attn.q_proj.weight"


def _sent(seed=0, **changes):
    arguments = {"terms": TERMS, "layers": LAYERS, "shapes": SHAPES, "stats": SyncStats()} | changes
    return list(quantized_stream(iter(weights(seed).items()), **arguments))


def _push(receiver, items, bucket=2):
    for start in range(0, len(items), bucket):
        receiver.on_bucket(items[start : start + bucket])
    return receiver.finish()


def _fails(items, error=SyncError, match="", engine=None, terms=TERMS):
    engine = engine or Engine()
    receiver = Receiver(engine, terms)
    with pytest.raises(error, match=match):
        _push(receiver, items)
    assert receiver.state is State.FAILED
    with pytest.raises(SyncError, match="does not generate"):
        receiver.check_serving()
    return receiver, engine


@pytest.mark.parametrize("bucket", [1, 2, 3, 100])
def test_a_whole_sync_serves_the_trainers_bytes(bucket):
    engine, items = Engine(), _sent()
    receiver = Receiver(engine, TERMS)
    assert receiver.state is State.SERVING
    report = _push(receiver, items, bucket)
    assert receiver.state is State.SERVING and receiver.check_serving() is None
    assert report["layers"] == 2 and report["tensors"] == 5
    assert (engine.poisoned, engine.finished) == (1, 1)
    sent = dict(items)
    assert torch.equal(engine.tensors[Q].view(torch.uint8), sent[Q].view(torch.uint8))


@pytest.mark.parametrize("missing", LAYERS)
def test_a_layer_that_only_one_side_quantizes_is_refused_whichever_side_it_is(missing):
    """A rollout that quantizes more than the trainer is the fault of verl#7519 turned round."""
    fewer = tuple(layer for layer in LAYERS if layer != missing)
    only = f"only in the trainer: none; only in the rollout: {missing}"
    _, engine = _fails(_sent(layers=fewer), AuditError, re.escape(only))
    assert not engine.poisoned and not engine.tensors
    only = f"only in the trainer: {missing}; only in the rollout: none"
    _fails(_sent(), AuditError, re.escape(only), engine=Engine(layers=fewer))


def test_is_receiving_and_does_not_serve_in_between():
    receiver = Receiver(Engine(), TERMS)
    receiver.on_bucket(_sent()[:3])
    assert receiver.state is State.RECEIVING
    with pytest.raises(SyncError, match="'receiving'"):
        receiver.check_serving()


def test_a_later_whole_sync_heals_the_engine():
    receiver, engine = _fails(_sent()[:-1], match="ended before")
    _push(receiver, _sent(seed=1))
    assert receiver.state is State.SERVING
    assert not torch.isnan(engine.tensors[Q].float()).any()


def test_a_whole_sync_ends_a_refusal():
    receiver = Receiver(Engine(), TERMS)
    receiver.refuse(SyncError("something else wrote a weight"))
    with pytest.raises(SyncError, match="something else wrote a weight"):
        receiver.check_serving()
    _push(receiver, _sent())
    assert receiver.check_serving() is None


@pytest.mark.parametrize("index", [1, 2, 5])
def test_a_missing_tensor_is_named_and_poison_stays(index):
    items = _sent()
    name = items.pop(index)[0]
    _, engine = _fails(items, match=f"missing from the sync: {name}")
    assert engine.poisoned == 2  # before the load, and again so that the half-loaded weights cannot be served


def test_a_byte_changed_on_the_way():
    items = [(name, tensor.clone()) for name, tensor in _sent()]
    dict(items)[Q].view(torch.uint8)[3, 3] ^= 1
    _fails(items, match=f"changed on the way: {Q}")


@pytest.mark.parametrize("name", [Q, "norm.weight"])
def test_a_byte_changed_by_the_loader(name):
    engine = Engine()
    engine.break_bytes = name
    _fails(_sent(), match=f"{name}: the bytes in the rollout engine are not those", engine=engine)


def test_a_scale_changed_by_the_loader():
    engine = Engine()
    engine.break_bytes = Q + "_scale_inv"
    _fails(_sent(), match=f"{Q}_scale_inv: the bytes", engine=engine)


def test_a_loader_that_drops_a_layer():
    engine = Engine()
    load = engine.load
    engine.load = lambda items: load([(n, t) for n, t in items if not n.startswith(Q)])
    _fails(_sent(), match=f"{Q} was sent, but no part of it is", engine=engine)


def test_a_loader_that_fails():
    engine = Engine()

    def load(items):
        raise KeyError("no such parameter")

    engine.load = load
    _fails(_sent(), match="could not load the weights: KeyError", engine=engine)


@pytest.mark.parametrize("field", ["precision", "align", "scale_format", "backend"])
def test_sides_that_compute_otherwise(field):
    mine = dataclasses.replace(TERMS, **{field: "other"})
    _, engine = _fails(_sent(), AuditError, rf"{field} is '.*' in the trainer and 'other' in the rollout", terms=mine)
    assert engine.poisoned == 0  # refused before anything changed


@pytest.mark.parametrize(("theirs", "ours"), [("mxfp8", "pow2"), ("pow2", "mxfp8")])
def test_sides_with_blocks_of_other_sizes(theirs, ours):
    """Refused at the manifest, before the first byte of a weight."""
    manifest = _sent(terms=dataclasses.replace(TERMS, scale_format=theirs))[:1]
    match = f"scale_format is '{theirs}' in the trainer and '{ours}' in the rollout"
    _, engine = _fails(manifest, AuditError, match, terms=dataclasses.replace(TERMS, scale_format=ours))
    assert engine.poisoned == 0 and not engine.tensors


def test_scales_that_mxfp8_announces():
    terms = dataclasses.replace(TERMS, scale_format="mxfp8")
    items = dict(_sent(terms=terms))
    expected = Manifest.decode(items[MANIFEST]).expected()
    for name in (f"{layer}.weight" for layer in LAYERS):
        N, K = items[name].shape
        assert expected[name + "_scale_inv"] == ((N, -(-K // 32)), "float32")
        assert tuple(items[name + "_scale_inv"].shape) == (N, -(-K // 32))


@pytest.mark.parametrize(("theirs", "ours"), [("", "2 ranges of experts"), ("2 ranges of columns", "2 ranges of experts")])
def test_sides_that_group_the_sums_over_experts_otherwise(theirs, ours):
    items = _sent(terms=dataclasses.replace(TERMS, experts=theirs))
    match = rf"required {ours}, as in the rollout, found {theirs or 'no split'} in the trainer\. Give the trainer"
    _, engine = _fails(items, AuditError, match, terms=dataclasses.replace(TERMS, experts=ours))
    assert engine.poisoned == 0


def test_sides_that_disagree_about_the_fp8_layers():
    engine = Engine(layers=(LAYERS[0], "layers.0.mlp.up_proj"))
    match = rf"only in the trainer: {LAYERS[1]}; only in the rollout: layers\.0\.mlp\.up_proj"
    _fails(_sent(), AuditError, match, engine=engine)
    assert engine.poisoned == 0


def test_an_unpatched_trainer():
    _fails(list(weights().items()), NotPatchedError, "before jetrl.manifest")


def test_nothing_at_all():
    _fails([], match="ended before")


def test_wrong_order():
    items = _sent()
    _fails([*items[:2], items[0], *items[2:]], match="second manifest")
    _fails([*items, items[1]], match="after the end")


def test_a_tensor_that_was_not_announced_or_has_another_form():
    items = _sent()
    _fails([items[0], ("extra", torch.ones(2)), *items[1:]], match="extra arrived, but the trainer had not announced")
    _fails([items[0], (Q, torch.ones(256, 128)), *items[2:]], match="'float32'\\) arrived")
    _fails([items[0], items[1], *items[1:]], match="arrived twice")


def test_a_protocol_of_another_version_or_garbage():
    _fails([(MANIFEST, encode_json({"version": 99}))], match=f"protocol: required {PROTOCOL}, found 99")
    _fails([(MANIFEST, encode_json({"version": PROTOCOL}))], match="malformed")
    _fails([(MANIFEST, torch.tensor([1, 2, 3], dtype=torch.uint8))], match="is not valid JSON")
    items = _sent()
    _fails([*items[:-1], (COMMIT, items[-1][1][:-20])], match="is not valid JSON")


def test_what_comes_after_a_failure_is_read_and_dropped():
    engine = Engine()
    receiver = Receiver(engine, TERMS)
    items = _sent()
    receiver.on_bucket([("extra", torch.ones(1))])
    receiver.on_bucket(items)
    with pytest.raises(NotPatchedError):
        receiver.finish()
    assert engine.tensors == {}


def test_a_broken_transfer():
    engine = Engine()
    receiver = Receiver(engine, TERMS)
    receiver.on_bucket(_sent()[:2])
    receiver.break_off("the transfer broke")
    assert receiver.state is State.FAILED and engine.poisoned == 2
    with pytest.raises(SyncError, match="the transfer broke"):
        receiver.finish()


def test_bf16_that_the_rollout_quantizes_itself():
    terms = dataclasses.replace(TERMS, precision="fp8-rollout", align="none", backend="")
    engine = Engine()
    engine.installed = lambda plain: []
    receiver = Receiver(engine, terms)
    assert _push(receiver, _sent(terms=terms))["layers"] == 2
    _fails(_sent(terms=terms)[:2], match="ended before", terms=terms)


def _two_ranks(streams, prepare=lambda engines: None):
    ranks = Ranks()
    engines = [Engine(0, 2), Engine(1, 2)]
    prepare(engines)
    receivers = [Receiver(engines[r], TERMS, ranks.gather(r)) for r in range(2)]
    results = [None, None]

    def run(r):
        try:
            results[r] = _push(receivers[r], streams[r])
        except Exception as error:
            results[r] = error

    threads = [threading.Thread(target=run, args=(r,)) for r in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    return results, receivers


def test_two_ranks_hold_the_tensor_between_them():
    results, receivers = _two_ranks([_sent(), _sent()])
    assert [r["layers"] for r in results] == [2, 2]
    assert {r.state for r in receivers} == {State.SERVING}


def test_a_failure_of_one_rank_fails_both_and_nobody_waits():
    results, receivers = _two_ranks([_sent(), _sent()[:-2]])
    assert all(isinstance(r, SyncError) for r in results), results
    assert {r.state for r in receivers} == {State.FAILED}


def test_a_rank_that_cannot_poison_its_weights_fails_both():
    """As with a GPU that has failed: every further write raises."""

    def breaks(engines):
        def fails(*_):
            raise RuntimeError("illegal memory access")

        engines[1].finish = engines[1].poison = fails

    results, receivers = _two_ranks([_sent(), _sent()], breaks)
    assert [type(result) for result in results] == [SyncError, SyncError], results
    assert all("illegal memory access" in str(result) for result in results)
    assert {receiver.state for receiver in receivers} == {State.FAILED}


def test_a_wrong_slice_on_one_rank_is_found():
    def swap(engines):
        engines[1].rank = 0  # loads the first half, too

    results, _ = _two_ranks([_sent(), _sent()], swap)
    assert all("elements are in the engine" in str(r) for r in results), results


def test_manifest_round_trip():
    manifest = Manifest.decode(dict(_sent())[MANIFEST])
    assert manifest.terms == TERMS and manifest.layers == tuple(sorted(LAYERS))
    assert manifest.expected()[Q + "_scale_inv"] == ((2, 1), "float32")
    assert digest(manifest.encode()) == digest(dict(_sent())[MANIFEST])


GUARDED = {"layers": LAYERS[1:], "guarded": LAYERS[:1]}


@pytest.mark.parametrize("bucket", [1, 2, 100])
def test_a_layer_leaves_fp8_with_the_manifest_that_says_so(bucket):
    engine, items = Engine(), _sent(**GUARDED)
    receiver = Receiver(engine, TERMS)
    _push(receiver, _sent(seed=1))
    report = _push(receiver, items, bucket)
    assert report["layers"] == 1 and engine.guarded == [LAYERS[0]] and receiver.guarded == {LAYERS[0]}
    assert engine.tensors[Q].dtype == torch.bfloat16 and torch.equal(engine.tensors[Q], weights()[Q].bfloat16())
    _push(receiver, _sent(seed=2, **GUARDED), bucket)
    assert engine.guarded == [LAYERS[0]], "once is enough"


def test_an_engine_that_starts_later_learns_it_from_its_first_manifest():
    engine = Engine()
    _push(Receiver(engine, TERMS), _sent(layers=(), guarded=LAYERS))
    assert engine.quantized_layers() == [] and sorted(engine.guarded) == sorted(LAYERS)


def test_bytes_of_a_layer_that_left_fp8_are_proven_too():
    engine = Engine()
    engine.break_bytes = Q
    _fails(_sent(**GUARDED), match=f"{Q}: the bytes in the rollout engine are not those", engine=engine)


def test_a_layer_that_left_fp8_must_be_in_memory():
    engine = Engine()
    installed = engine.installed
    engine.installed = lambda plain: [rect for rect in installed(plain) if rect.name != Q]
    _fails(_sent(**GUARDED), match=f"{Q} was sent, but no part of it is in the rollout engine", engine=engine)


def test_an_engine_that_cannot_change_a_layer_stops_and_serves_no_mix():
    engine = Engine()
    engine.refuses = True
    receiver, _ = _fails(_sent(**GUARDED), match="MemoryError: no room", engine=engine)
    assert engine.poisoned == 1 and receiver.guarded == set()
    engine.refuses = False
    _push(receiver, _sent(**GUARDED))
    assert receiver.state is State.SERVING


def test_a_layer_that_left_fp8_never_comes_back():
    engine = Engine()
    receiver = Receiver(engine, TERMS)
    _push(receiver, _sent(**GUARDED))
    with pytest.raises(AuditError, match=f"only in the trainer: {LAYERS[0]}"):
        _push(receiver, _sent())


def test_a_guard_for_a_layer_that_the_engine_does_not_have():
    _fails(_sent(**GUARDED), error=AuditError, match="only in the trainer", engine=Engine(layers=LAYERS[1:]))


@pytest.mark.parametrize("broken", ["digest", "loader"])
def test_a_failure_lets_go_of_the_transfers_buffer(broken):
    """verl closes its shared memory before the report, which a view that is still held would prevent."""
    engine, items = Engine(), _sent()
    if broken == "digest":
        items[1][1].view(torch.uint8)[3, 3] ^= 1
    else:
        engine.load = lambda items: items[0][1].reshape(7, -1)  # raises with the tensor in a frame
    shm = shared_memory.SharedMemory(create=True, size=1 << 20)
    try:
        buffer, offset = torch.frombuffer(shm.buf[: 1 << 20], dtype=torch.uint8), 0  # as verl does
        receiver = Receiver(engine, TERMS)
        for name, tensor in items:
            size = tensor.nbytes
            view = buffer[offset : offset + size].view(tensor.dtype).view(tensor.shape)
            take = lambda weights: receiver.on_bucket(weights)  # noqa: E731 - a caller's frame holds the bucket too
            take([(name, view.copy_(tensor))])
            offset += -(-size // 16) * 16
        del buffer, view
        shm.close()
        with pytest.raises(SyncError, match="changed on the way" if broken == "digest" else "could not load the weights"):
            receiver.finish()
    finally:
        shm.unlink()


def test_a_sync_that_was_given_up_leaves_nothing_to_the_next():
    receiver = Receiver(Engine(), TERMS)
    for left in ([], [("extra", torch.ones(1))], _sent()[:3]):
        receiver.on_bucket(left)
        receiver.restart()
        assert _push(receiver, _sent(seed=1))["layers"] == 2
