"""Weights that are promised to stay unchanged are quantized once, on the GPU backends' code path. No other weight is cached."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import json
import os
import pickle
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from jetrl_patch import backends
from jetrl_patch.backends.quantize import quantize_weight
from jetrl_patch.errors import AuditError
from jetrl_patch.fp8 import linear, unchanged
from jetrl_patch.fp8.convert import swap_linears
from jetrl_patch.fp8.linear import PROMISES
from jetrl_patch.fp8.lora import Fp8LoraLinear, LowRank
from jetrl_patch.fp8.unchanged import unchanged_weights, written_weights

from ..models import build
from .test_training import PlainGpu

NAME, LAYERS, STEPS = PlainGpu.name, 3, 2


@pytest.fixture
def transposes():
    """The shapes of the weights that a DGrad had to transpose, in order."""
    return []


@pytest.fixture(autouse=True)
def quantized(monkeypatch, transposes):
    """The weights that the backend quantized, in order."""
    seen = []

    class Counting(PlainGpu):
        def quantize_weight(self, w_NK, scale_format):
            seen.append(w_NK.clone())
            return super().quantize_weight(w_NK, scale_format)

        def transposed(self, w):
            if w.transposed is None:
                transposes.append(w.shape)
            return super().transposed(w)

    monkeypatch.setitem(backends._LOADED, NAME, Counting())
    yield seen
    assert not PROMISES


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(256, 256, bias=False) for _ in range(LAYERS))

    def forward(self, x):
        return x + self.down_proj(self.gate_proj(x) * self.up_proj(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block()])
        self.call = lambda block, x: block(x)

    def forward(self, x):
        return self.call(self.layers[0], x)


def make(checkpointing=None, sharded=False):
    torch.manual_seed(0)
    model = Model()
    swap_linears(model, backend=NAME)
    if checkpointing is not None:
        model.call = functools.partial(checkpoint, use_reentrant=checkpointing == "reentrant")
    if sharded:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = init_device_mesh("cpu", (1,))
        for block in model.layers:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def micro_batches(step, count):
    generator = torch.Generator().manual_seed(step)
    for _ in range(count):
        yield torch.randn(96, 256, generator=generator).to(torch.bfloat16).requires_grad_()


def passes(model, step, accumulate, promised):
    """Forward and backward of all micro-batches of a step."""
    found = []

    def run():
        for x in micro_batches(step, accumulate):
            y = model(x)
            y.float().pow(2).mean().backward()
            found.extend((y.detach().clone(), x.grad))

    if promised:
        with unchanged_weights(model):
            run()
    else:
        run()
    return found


def test_a_write_that_torch_counts_is_seen_in_spite_of_the_promise(quantized):
    model, (x,) = make(), micro_batches(0, 1)
    with unchanged_weights(model):
        before = model(x)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.3)
        after = model(x)
    assert torch.equal(after, model(x)) and not torch.equal(after, before)


def train(model, accumulate, promised, quantized):
    """Outputs, gradients and weights of a few steps, and the number of quantized weights in each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found, counts = [], []
    for step in range(STEPS):
        quantized.clear()
        found += passes(model, step, accumulate, promised)
        counts.append(len(quantized))
        found += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found + [p.detach().clone() for p in model.parameters()], counts


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("checkpointing", [None, "reentrant", "other"])
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "FSDP2"])
def test_once_in_an_optimizer_step(accumulate, checkpointing, sharded, one_rank, quantized, transposes, monkeypatch):
    """Without the promise each forward and backward quantizes, and each backward transposes; with it results are the same."""
    expected, many = train(make(checkpointing, sharded), accumulate, False, quantized)
    assert len(transposes) == STEPS * accumulate * LAYERS
    transposes.clear()
    found, once = train(make(checkpointing, sharded), accumulate, True, quantized)
    assert not transposes
    # a recomputation hands its bytes to the gradients after it
    assert many == [accumulate * LAYERS * 2] * STEPS
    # and one layer is audited in each micro-batch
    assert once == [LAYERS + accumulate] * STEPS
    with monkeypatch.context() as patch:
        patch.setattr(linear, "backward_pass", lambda: None)
        plain, every = train(make(checkpointing, sharded), accumulate, False, quantized)
    assert every == [accumulate * LAYERS * (2 if checkpointing is None else 3)] * STEPS
    assert all(torch.equal(full(a), full(b)) for a, b in zip(plain, expected, strict=True))
    assert all(torch.equal(full(a), full(b)) for a, b in zip(found, expected, strict=True))


WRITES = {
    "data": lambda w: w.data.mul_(1.5),
    "in place": lambda w: w.detach().add_(1.0),
    "a kernel": lambda w: torch.from_numpy(w.detach().numpy()).neg_(),
    "storage": lambda w: w.untyped_storage().copy_(torch.zeros_like(w).untyped_storage()),
    "preserved version": lambda w: preserving(w, lambda: w.detach().add_(1.0)),
    "set": lambda w: setattr(w, "data", w.detach() * 2),
}


def preserving(w, write):
    with torch.autograd._unsafe_preserve_version_counter(w):
        write()


def bytes_of(model):
    """The bytes of a layer. The transposed bytes exist only while they are held."""
    layer = model.layers[0].gate_proj
    made = layer.fp8.quantized(layer.weight, own=True)
    assert (made.transposed is not None) == (layer.fp8.promise in PROMISES)
    assert made.transposed is None or torch.equal(made.transposed.view(torch.uint8), made.q.view(torch.uint8).t())
    return made.q.view(torch.uint8)


def current(model):
    return quantize_weight(model.layers[0].gate_proj.weight.detach().to(torch.bfloat16), "pow2").q.view(torch.uint8)


@pytest.mark.parametrize("write", WRITES)
def test_no_value_outlives_the_promise(write):
    """Any write to a weight between two blocks, whether or not the tensor shows it."""
    model = make()
    with unchanged_weights(model):
        first = bytes_of(model)
    WRITES[write](model.layers[0].gate_proj.weight)
    for _ in range(2):
        assert torch.equal(bytes_of(model), current(model))
        with unchanged_weights(model):
            assert torch.equal(bytes_of(model), current(model)) and bytes_of(model) is not first
            assert bytes_of(model).data_ptr() == bytes_of(model).data_ptr()


def test_a_write_that_breaks_the_promise_is_seen_by_its_version():
    model = make()
    with unchanged_weights(model):
        bytes_of(model)
        with torch.no_grad():
            model.layers[0].gate_proj.weight.neg_()
        assert torch.equal(bytes_of(model), current(model))


BROKEN = {
    "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=1.0).step(),
    "load": lambda model: model.load_state_dict({n: p * 3 for n, p in model.state_dict().items()}),
    "load of a layer": lambda model: model.layers[0].gate_proj.load_state_dict({"weight": torch.ones(256, 256)}),
    "load that assigns": lambda model: model.load_state_dict({n: -p for n, p in model.state_dict().items()}, assign=True),
    "in place": lambda model: model.layers[0].gate_proj.weight.detach().neg_(),
    "dtype": lambda model: model.to(torch.float64),
    "shape": lambda model: setattr(model.layers[0].gate_proj.weight, "data", torch.ones(128, 256)),
}


@pytest.mark.parametrize("how", ["step", "call"])
def test_a_compiled_optimizer_ends_the_promise(how):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = torch.compile(optimizer.step if how == "step" else lambda: optimizer.step(), backend="aot_eager")
    for _ in range(2):  # the first traces
        for x in micro_batches(0, 1):
            model(x).float().sum().backward()
        with unchanged_weights(model):
            before = bytes_of(model)
            step()
            assert torch.equal(bytes_of(model), current(model)) and not torch.equal(bytes_of(model), before)
    torch._dynamo.reset()


@pytest.mark.parametrize("write", BROKEN)
def test_a_broken_promise_is_seen(write):
    """Found by hooks, version and shape; the audit finds what leaves no trace."""
    model = make()
    for x in micro_batches(0, 1):
        model(x).float().sum().backward()
    with unchanged_weights(model):
        bytes_of(model)
        BROKEN[write](model)
        assert torch.equal(bytes_of(model), current(model))
    assert torch.equal(bytes_of(model), current(model))


@pytest.mark.parametrize("write", [lambda p: p.data[7].neg_(), lambda p: p.data.mul_(2)], ids=["bytes", "scales"])
def test_a_write_without_a_trace_is_audited(write, monkeypatch):
    """One layer after the other: a weight that changes between forward and backward ends the run, with its name.

    A changed sign leaves the scales as they are; a weight that is doubled keeps its bytes.
    """
    monkeypatch.setattr(unchanged, "_turns", itertools.count())
    model, found = make(), []

    def step():
        with unchanged_weights(model):
            for x in micro_batches(0, 1):
                y = model(x).float().pow(2).mean()
                for p in model.parameters():
                    write(p)
                y.backward()

    for _ in range(LAYERS):
        with pytest.raises(AuditError, match="required the same weight until the optimizer step") as error:
            step()
        found.append(str(error.value).split(":")[0])
    assert found == [f"layers.0.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    with unchanged_weights(model):
        for x in micro_batches(0, 1):
            model(x).float().sum().backward()


@pytest.mark.parametrize("checkpointing", ["reentrant", "other"])
def test_nothing_is_kept_after_a_backward_pass(checkpointing):
    model = make(checkpointing)
    passes(model, 0, 1, False)
    assert all(state._kept is None for _, state in unchanged._states(model))


@pytest.mark.parametrize("how", ["error", "early", "copy", "nested"])
def test_where_a_promise_ends(how, quantized):
    model = make()
    if how == "error":
        with contextlib.suppress(ZeroDivisionError), unchanged_weights(model):
            bytes_of(model)
            raise ZeroDivisionError
    elif how == "early":
        with unchanged_weights(model):
            bytes_of(model)
            with written_weights(model):
                model.layers[0].gate_proj.weight.data.neg_()
                assert torch.equal(bytes_of(model), current(model))
            assert torch.equal(bytes_of(model), current(model)) and bytes_of(model).data_ptr() == bytes_of(model).data_ptr()
    elif how == "copy":
        with unchanged_weights(model):
            bytes_of(model)
            other = copy.deepcopy(model)
            state = model.layers[0].gate_proj.fp8
            copies = other.layers[0].gate_proj.fp8.promise, pickle.loads(pickle.dumps(state.promise))
            assert state.promise in PROMISES and not PROMISES & set(copies)
        model = other
    else:
        with unchanged_weights(model):
            with unchanged_weights(model):
                bytes_of(model)
            model.layers[0].gate_proj.weight.data.neg_()
            assert torch.equal(bytes_of(model), current(model))
    model.layers[0].gate_proj.weight.data.neg_()
    quantized.clear()
    assert all(torch.equal(bytes_of(model), current(model)) for _ in range(2)) and len(quantized) == 2


def test_what_was_transposed_is_freed_with_the_promise():
    model = make()
    layer = model.layers[0].gate_proj
    with unchanged_weights(model):
        transposed = weakref.ref(layer.fp8.quantized(layer.weight, own=True).transposed)
        assert transposed() is not None
    assert transposed() is None


def test_without_gradients_nothing_is_transposed(quantized, transposes):
    """Log-probs need no W^T."""
    model = make()
    with unchanged_weights(model, gradients=False), torch.no_grad():
        for x in micro_batches(0, 2):
            model(x)
        kept = [state.quantized(layer.weight, own=True) for layer in model.layers[0].children() for state in (layer.fp8,)]
    assert not transposes and len(quantized) == LAYERS and all(made.transposed is None for made in kept)


def test_another_model_has_no_part_in_it(quantized):
    model, other = make(), make()
    with unchanged_weights(model):
        for _ in range(2):
            bytes_of(other)
    assert len(quantized) == 2


def test_what_is_sent_relies_on_no_promise(quantized):
    """The weight sync quantizes what it sends; those are the bytes of the next passes."""
    model = make()
    train(model, 2, True, quantized)
    layer = model.layers[0].gate_proj
    with unchanged_weights(model):
        bytes_of(model)
        layer.weight.data.neg_()
        sent = layer.fp8.quantized(layer.weight)
        assert sent.transposed is None
        assert torch.equal(sent.q.view(torch.uint8), current(model))
    with unchanged_weights(model):
        assert torch.equal(bytes_of(model), sent.q.view(torch.uint8))


def test_a_weight_that_lora_changes_is_not_the_layers_own(quantized):
    model = make()
    layer = model.layers[0].gate_proj
    layer.__class__ = Fp8LoraLinear
    x = torch.randn(8, 256).to(torch.bfloat16)
    plain = layer(x)
    with unchanged_weights(model):
        assert torch.equal(layer(x), plain)
        for factor in (0.5, 1.0):
            change = LowRank(torch.full((4, 256), factor), torch.ones(256, 4), 1.0)
            assert torch.equal(layer(x, change), layer(x, change)) and not torch.equal(layer(x, change), plain)
        assert torch.equal(layer(x), plain)


def test_inference_tensors_have_no_version(quantized):
    with torch.inference_mode():
        model = make()
        with unchanged_weights(model):
            for _ in range(2):
                model(torch.ones(4, 256))
    assert len(quantized) == 2 * LAYERS


def test_experts_are_kept_one_by_one(quantized, monkeypatch):
    monkeypatch.setattr(unchanged, "_audit", lambda named: None)
    model = build("qwen3_moe", num_hidden_layers=1).train()
    swap_linears(model, backend=NAME)
    ids = torch.arange(2, 50).view(2, 24)

    def step():
        model.zero_grad()
        for part in ids.split(1):
            model(input_ids=part, labels=part, use_cache=False).loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected, many = step(), len(quantized)
    quantized.clear()
    with unchanged_weights(model):
        found = step()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(quantized) < many / 2
    assert not any(a.shape == b.shape and torch.equal(a, b) for a, b in itertools.combinations(quantized, 2))


@pytest.mark.e2e
def test_two_ranks():
    """FSDP2 frees and gathers: what a step quantizes on each rank, the bits of its results, and the bytes of a sync after it."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    script = Path(__file__).with_name("unchanged_script.py")
    done = subprocess.run([*command, str(script)], env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("FACTS "))
    expected = {
        "every pass": [2 * 3 * LAYERS] * 2,
        "freed after each layer": [2 * 2 * LAYERS] * 2,
        "whole and promised": [LAYERS + 2] * 2,  # two micro-batches, in each of which one layer is audited
        "fp8_all_gather": [LAYERS, 0],  # after the first step the script itself gathers, and so quantizes, the new values
    }
    for facts in json.loads(line.removeprefix("FACTS ")):
        assert facts.pop("equal") and facts.pop("synced") and facts.pop("new values")
        assert facts == {f"{name}, {kind}": counts for name, counts in expected.items() for kind in ("reentrant", "other")}
