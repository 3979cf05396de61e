"""AdamW with quantized states against AdamW in FP64 and torch's, on whole parameters and on shards of any size."""

from __future__ import annotations

import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torchao")

from jetrl_patch.errors import ConfigError
from jetrl_patch.trainer import optimizer as module
from jetrl_patch.trainer.optimizer import SMALLEST, AdamW8bit, AdamWFp8, adamw, largest_update
from tests.optim.states import state_bytes

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}


def gradients(steps: int, n: int, seed: int = 0) -> list[torch.Tensor]:
    """Gradients of very different magnitudes, with whole blocks of zeros."""
    generator = torch.Generator().manual_seed(seed)
    found = [
        torch.randn(n, generator=generator) * 10.0 ** torch.randint(-6, 3, (n,), generator=generator)
        for _ in range(steps)
    ]
    for grad in found:
        grad[: n // 4] = 0
    return found


def run(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, grads: list[torch.Tensor]) -> torch.Tensor:
    for grad in grads:
        parameter.grad = grad.view(parameter.shape).to(parameter.dtype)
        optimizer.step()
    return parameter.detach().clone()


def oracle(grads: list[torch.Tensor], beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> torch.Tensor:
    """The updates of AdamW in FP64 without weight decay, in units of the learning rate [steps, n]."""
    m = v = torch.zeros_like(grads[0], dtype=torch.float64)
    found = []
    for t, grad in enumerate(grads, 1):
        g = grad.double()
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        found.append(-(m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps))
    return torch.stack(found)


def updates(kind: type[torch.optim.Optimizer], grads: list[torch.Tensor], lr: float = 1e-3) -> torch.Tensor:
    """The same of an optimizer. The parameter is set to 0 before each step, so that nothing is rounded away."""
    parameter = torch.nn.Parameter(torch.zeros_like(grads[0]))
    optimizer = kind([parameter], lr=lr, weight_decay=0.0)
    found = []
    for grad in grads:
        with torch.no_grad():
            parameter.zero_()
        parameter.grad = grad.clone()
        optimizer.step()
        found.append(parameter.detach().double() / lr)
    return torch.stack(found)


def rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


#: how many times larger the gradient of one weight in a block of 256 is; the largest is 2^17, where e4m3 ends
OUTLIERS = (1.0, 1e2, 1e3, 1e4, 1e5)


@pytest.mark.parametrize("kind", [AdamW8bit, AdamWFp8])
@pytest.mark.parametrize("outlier", OUTLIERS)
def test_updates_beside_an_outlier_are_those_of_adamw(kind, outlier):
    """torchao's classes: up to 320 times too large from a thousandfold on, single ones 4,000 times the learning rate."""
    torch.manual_seed(0)
    std = torch.full((SMALLEST,), 1e-4)
    std[::256] *= outlier
    neighbours = torch.ones(SMALLEST, dtype=torch.bool)
    neighbours[::256] = False
    grads = [std * torch.randn(SMALLEST) for _ in range(250)]
    found, expected = updates(kind, grads)[200:], oracle(grads)[200:]
    for part in (neighbours, ~neighbours):
        assert 0.8 < rms(found[:, part]) / rms(expected[:, part]) < 1.25
        assert rms(found[:, part] - expected[:, part]) < (0.25 if outlier < 1e4 else 0.7) * rms(expected[:, part])
        assert found[:, part].abs().max() < 3 * expected[:, part].abs().max()


@pytest.mark.parametrize("kind", [AdamW8bit, AdamWFp8])
def test_the_second_moment_follows_a_gradient_that_shrinks(kind):
    """Over a thousand steps, with gradients of a block from 1e-4 to 1e-2, which at the end are ten times smaller."""
    torch.manual_seed(0)
    std = torch.logspace(-4, -2, 256).repeat(SMALLEST // 256)
    grads = [std * torch.randn(SMALLEST) * (1.0 if t < 600 else 0.1) for t in range(1000)]
    found, expected = updates(kind, grads), oracle(grads)
    for at in (slice(550, 600), slice(950, 1000)):
        assert 0.8 < rms(found[at]) / rms(expected[at]) < 1.2


@pytest.mark.parametrize("kind", [AdamW8bit, AdamWFp8])
@pytest.mark.parametrize("n", [512, SMALLEST + 100])
def test_states_of_bf16_parameters_that_are_not_quantized_are_fp32(kind, n):
    """In BF16 a second moment can rise and not fall: an increment of a thousandth is rounded away."""
    torch.manual_seed(1)
    parameter = torch.nn.Parameter(torch.ones(n, dtype=torch.bfloat16))
    optimizer = kind([parameter], lr=0.0, weight_decay=0.0)
    expected = torch.zeros(n, dtype=torch.float64)
    for _ in range(300):
        parameter.grad = (torch.randn(n) * 1e-2).bfloat16()
        expected = 0.999 * expected + 0.001 * parameter.grad.double() ** 2
        optimizer.step()
    rest = optimizer.state[parameter]["exp_avg_sq_rest"]
    assert rest.dtype == optimizer.state[parameter]["exp_avg_rest"].dtype == torch.float32
    torch.testing.assert_close(rest.double(), expected[n - rest.numel() :], rtol=1e-4, atol=0.0)


@given(
    st.sampled_from([(0.9, 0.999), (0.9, 0.95), (0.0, 0.99), (0.95, 0.9025), (0.9, 0.5)]),
    st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=60),
)
def test_no_gradients_make_a_larger_update(betas, values):
    grads = [torch.tensor([value]) for value in values]
    most = [largest_update(torch.tensor(float(t)), *betas).item() for t in range(1, len(values) + 1)]
    assert (oracle(grads, *betas, eps=0.0)[:, 0].abs().nan_to_num() <= torch.tensor(most)).all()


def test_a_second_moment_that_was_lost_moves_no_weight_further() -> None:
    """Divided by almost nothing, an update is as large as AdamW's can be at this step, and no larger."""
    p, lr, step = torch.zeros(2), torch.tensor(0.5), torch.tensor(3.0)
    adamw(p, torch.zeros(2), step, torch.tensor([1.0, -1.0]), torch.full((2,), 1e-12), lr, 0.9, 0.999, 0.0, 1e-8, False)
    most = 0.5 * largest_update(step, 0.9, 0.999)
    assert torch.equal(p, torch.stack((-most, most)))


@pytest.mark.parametrize("steps", [1, 2, 10, 300])
def test_the_worst_gradients_reach_it(steps):
    """By Cauchy and Schwarz those proportional to aᵢ/bᵢ: (β1/β2)^i, the last one first."""
    grads = [torch.tensor([(0.9 / 0.999) ** (steps - t)], dtype=torch.float64) for t in range(1, steps + 1)]
    found = oracle(grads, eps=0.0)[-1].abs().item()
    assert largest_update(torch.tensor(float(steps)), 0.9, 0.999).item() == pytest.approx(found, rel=3e-4)


@pytest.mark.parametrize("kind", [AdamW8bit, AdamWFp8])
@settings(max_examples=12, deadline=None)
@given(n=st.integers(SMALLEST - 2, SMALLEST + 600), seed=st.integers(0, 1000))
def test_what_is_left_over_is_adamw_itself(kind, n, seed):
    """Values after the last whole block, and small shards, have FP32 state: equal to a plain AdamW."""
    start, grads = torch.randn(n, generator=torch.Generator().manual_seed(seed)), gradients(3, n, seed)
    a, b = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizer = kind([a], **OPTIONS)
    found = run(optimizer, a, grads)
    expected = run(torch.optim.AdamW([b], **OPTIONS), b, grads)
    cut = n // 256 * 256 if n >= SMALLEST else 0
    assert torch.allclose(found[cut:], expected[cut:], rtol=1e-5, atol=1e-6)
    state = optimizer.state[a]
    assert ("exp_avg" in state) == (n >= SMALLEST) and ("exp_avg_rest" in state) == (n > cut)
    if cut:
        assert state["exp_avg"].shape == (n // 256, 256)


@pytest.mark.parametrize("kind", [AdamW8bit, AdamWFp8])
def test_shards_of_whole_blocks_add_up_to_the_whole(kind):
    """A rank's shard gets the same values as the whole parameter if the split falls between blocks."""
    start, grads = torch.randn(64 * 256), gradients(4, 64 * 256)
    whole = torch.nn.Parameter(start.clone())
    expected = run(kind([whole], **OPTIONS), whole, grads)
    for begin, end in ((0, 24 * 256), (24 * 256, 64 * 256)):
        part = torch.nn.Parameter(start[begin:end].clone())
        assert torch.equal(run(kind([part], **OPTIONS), part, [g[begin:end] for g in grads]), expected[begin:end])


@pytest.mark.parametrize("kind", [AdamW8bit, AdamWFp8])
def test_the_moments_take_about_a_quarter_of_fp32s_memory(kind):
    parameters = [torch.nn.Parameter(torch.randn(1024, 512)), torch.nn.Parameter(torch.randn(1000, 333))]
    optimizer = kind(parameters, **OPTIONS)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    kept, fp32 = state_bytes(optimizer)
    assert fp32 == 4 * 2 * sum(p.numel() for p in parameters)
    assert 0.25 * fp32 < kept < 0.26 * fp32
    plain = torch.optim.AdamW(parameters, **OPTIONS)
    plain.step()
    assert state_bytes(plain) == (fp32, fp32)


@pytest.mark.parametrize("kind", [AdamW8bit, AdamWFp8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_saved_and_loaded_go_on_bit_for_bit(kind, dtype):
    start, grads = torch.randn(5000).to(dtype), gradients(6, 5000)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = kind([parameter], **OPTIONS)
    half = run(optimizer, parameter, grads[:3])
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    expected = run(optimizer, parameter, grads[3:])
    for weights_only in (False, True):
        file.seek(0)
        again = torch.nn.Parameter(half.clone())
        resumed = kind([again], **OPTIONS)
        resumed.load_state_dict(torch.load(file, weights_only=weights_only))
        assert torch.equal(run(resumed, again, grads[3:]), expected)
        fresh = torch.nn.Parameter(half.clone())
        assert not torch.equal(run(kind([fresh], **OPTIONS), fresh, grads[3:]), expected)


def test_states_of_another_kind_are_refused():
    """As of an earlier jetrl_patch, which stored the second moment itself."""
    parameter = torch.nn.Parameter(torch.zeros(SMALLEST))
    optimizer = AdamWFp8([parameter])
    parameter.grad = torch.ones(SMALLEST)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg_sq"] = saved["state"][0].pop("exp_avg_sq_root")
    before = dict(optimizer.state[parameter])
    with pytest.raises(ConfigError, match=r"saved states of AdamWFp8: required .*, found exp_avg_sq\. Load the checkpoint"):
        optimizer.load_state_dict(saved)
    assert optimizer.state[parameter].keys() == before.keys()


def test_the_learning_rate_stays_a_number_and_a_scheduler_moves_it():
    parameter = torch.nn.Parameter(torch.randn(4096))
    optimizer = AdamW8bit([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1.0)
    parameter.grad = torch.ones(4096)
    optimizer.step()
    scheduler.step()
    moved = parameter.detach().clone()
    optimizer.step()
    assert scheduler.get_last_lr() == [0.0] and torch.equal(parameter.detach(), moved)


@pytest.mark.parametrize("kind", [AdamW8bit, AdamWFp8])
def test_a_model_may_have_any_number_of_shapes(kind, monkeypatch):
    """On a GPU the update is compiled once for each shape; by default torch.compile refuses the ninth."""
    compiled = torch.compile(adamw, fullgraph=True, dynamic=False, backend="eager")
    shapes = [SMALLEST + 256 * i + (i % 2) for i in range(9)]  # two parts where a rest is left: 13 shapes in all
    start = [torch.randn(n) for n in shapes]
    limit = torch._dynamo.config.recompile_limit

    def stepped(update):
        monkeypatch.setattr(module, "_update_on", lambda device: update)
        parameters = [torch.nn.Parameter(value.clone()) for value in start]
        optimizer = kind(parameters, **OPTIONS)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        return parameters

    torch._dynamo.reset()
    for found, expected in zip(stepped(compiled), stepped(adamw), strict=True):
        assert torch.equal(found, expected)
    assert torch._dynamo.config.recompile_limit == limit


def test_amsgrad_is_refused():
    parameter = torch.nn.Parameter(torch.randn(8))
    parameter.grad = torch.ones(8)
    with pytest.raises(NotImplementedError, match="amsgrad"):
        AdamWFp8([parameter], amsgrad=True).step()
