"""FSDP2 on this many ranks of gloo, with and without the FP8 all-gather. Prints ``FACTS {...}`` on rank 0; see test_gather."""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from jetrl_patch.fp8.convert import gather_in_fp8, swap_linears
from jetrl_patch.fp8.gather import Fp8Gathered, Fp8Shard
from tests.fp8.facts import tell
from tests.fp8.thresholds import sqnr
from tests.models import build

BACKEND, FOREACH = sys.argv[1], sys.argv[2] == "foreach"
GATHERED = {"bytes": 0}
QUANTIZED = {"calls": 0}


def make(gathered: bool, sharded: bool = True):
    """A small Qwen2 whose FP32 masters are not BF16 values, and the names of its layers gathered in FP8."""
    model = build("qwen2", num_hidden_layers=2).float().train()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 1e-3 * torch.rand(p.shape, generator=generator))
    names = swap_linears(model, backend=BACKEND)
    if not sharded:
        return model.to(torch.bfloat16), names
    done = gather_in_fp8(model, names, dist.get_world_size()) if gathered else []
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, done


def tokens(step: int, rank: int):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(2, 384, (2, 64), generator=generator)


def loss_of(model, ids):
    out = model(input_ids=ids, labels=ids, use_cache=False)
    return out.loss, out.logits.detach().clone()


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def equal(left, right) -> bool:
    return len(left) == len(right) and all(type(a) is type(b) and torch.equal(a, b) for a, b in zip(left, right))


def train(model, steps: int = 3):
    """Run a few steps of two micro-batches: losses, logits, gradients, weights, bytes gathered and weights quantized."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=FOREACH)
    found, GATHERED["bytes"], QUANTIZED["calls"] = [], 0, 0
    for step in range(steps):
        for micro in range(2):
            loss, logits = loss_of(model, tokens(10 * step + micro, dist.get_rank()))
            loss.backward()
            found += [loss.detach(), logits]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        found += [full(norm), *(full(p.grad) for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    counts = {"bytes": GATHERED["bytes"], "quantized": QUANTIZED["calls"]}
    return found + [full(p.detach()) for p in model.parameters()], counts, optimizer


def against_one_process(facts):
    """Sharded training in BF16 mixed precision, against one process with the same micro-batches."""
    model, _ = make(gathered=False)
    rank, world = dist.get_rank(), dist.get_world_size()
    loss, logits = loss_of(model, tokens(0, rank))
    loss.backward()
    sums, outputs = [], []
    for other in range(world):
        alone, _ = make(gathered=False, sharded=False)
        its_loss, its_logits = loss_of(alone, tokens(0, other))
        its_loss.backward()
        outputs.append((its_loss.detach(), its_logits))
        grads = [p.grad.float() for p in alone.parameters()]
        sums = [a + b for a, b in zip(sums, grads)] if sums else grads
    facts["outputs as one process"] = equal([loss.detach(), logits], list(outputs[rank]))
    ours = [full(p.grad) for p in model.parameters()]
    facts["gradients as the FP32 mean of one process"] = equal(ours, [g / world for g in sums])
    whole, _ = make(gathered=False, sharded=False)
    loss_of(whole, torch.cat([tokens(0, r) for r in range(world)]))[0].backward()
    facts["least dB against one batch"] = min(sqnr(a, p.grad) for a, p in zip(ours, whole.parameters()))


def gathered_bytes_are_those_of_the_whole_weight(model, names) -> bool:
    backend = model.get_submodule(names[0]).fp8.backend
    wholes = {name: full(model.get_submodule(name).weight.detach()) for name in names}
    good = []
    for layer in model.model.layers:
        layer.unshard()
    for name in names:
        weight = model.get_submodule(name).weight
        q, s = backend.quantize_weight(wholes[name].to(torch.bfloat16), "pow2")
        good.append(isinstance(weight, Fp8Gathered) and weight.dtype == torch.bfloat16)
        good.append(torch.equal(weight.q.view(torch.uint8), q.view(torch.uint8)) and torch.equal(weight.s_blocks, s))
    for layer in model.model.layers:
        layer.reshard()
    return all(good)


def checkpoints(facts, model, optimizer):
    """Sharded files hold plain tensors; DCP and full state dicts load into both kinds of model."""
    values = [full(p.detach()) for p in model.parameters()]
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    facts["files hold plain tensors"] = all(
        type(t.to_local()) is torch.Tensor for t in read.values() if isinstance(t, DTensor)
    )
    other, names = make(gathered=True)
    loss_of(other, tokens(0, 0))  # fills the cache, so that stale bytes would show
    other.load_state_dict(read)
    facts["torch.save"] = equal([full(p.detach()) for p in other.parameters()], values)
    facts["bytes after a load"] = gathered_bytes_are_those_of_the_whole_weight(other, names)
    path = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(path)
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=path[0])
    for kind in (True, False):
        other, _ = make(gathered=kind)
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=path[0])
        other.load_state_dict(state["model"])
        facts[f"DCP into {'FP8' if kind else 'BF16'} gathering"] = equal(
            [full(p.detach()) for p in other.parameters()], values
        )
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    facts["full state dict is plain"] = all(type(t) is torch.Tensor for t in whole.values())
    other, names = make(gathered=True)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, whole if dist.get_rank() == 0 else {}, options=options)
    facts["broadcast from rank 0"] = equal([full(p.detach()) for p in other.parameters()], values)
    facts["bytes after a broadcast"] = gathered_bytes_are_those_of_the_whole_weight(other, names)
    moved = other.to(torch.float32).to_empty(device="cpu")
    kept = [isinstance(moved.get_submodule(name).weight.to_local(), Fp8Shard) for name in names]
    facts["moving keeps the kind"] = all(kept)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    original = DefaultAllGather.__call__

    def counted(self, output_tensor, *args, **kwargs):
        GATHERED["bytes"] += output_tensor.nbytes
        return original(self, output_tensor, *args, **kwargs)

    DefaultAllGather.__call__ = counted
    facts: dict = {}
    against_one_process(facts)
    plain, _ = make(gathered=False)
    expected, before, _ = train(plain)
    ours, names = make(gathered=True)
    backend = type(ours.get_submodule(names[0]).fp8.backend)
    quantize = backend.quantize_weight

    def quantize_weight(self, *args):
        QUANTIZED["calls"] += 1
        return quantize(self, *args)

    backend.quantize_weight = quantize_weight
    found, after, optimizer = train(ours)
    facts["layers"] = len(names)
    facts["three steps"] = equal(found, expected)
    facts["bytes"] = [before["bytes"], after["bytes"]]
    facts["quantized"] = after["quantized"]
    facts["bytes of the whole weight"] = gathered_bytes_are_those_of_the_whole_weight(ours, names)
    facts["kept"] = all(isinstance(ours.get_submodule(n).weight.to_local(), Fp8Shard) for n in names)
    facts["optimizer is plain"] = all(
        type(full(t)) is torch.Tensor and (not isinstance(t, DTensor) or type(t.to_local()) is torch.Tensor)
        for state in optimizer.state.values() for t in state.values()
    )  # fmt: skip
    checkpoints(facts, ours, optimizer)
    tell(facts)


if __name__ == "__main__":
    main()
