"""Run under torchrun: verl's Megatron and FSDP2 engines, patched, on the CPU: five steps on the same data.

    torchrun --nproc_per_node=2 megatron_beside_fsdp_script.py MODEL_DIR '{"tp": 2, ...}'

Megatron is set as in ``megatron_engine_script.py``; FSDP2 shards its parameters and the batch over all ranks. Both start from one
checkpoint, with verl's AdamW. Prints a JSON line of facts on rank 0.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jetrl_patch

STEPS = 5
RATE = 1e-4

Tensors = dict[str, Any]


def gradients_of(engine: Any) -> Tensors:
    """Megatron's gradients as Hugging Face names them, in BF16: what its bridge exports while they take the parameters' place."""
    import torch

    parameters = [p for chunk in engine.module for p in chunk.parameters()]
    with torch.no_grad():
        weights = [p.detach().clone() for p in parameters]
        for p in parameters:
            p.copy_(p.main_grad)
        found = weights_of(engine)
        for p, weight in zip(parameters, weights, strict=True):
            p.copy_(weight)
    return found


def whole(tensors: Mapping[str, Any]) -> Tensors:
    """FSDP2's tensors, gathered; collective."""
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for name, t in tensors.items()}


def reference(folder: str, rows: list[Any], vocabulary: int) -> Tensors:
    """The gradients of transformers' own model in FP64."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").double()
    for row in rows:
        logits = model(input_ids=row[None], use_cache=False).logits[0, :-1, :vocabulary]
        found = logits.log_softmax(-1).gather(-1, row[1:, None])[:, 0]
        (-(found * signs(len(found))).sum() / loss_of(rows)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def decibels(found: Tensors, expected: Tensors) -> float:
    """The SQNR of all tensors of ``expected`` together."""
    import torch

    error = sum(float((found[name].double() - tensor.double()).square().sum()) for name, tensor in expected.items())
    signal = sum(float(tensor.double().square().sum()) for tensor in expected.values())
    return float(10 * torch.log10(torch.tensor(signal / error)))


def step(engine: Any, batch: Any, loss: Any, look: Callable[[], Tensors] | None) -> tuple[float, Tensors]:
    """One update. Returns the norm of the gradients, and what ``look`` finds between the backward pass and the update."""
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch, loss)
        seen = look() if look else {}
        norm = engine.optimizer_step()
        engine.lr_scheduler_step()
    return float(norm), seen


def main(folder: str, given: dict[str, Any]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from fsdp_engine import build  # in this folder
    from verl.utils.distributed import initialize_global_process_group

    from jetrl_patch.adapters.verl.state import WORKER

    torch.set_num_threads(1)
    initialize_global_process_group()
    WORKER.rollout_tp = given.get("tp", 1)
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randint(1, 259, (length,), generator=generator) for length in LENGTHS]
    loss = loss_of(rows)

    megatron = engine_of(folder, {**given, "optimizer": {"lr": RATE}})
    megatron.initialize()
    vocabulary = len(megatron.model_config.tokenizer)
    every = batch_of(rows, [1.0] * len(rows), 1, [])

    settings = {"lr": RATE, "lr_scheduler_type": "constant", "lr_warmup_steps": 0}
    fsdp = build("fsdp2", folder, optimizer=settings, model={"load_tokenizer": True})
    fsdp.initialize()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    share = len(rows) // ranks
    own = batch_of(rows[rank * share : (rank + 1) * share], [1.0] * share, 1, [])

    def sharded() -> Tensors:
        return whole({name: p.grad for name, p in fsdp.module.named_parameters()})

    facts: dict[str, Any] = {"norms": []}
    for number in range(STEPS):
        first = number == 0
        theirs, expected = step(fsdp, own, loss_function(loss / ranks), sharded if first else None)
        ours, found = step(megatron, every, loss_function(loss), (lambda: gradients_of(megatron)) if first else None)
        facts["norms"].append([ours, theirs])
        if first:
            oracle = reference(folder, rows, vocabulary)
            facts |= {
                "megatron and fp64": decibels(found, oracle), "fsdp2 and fp64": decibels(expected, oracle),
                "megatron and fsdp2": decibels(found, expected),
                "worst": min(decibels({name: found[name]}, {name: expected[name]}) for name in oracle if expected[name].any()),
            }  # fmt: skip
            stepped, beside = weights_of(megatron), whole(fsdp.module.state_dict())
            pairs = [(stepped[name], beside[name].bfloat16()) for name in oracle]
            facts["weights"] = sum(a.numel() for a, _ in pairs)
            facts["equal"] = sum(int((a == b).sum()) for a, b in pairs)
            facts["apart"] = max(float((a.float() - b.float()).abs().max()) for a, b in pairs) / RATE
    return facts


if __name__ == "__main__":
    # in this folder
    from megatron_engine_script import LENGTHS, batch_of, engine_of, loss_function, loss_of, signs, weights_of

    jetrl_patch.enable(precision="fp8-unified", platform="cpu")
    found = main(sys.argv[1], json.loads(sys.argv[2]))
    import torch.distributed as dist
    from verl.utils.distributed import destroy_global_process_group

    if dist.get_rank() == 0:
        print("FACTS", json.dumps(found))
    destroy_global_process_group()
