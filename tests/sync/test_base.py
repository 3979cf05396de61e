"""Delta syncs between a sender and engines: after each, an engine holds the bytes of a full sync, or serves nothing."""

import pytest
import torch

from jetrl_patch.errors import SyncError
from jetrl_patch.sync.delta import PREFIX, Received, Sent
from jetrl_patch.sync.protocol import COMMIT, MANIFEST, Manifest
from jetrl_patch.sync.receive import Receiver, State
from jetrl_patch.sync.send import SyncStats, quantized_stream
from tests.sync.fake_engine import LAYERS, SHAPES, TERMS, Engine, weights

Q = "layers.0.self_attn.q_proj.weight"


class Trainer:
    """Weights that change a little with every update."""

    def __init__(self):
        self.weights = weights()
        self.base = Sent()
        self.stats = SyncStats()
        self.generator = torch.Generator().manual_seed(7)

    def update(self, share=0.01):
        for weight in self.weights.values():
            some = torch.rand(weight.shape, generator=self.generator) < share
            weight[some] *= -1

    def full(self):
        return list(_stream(self.weights, SyncStats(), None))

    def sync(self, *receivers, change=lambda items: items):
        """Send to all; returns what was sent."""
        held = {receiver.held() for receiver in receivers}
        self.base.offer(held.pop() if len(held) == 1 else "")
        self.stats = SyncStats()
        items = change(list(_stream(self.weights, self.stats, self.base)))
        for receiver in receivers:
            for start in range(0, len(items), 2):
                receiver.on_bucket(items[start : start + 2])
        for receiver in receivers:
            receiver.finish()
        return items


def _stream(tensors, stats, base):
    return quantized_stream(iter(tensors.items()), terms=TERMS, layers=LAYERS, shapes=SHAPES, stats=stats, base=base)


def make():
    return Receiver(Engine(), TERMS, base=Received())


def is_delta(items):
    assert bool(Manifest.decode(dict(items)[MANIFEST]).base) == any(name.startswith(PREFIX) for name, _ in items)
    return any(name.startswith(PREFIX) for name, _ in items)


def same_as_full(receiver, trainer):
    other = Receiver(Engine(), TERMS)
    other.on_bucket(trainer.full())
    other.finish()
    found, expected = receiver.installer.tensors, other.installer.tensors
    return found.keys() == expected.keys() and all(
        torch.equal(found[name].view(torch.uint8), expected[name].view(torch.uint8)) for name in expected
    )


def test_twenty_syncs_leave_the_bytes_of_a_full_sync():
    trainer, receiver = Trainer(), make()
    full = None
    for number in range(20):
        items = trainer.sync(receiver)
        sent = trainer.stats.total
        assert is_delta(items) == (number > 0)
        assert same_as_full(receiver, trainer)
        assert receiver.held() == trainer.base.identity != ""
        full = full or sent
        assert sent == full if number == 0 else sent < 0.25 * full
        assert trainer.stats.full == full and (number == 0) == (trainer.stats.changed == full)
        trainer.update()


def test_a_tensor_that_changed_everywhere_is_sent_itself():
    trainer, receiver = Trainer(), make()
    trainer.sync(receiver)
    trainer.weights[Q] = torch.randn(trainer.weights[Q].shape, generator=trainer.generator)
    names = [name for name, _ in trainer.sync(receiver)]
    assert Q in names and PREFIX + "norm.weight" in names
    assert same_as_full(receiver, trainer)


def test_unchanged_weights_cost_a_head_for_each_tensor():
    trainer, receiver = Trainer(), make()
    trainer.sync(receiver)
    items = trainer.sync(receiver)
    assert sum(tensor.nbytes for name, tensor in items if name not in (MANIFEST, COMMIT)) == trainer.stats.total <= 16 * 5
    assert trainer.stats.changed == 0 and same_as_full(receiver, trainer)


def test_a_restarted_engine_gets_everything():
    trainer, receiver = Trainer(), make()
    trainer.sync(receiver)
    trainer.update()
    restarted = make()
    assert not is_delta(trainer.sync(restarted))
    assert same_as_full(restarted, trainer)
    trainer.update()
    assert is_delta(trainer.sync(restarted)) and same_as_full(restarted, trainer)


def test_an_engine_that_missed_a_sync_gets_everything():
    trainer, receiver, other = Trainer(), make(), make()
    trainer.sync(receiver, other)
    trainer.update()
    trainer.sync(other)
    trainer.update()
    assert not is_delta(trainer.sync(receiver))
    assert same_as_full(receiver, trainer)


def test_engines_that_disagree_all_get_everything():
    trainer, receiver = Trainer(), make()
    trainer.sync(receiver)
    trainer.update()
    fresh = make()
    assert not is_delta(trainer.sync(receiver, fresh))
    trainer.update()
    assert is_delta(trainer.sync(receiver, fresh))
    assert same_as_full(receiver, trainer) and same_as_full(fresh, trainer)


def test_a_restarted_trainer_sends_everything():
    trainer, receiver = Trainer(), make()
    trainer.sync(receiver)
    trainer.base = Sent()
    assert not is_delta(trainer.sync(receiver))


def test_nothing_is_assumed_of_an_engine_that_does_not_answer():
    trainer, receiver = Trainer(), make()
    trainer.sync(receiver)
    items = list(_stream(trainer.weights, SyncStats(), trainer.base))  # no offer before it
    assert not is_delta(items)


def lose(items):
    return [item for item in items if item[0] != PREFIX + Q]


def corrupt(items):
    (place,) = [i for i, (name, _) in enumerate(items) if name == PREFIX + Q]
    record = items[place][1].clone()
    changes, symbols, width, _ = record[:16].view(torch.int32).tolist()
    record[16 + width * symbols + changes // 2] ^= 1  # one new byte
    return [*items[:place], (items[place][0], record), *items[place + 1 :]]


def shift(items):
    (place,) = [i for i, (name, _) in enumerate(items) if name == PREFIX + Q]
    record = items[place][1].clone()
    _, symbols, width, _ = record[:16].view(torch.int32).tolist()
    assert width == 1
    record[15 + symbols] = (record[15 + symbols] + 1) % 255  # the last gap
    return [*items[:place], (items[place][0], record), *items[place + 1 :]]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lose, f"missing from the sync: {Q}"),
        (corrupt, f"changed on the way: {Q}"),
        (shift, f"changed on the way: {Q}"),
        (lambda items: items[:-1], "ended before the commit"),
    ],
)
def test_a_lost_or_corrupted_delta_stops_the_engine_until_a_full_sync(change, match):
    trainer, receiver = Trainer(), make()
    trainer.sync(receiver)
    trainer.update()
    with pytest.raises(SyncError, match=match):
        trainer.sync(receiver, change=change)
    assert receiver.state is State.FAILED and receiver.held() == ""
    with pytest.raises(SyncError, match="does not generate"):
        receiver.check_serving()
    assert not is_delta(trainer.sync(receiver))
    assert receiver.state is State.SERVING and same_as_full(receiver, trainer)


def test_a_base_that_was_overwritten_in_memory_is_noticed_and_replaced():
    trainer, receiver = Trainer(), make()
    trainer.sync(receiver)
    receiver.base._tensors[Q].view(torch.uint8)[200, 100] ^= 1
    with pytest.raises(SyncError, match=f"changed on the way: {Q}"):
        trainer.sync(receiver)
    assert not is_delta(trainer.sync(receiver)) and same_as_full(receiver, trainer)


def test_changes_over_another_base_are_refused_before_anything_changes():
    trainer, receiver = Trainer(), make()
    trainer.sync(receiver)
    trainer.update()
    trainer.base.offer(trainer.base.identity)
    items = list(_stream(trainer.weights, SyncStats(), trainer.base))
    late = make()
    late.on_bucket(items)
    with pytest.raises(SyncError, match=r"the base of a delta sync: required .*, found none in this engine"):
        late.finish()
    assert late.state is State.FAILED and late.installer.poisoned == 0


def test_changes_in_a_sync_that_announced_none_are_refused():
    trainer, receiver = Trainer(), make()
    trainer.sync(receiver)
    trainer.update()
    changes = dict(trainer.sync(make(), receiver, change=lambda items: items))
    assert PREFIX + Q not in changes  # the engines disagree
    record = (PREFIX + Q, torch.zeros(16, dtype=torch.uint8))
    with pytest.raises(SyncError, match=f"changes of {Q} arrived, but this engine has no earlier version"):
        trainer.sync(make(), receiver, change=lambda items: [items[0], record, *items[1:]])


def test_an_aborted_sync_takes_the_base_away():
    trainer, receiver = Trainer(), make()
    trainer.sync(receiver)
    trainer.update()
    trainer.base.offer(receiver.held())
    receiver.on_bucket(list(_stream(trainer.weights, SyncStats(), trainer.base))[:2])
    receiver.restart()
    assert receiver.held() == ""
    assert not is_delta(trainer.sync(receiver)) and same_as_full(receiver, trainer)


def test_a_stream_that_breaks_takes_the_base_away():
    trainer, receiver = Trainer(), make()
    trainer.sync(receiver)
    whole = trainer.weights[Q].clone()
    trainer.weights[Q][0, 0] = float("nan")
    with pytest.raises(SyncError, match="NaN or Inf"):
        trainer.sync(receiver)
    trainer.weights[Q] = whole
    assert trainer.base.identity == ""
    receiver.restart()
    assert not is_delta(trainer.sync(receiver)) and same_as_full(receiver, trainer)


def test_a_guarded_layer_changes_its_dtype_between_syncs():
    trainer, receiver = Trainer(), make()
    trainer.sync(receiver)
    trainer.base.offer(receiver.held())
    items = list(
        quantized_stream(
            iter(trainer.weights.items()), terms=TERMS, layers=LAYERS[1:], shapes=SHAPES, stats=SyncStats(),
            guarded=LAYERS[:1], base=trainer.base,
        )
    )  # fmt: skip
    receiver.on_bucket(items)
    receiver.finish()
    sent = dict(items)
    assert sent[Q].dtype is torch.bfloat16 and PREFIX + "norm.weight" in sent
    assert torch.equal(receiver.installer.tensors[Q], sent[Q])
    assert Q + "_scale_inv" not in receiver.base._tensors


def test_tensor_parallel_ranks_each_keep_a_base():
    trainer = Trainer()
    ranks = [Receiver(Engine(rank, 2), TERMS, base=Received()) for rank in range(2)]
    found = []
    for rank, receiver in enumerate(ranks):
        receiver.gather = lambda mine, rank=rank: found[rank]
    for number in range(3):
        trainer.base.offer(ranks[0].held())
        items = list(_stream(trainer.weights, SyncStats(), trainer.base))
        assert is_delta(items) == (number > 0)
        rects = []
        for receiver in ranks:
            receiver.on_bucket(items)
            assert receiver.error is None
            rects.append((receiver._install(), None))
        found[:] = [rects, rects]
        for receiver in ranks:
            receiver.finish()
        assert ranks[0].held() == ranks[1].held() == trainer.base.identity
        trainer.update()
