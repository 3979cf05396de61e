"""Which weights fit FP16, the FP16 stream, and the loss-scale watch with torch's own scaler."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_patch.errors import ModelError, PrecisionError, SyncError
from jetrl_patch.sync.send import SyncStats, check_fits, half_stream, misfit
from jetrl_patch.trainer.precision import LossScale, at_smallest

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0,), (0, 4), (), (3, 5)])
def test_what_fits(dtype, shape):
    weight = torch.full(shape, -1.5, dtype=dtype)
    assert misfit(weight) == ""
    assert misfit(torch.zeros(3, dtype=torch.int64)) == ""
    assert misfit(torch.empty(3, device="meta")) == ""


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (65504.0, ""),
        (65519.0, ""),  # rounds down to 65504
        (65520.0, "|w| = 65520"),
        (-70000.0, "|w| = 70000"),
        (math.inf, "Inf"),
        (-math.inf, "Inf"),
        (math.nan, "NaN"),
        (1e-30, ""),
    ],
)
def test_the_border(value, why):
    weight = torch.ones(4, 3)
    weight[2, 1] = value
    assert misfit(weight) == why
    assert misfit(weight.double()) == why


def test_inf_in_fp16_says_where_it_comes_from():
    assert "above 65504" in misfit(torch.tensor([70000.0]).half())


def test_a_checkpoint_is_refused_with_its_first_three_names():
    weights = [(f"layers.{i}.weight", torch.full((2,), 1e5)) for i in range(12)]
    says = r"checkpoint X does not fit FP16.*layers\.0\.weight has \|w\| = 100000.*layers\.2\.weight has [^;]* and 9 more"
    with pytest.raises(ModelError, match=says):
        check_fits([("fine", torch.ones(2)), *weights], "the checkpoint X")
    check_fits([("fine", torch.ones(2))], "the checkpoint X")


def test_the_stream_is_fp16_and_counted():
    stats = SyncStats()
    weights = [("a", torch.randn(4, 6)), ("b", torch.randn(3).bfloat16()), ("position", torch.arange(5))]
    sent = dict(half_stream(weights, stats))
    assert {name: tensor.dtype for name, tensor in sent.items()} == {
        "a": torch.float16, "b": torch.float16, "position": torch.int64,
    }  # fmt: skip
    for name, weight in weights:
        assert torch.equal(sent[name], weight.to(sent[name].dtype))
    assert (stats.total, stats.tensors, stats.quantized) == (2 * 24 + 2 * 3 + 8 * 5, 3, 0)


@pytest.mark.parametrize("value", [1e5, math.nan, math.inf])
def test_the_stream_stops_at_a_weight_that_does_not_fit(value):
    stream = half_stream([("a", torch.ones(2)), ("bad", torch.tensor([1.0, value])), ("c", torch.ones(2))], SyncStats())
    assert next(stream)[0] == "a"
    with pytest.raises(SyncError, match=r"bad has .*, which FP16 cannot hold"):
        next(stream)


class Training:
    """One parameter under torch's GradScaler on the CPU, stepped as verl's engine does, with the plugin's watch."""

    def __init__(self, growth_interval: int = 400, **options: float) -> None:
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.0)
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=growth_interval, **options)
        self.watch = LossScale()

    def step(self, factor: float) -> None:
        """The scaled gradient is FP16, as under autocast: ``factor`` times the scale, or Inf."""
        self.optimizer.zero_grad()
        self.scaler.scale((self.weight * factor).sum()).backward()
        self.weight.grad = self.weight.grad.half().float()
        self.scaler.unscale_(self.optimizer)
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.watch.note(skipped=self.scaler.get_scale() < before, scale=self.scaler.get_scale())

    def steps(self, count: int, factor: float) -> None:
        for _ in range(count):
            self.step(factor)


def test_overflow_halves_the_scale_and_is_counted():
    training = Training()
    assert training.watch.figures() == {}
    for factor in (0.1, 2.0, 2.0, 0.1):  # 2 · 65536 and 2 · 32768 are Inf in FP16
        training.step(factor)
    assert training.watch.figures() == {"loss_scale": 2.0**14, "skipped_steps": 2.0}
    assert training.watch.in_a_row == 0


def test_growth_is_no_skip():
    training = Training(growth_interval=3)
    for _ in range(6):
        training.step(1e-4)
    assert training.watch.figures() == {"loss_scale": 2.0**18, "skipped_steps": 0.0}


def test_nan_at_every_scale_ends_at_the_smallest():
    training = Training()
    with pytest.raises(PrecisionError, match=r"at the smallest loss scale \(1\), after 17 skipped steps"):
        training.steps(50, math.nan)
    assert training.watch.skipped == 17


def test_too_many_in_a_row_from_a_great_scale():
    training = Training(init_scale=2.0**40)
    with pytest.raises(PrecisionError, match=r"20 optimizer steps in a row were skipped .* \(loss scale now 1.04858e\+06\)"):
        training.steps(50, math.inf)
    assert training.watch.skipped == training.watch.in_a_row == 20


@settings(max_examples=60, deadline=None)
@given(st.lists(st.booleans(), max_size=30), st.integers(1, 4))
def test_counts_are_those_of_a_plain_loop(bad, growth):
    """Compared with a written-out loop, for any order of good and bad steps."""
    training, scale, good, skipped, row = Training(growth_interval=growth, init_scale=2.0**60), 2.0**60, 0, 0, 0
    for overflow in bad:
        row = row + 1 if overflow else 0
        if row == 20:
            with pytest.raises(PrecisionError):
                training.step(math.nan)
            return
        training.step(math.nan if overflow else 0.0)
        skipped += overflow
        good = 0 if overflow else good + 1
        scale *= 0.5 if overflow else 2.0 if good == growth else 1.0
        good %= growth
        assert training.watch.figures() == {"loss_scale": scale, "skipped_steps": skipped}
        assert training.watch.in_a_row == row


def test_the_two_errors_say_what_to_do():
    assert "Use precision='bf16'" in str(at_smallest(3))
