"""AdamW with quantized state against torchao's and torch's, on whole parameters and on shards of any size."""

from __future__ import annotations

import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torchao")

import torchao.optim
from torchao.optim.adam import single_param_adam

from jetrl_patch.trainer import optimizer as adamw
from jetrl_patch.trainer.optimizer import SMALLEST, AdamW8bit, AdamWFp8
from tests.optim.states import state_bytes

CLASSES = [(AdamW8bit, torchao.optim.AdamW8bit), (AdamWFp8, torchao.optim.AdamWFp8)]
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


@pytest.mark.parametrize(("ours", "theirs"), CLASSES)
def test_the_same_numbers_as_torchaos_class_on_whole_blocks(ours, theirs):
    """Bit-equal to torchao's own update, run eagerly on its own states."""
    start, grads = torch.randn(32, 256), gradients(5, 32 * 256)
    a, b = (torch.nn.Parameter(start.clone()) for _ in range(2))
    found = run(ours([a], **OPTIONS), a, grads)
    with torch.compiler.set_stance("force_eager"):
        expected = run(theirs([b], **OPTIONS), b, grads)
    assert torch.equal(found, expected) and not torch.equal(found, start)


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
    compiled = torch.compile(single_param_adam, fullgraph=True, dynamic=False, backend="eager")
    shapes = [SMALLEST + 256 * i + (i % 2) for i in range(9)]  # two parts where a rest is left: 13 shapes in all
    start = [torch.randn(n) for n in shapes]
    limit = torch._dynamo.config.recompile_limit

    def stepped(update):
        monkeypatch.setattr(adamw, "_update_on", lambda device: update)
        parameters = [torch.nn.Parameter(value.clone()) for value in start]
        optimizer = kind(parameters, **OPTIONS)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        return parameters

    torch._dynamo.reset()
    for found, expected in zip(stepped(compiled), stepped(single_param_adam), strict=True):
        assert torch.equal(found, expected)
    assert torch._dynamo.config.recompile_limit == limit


def test_amsgrad_is_refused():
    parameter = torch.nn.Parameter(torch.randn(8))
    parameter.grad = torch.ones(8)
    with pytest.raises(NotImplementedError, match="amsgrad"):
        AdamWFp8([parameter], amsgrad=True).step()
