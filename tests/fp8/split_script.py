"""Run under torchrun: layers, logits and sequences that a trainer splits over its ranks, against one rank that holds all.

    torchrun --nproc_per_node=N split_script.py rows|vocabulary|heads

Prints a JSON line of facts on rank 0; every fact covers all ranks.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist


def rows(rank: int, ranks: int) -> dict[str, bool]:
    """Row-parallel FP8 layers of several shapes: Y, and the gradients of X and W."""
    from jetrl_patch.fp8.linear import Fp8State, fp8_linear
    from jetrl_patch.fp8.parallel import RowRanks

    found = {}
    for tokens, each, splits, scattered in ((ranks * 5, 128, 1, True), (7, 256, 2, False), (1, 128, 1, False)):
        generator = torch.Generator().manual_seed(tokens)
        K, N = each * ranks, 192
        x = torch.randn(tokens, 2, K, generator=generator).bfloat16()
        w = torch.randn(N, K, generator=generator).bfloat16() * 0.1
        dy = torch.randn(tokens, 2, N, generator=generator).bfloat16()
        if ranks * splits > 2:  # the first two sums are large and cancel, so the order of addition shows after rounding
            one, two = slice(0, 128), slice(128, 256)
            x[..., two] = x[..., one] = x[..., one] * 1024
            w[:, one] *= 1024
            w[:, two] = -w[:, one]
        whole_x, whole_w = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = fp8_linear(whole_x, whole_w, None, Fp8State("pow2", "torch", splits * ranks))
        y.backward(dy)
        columns = slice(rank * each, (rank + 1) * each)
        own_x, own_w = x[..., columns].clone().requires_grad_(), w[:, columns].clone().requires_grad_()
        state = Fp8State("pow2", "torch", splits, ranks=RowRanks(dist.group.WORLD, scattered))
        mine = fp8_linear(own_x, own_w, None, state)
        part = slice(rank * tokens // ranks, (rank + 1) * tokens // ranks) if scattered else slice(None)
        mine.backward(dy[part])
        name = f"{tokens} tokens, {splits} ranges a rank"
        found[f"{name}: y"] = torch.equal(mine, y[part])
        found[f"{name}: dx"] = torch.equal(own_x.grad, whole_x.grad[..., columns])
        found[f"{name}: dw"] = torch.equal(own_w.grad, whole_w.grad[:, columns])
    return found


def vocabulary(rank: int, ranks: int) -> dict[str, bool]:
    """Log-probs of split logits, and sums over them, with padding columns and banned tokens, in several blocks of rows."""
    from jetrl_patch.exact import logprob
    from jetrl_patch.exact.support import BANNED
    from jetrl_patch.exact.vocabulary import collision, summed, whole_vocabulary

    logprob.BLOCK_BYTES = 4 * 40 * 32  # 32 of 75 rows at a time
    found = {}
    generator = torch.Generator().manual_seed(0)
    T, width, V = 75, 40, 40 * ranks - 3

    def columns(of_all: Any) -> Any:
        """This rank's, with those that pad the vocabulary."""
        return torch.nn.functional.pad(of_all, (0, width * ranks - V))[:, rank * width : (rank + 1) * width]

    for dtype in (torch.bfloat16, torch.float32):
        logits = torch.randn(T, width * ranks, generator=generator).to(dtype)
        labels, dy = torch.randint(0, V - 5, (T,), generator=generator), torch.randn(T, generator=generator)
        temperature = torch.rand(T, 1, generator=generator) + 0.5
        outside = torch.arange(V) >= V - 4

        def ban(block: Any, part: slice, outside: Any = outside) -> Any:
            return block.masked_fill(outside, BANNED)

        alone = logits[:, :V].clone().requires_grad_()
        wanted = logprob.token_log_probs(alone, labels, temperature, edit=ban)
        wanted.backward(dy)
        own = logits[:, rank * width : (rank + 1) * width].clone().requires_grad_()
        edit = logprob.chained(whole_vocabulary(dist.group.WORLD, V, dtype), ban)
        mine = logprob.token_log_probs(own, labels, temperature, edit=edit)
        mine.backward(dy)
        found[f"{dtype}: log-probs"] = torch.equal(mine, wanted)
        found[f"{dtype}: gradient"] = torch.equal(own.grad, columns(alone.grad))
        for name, total in {"entropy": logprob.entropy, "collision": collision}.items():
            in_fp64, own = logits[:, :V].double().requires_grad_(), own.detach().requires_grad_()
            expected = total(torch.log_softmax(ban(in_fp64, slice(None)) / temperature, -1))
            expected.backward(dy.double())
            value = summed(own, temperature, edit, total)
            value.backward(dy)
            error = 1e-5 if dtype == torch.float32 else 1e-2  # gradients are BF16 too
            found[f"{dtype}: {name}"] = torch.allclose(value.double(), expected, atol=1e-5)
            found[f"{dtype}: gradient of {name}"] = torch.allclose(own.grad.double(), columns(in_fp64.grad), atol=error)
    return found


def heads(rank: int, ranks: int) -> dict[str, bool]:
    """Sequences in Megatron's zigzag of chunks: all tokens of some heads, and back, with gradients."""
    from jetrl_patch.adapters.megatron.exchange import HeadExchange

    lengths = [2 * ranks * n for n in (3, 1, 7, 2)]
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    H, D = 2 * ranks, 5
    every = torch.arange(int(cu[-1]) * H * D, dtype=torch.float32).view(-1, H, D)
    pieces = []
    for sequence in every.split(lengths):
        chunks = sequence.chunk(2 * ranks)
        pieces += [chunks[rank], chunks[2 * ranks - 1 - rank]]
    own = torch.cat(pieces).requires_grad_()
    exchange = HeadExchange(dist.group.WORLD, cu, len(own))
    mine = exchange.to_heads(own)
    part = slice(rank * H // ranks, (rank + 1) * H // ranks)
    again = exchange.to_tokens(mine * 2)
    again.backward(own.detach())  # its gradient by the same way back, times two
    one = own.detach()[:, :1].requires_grad_()
    shared = exchange.to_all(one)
    shared.backward(torch.full_like(shared, rank + 1))
    return {
        "heads": torch.equal(mine, every[:, part]),
        "tokens": torch.equal(again, own * 2),
        "gradient": torch.equal(own.grad, own.detach() * 2),
        "shared": torch.equal(shared, every[:, :1]),
        "gradient of shared": torch.equal(one.grad, torch.full_like(one, ranks * (ranks + 1) / 2)),
        "part": torch.equal(exchange.own(every.transpose(0, 1)), every[:, part].transpose(0, 1)),
    }


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = {"rows": rows, "vocabulary": vocabulary, "heads": heads}[sys.argv[1]](rank, ranks)
    everybody: list[Any] = [None] * ranks
    dist.all_gather_object(everybody, found)
    if rank == 0:
        print("FACTS", json.dumps({name: all(one[name] for one in everybody) for name in found}))
    dist.destroy_process_group()
