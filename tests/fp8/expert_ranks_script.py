"""Run under torchrun: experts that ranks share, beside a layer that holds all of them.

    torchrun --nproc_per_node=R expert_ranks_script.py columns|experts|one [RANKS of the rollout] [scale format] [plain]

The ranks have different numbers of tokens; one expert has none. Prints a JSON line of facts on rank 0.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from jetrl_patch.fp8.expert_ranks import ExpertRanks, ranked_experts_forward
from jetrl_patch.fp8.experts import Experts, experts_forward
from jetrl_patch.fp8.mixture import WHOLE, ExpertSplit, PlainProducts
from tests.fp8.mixture import Layer

EXPERTS, UNUSED = 12, 7


def main(split: ExpertSplit, form: str, plain: bool) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    layer = Layer(23, experts=EXPERTS, width=256, dtype=torch.float32)
    layer.ids = torch.where(layer.ids == UNUSED, (layer.ids.sum(1, keepdim=True) + torch.arange(3)) % UNUSED, layer.ids)
    free = torch.tensor([[e for e in range(UNUSED) if e not in row][:3] for row in layer.ids.tolist()])
    twice = torch.tensor([len(set(row)) < 3 for row in layer.ids.tolist()])
    layer.ids[twice] = free[twice]
    products = PlainProducts(exact=True) if plain else None
    whole = Experts(EXPERTS, form, "native", split, products)
    ends = [*(0, 5, 16)[:size], 23]
    mine = slice(ends[rank], ends[rank + 1])
    g = torch.Generator().manual_seed(1)
    dy = torch.randn(23, 320, generator=g).bfloat16()

    masters = (layer.x, layer.gate_up, layer.down, layer.weights)
    y = experts_forward(layer.x, layer.gate_up, layer.down, layer.weights, layer.ids, whole)
    y.backward(dy)
    wanted = [master.grad for master in masters]

    ranks = ExpertRanks(dist.group.WORLD, EXPERTS)
    here = slice(ranks.held.start, ranks.held.stop)
    own = Experts(ranks.each, form, "native", split, products)
    cut = (layer.x[mine], layer.weights[mine], *layer.gate_up[here], *layer.down[here])
    x, weights, *matrices = (part.detach().clone().requires_grad_() for part in cut)

    def run() -> torch.Tensor:
        gate_up, down = matrices[: ranks.each], matrices[ranks.each :]
        return ranked_experts_forward(x, gate_up, down, weights, layer.ids[mine], own, ranks)

    found = run()
    found.backward(dy[mine])
    gradients = [matrix.grad for matrix in matrices]
    facts = {
        "y": torch.equal(found, y[mine]),
        "gate_up": torch.equal(torch.stack(gradients[: ranks.each]), wanted[1][here]),
        "down": torch.equal(torch.stack(gradients[ranks.each :]), wanted[2][here]),
        "weights": torch.equal(weights.grad, wanted[3][mine]),
        "x": float((x.grad - wanted[0][mine]).norm() / wanted[0][mine].norm()),
        "unused": bool((wanted[2][UNUSED] == 0).all()),
    }
    with torch.no_grad():
        facts["without gradients"] = torch.equal(run(), found)
    every: list[Any] = [None] * size
    dist.all_gather_object(every, facts)
    return {key: [each[key] for each in every] for key in facts}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    kind, count, form = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    split = WHOLE if kind == "one" else ExpertSplit(count, kind)  # type: ignore[arg-type]
    found = main(split, form, "plain" in sys.argv[4:])
    if dist.get_rank() == 0:
        print("FACTS", json.dumps(found))
    dist.destroy_process_group()
