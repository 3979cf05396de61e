"""FSDP2 on ranks of gloo: how often a step quantizes a weight. Prints ``FACTS [...]``; see test_unchanged."""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from jetrl_patch import backends
from jetrl_patch.fp8 import linear
from jetrl_patch.fp8.convert import gather_in_fp8, swap_linears
from jetrl_patch.fp8.gather import Fp8Gathered
from jetrl_patch.fp8.unchanged import unchanged_weights
from tests.fp8.facts import tell
from tests.fp8.test_training import PlainGpu

NAMES = ("gate_proj", "up_proj", "down_proj")
COUNTED = {"calls": 0}


class Counting(PlainGpu):
    def quantize_weight(self, w_NK, scale_format):
        COUNTED["calls"] += 1
        return super().quantize_weight(w_NK, scale_format)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        for name in NAMES:
            setattr(self, name, nn.Linear(256, 256, bias=False))

    def forward(self, x):
        return x + self.down_proj(self.gate_proj(x) * self.up_proj(x))


class Model(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.layers = nn.ModuleList([Block()])
        self.call = functools.partial(checkpoint, use_reentrant=reentrant)

    def forward(self, x):
        return self.call(self.layers[0], x)


def make(reentrant, reshard=True, gathered=False):
    torch.manual_seed(0)
    model = Model(reentrant)
    names = swap_linears(model, backend=PlainGpu.name)
    if gathered:
        gather_in_fp8(model, names, dist.get_world_size())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    return model


def used(model):
    """The bytes that the next pass computes with."""
    block = model.layers[0]
    block.unshard()
    found = []
    for name in NAMES:
        layer = getattr(block, name)
        w = layer.weight
        kept = w.q if isinstance(w, Fp8Gathered) else layer.fp8.quantized(w, own=True).q
        found.append(kept.view(torch.uint8).clone())
    block.reshard()
    return found


def sent(model):
    """The bytes that a weight sync makes of the full values."""
    backend = backends.get_backend(PlainGpu.name)
    wholes = (getattr(model.layers[0], name).weight.full_tensor().to(torch.bfloat16) for name in NAMES)
    return [backend.quantize_weight(w, "pow2").q.view(torch.uint8) for w in wholes]


def same(left, right):
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right))


def train(model, promised):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found, counts, synced = [], [], True
    for step in range(2):
        COUNTED["calls"] = 0
        with unchanged_weights(model) if promised else contextlib.nullcontext():
            for micro in range(2):
                generator = torch.Generator().manual_seed(10 * step + micro + 100 * dist.get_rank())
                x = torch.randn(96, 256, generator=generator).to(torch.bfloat16).requires_grad_()
                y = model(x)
                y.float().pow(2).mean().backward()
                found += [y.detach().clone(), x.grad]
        counts.append(COUNTED["calls"])
        found += [p.grad.full_tensor() for p in model.parameters()]
        before = used(model)
        optimizer.step()
        optimizer.zero_grad()
        synced &= same(used(model), sent(model)) and not same(used(model), before)
    return found + [p.full_tensor().detach() for p in model.parameters()], counts, synced


def sees_new_values():
    """What FSDP2 gathers after shards were written inside a block, in the ways that end the promise."""
    model, good = make(False, reshard=False), []
    for write in (
        lambda: torch.optim.SGD(model.parameters(), lr=1.0).step(),
        lambda: model.load_state_dict({n: p * -2 for n, p in model.state_dict().items()}),
    ):
        with unchanged_weights(model):
            used(model)
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            write()
            good.append(same(used(model), sent(model)))
        good.append(same(used(model), sent(model)))
    return all(good)


def main() -> None:
    dist.init_process_group("gloo")
    backends._LOADED[PlainGpu.name] = Counting()
    facts = {"equal": True, "synced": True, "new values": sees_new_values()}
    for kind in ("reentrant", "other"):
        running, linear.backward_pass = linear.backward_pass, lambda: None
        expected, facts[f"every pass, {kind}"], synced = train(make(kind == "reentrant"), False)
        linear.backward_pass = running
        facts["synced"] &= synced
        for name, settings, promised in (
            ("freed after each layer", {}, False),
            ("whole and promised", {"reshard": False}, True),
            ("fp8_all_gather", {"gathered": True}, False),
        ):
            found, facts[f"{name}, {kind}"], synced = train(make(kind == "reentrant", **settings), promised)
            facts["equal"] &= same(found, expected)
            facts["synced"] &= synced
    tell(facts)


if __name__ == "__main__":
    main()
