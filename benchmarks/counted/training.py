"""Forward and backward of one block of Hugging Face's model, as the trainer prepares it in each mode.

The attention of BF16 and ``linear`` is FlashAttention-2, which verl asks for. Its launches are those of its source
(``csrc/flash_attn``): the backward sums dO * O and clears an FP32 dQ, computes, converts dQ, and with fewer key heads than query
heads it sums dK and dV over the query heads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.counted.counter import Counter, Launch, record
from benchmarks.counted.hopper import DEVICE, hopper
from benchmarks.gpu.shapes import Model

#: tokens of a micro-batch, in sequences of the same length
TOKENS, LENGTH = 16384, 2048
#: model -> the type in its config.json
TYPES = {"Qwen2.5-7B": "qwen2", "Qwen3-8B": "qwen3", "Llama-3.1-8B": "llama"}
MODES = ("bf16", "linear", "exact")
FLASH = "counted_flash"


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, pairs: float) -> Tensor:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        record("flash forward", (q, k, v, out, lse), 2 * 2 * pairs)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.pairs = pairs
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        g = grad_outputs[0]
        dq32, delta = torch.empty_like(q, dtype=torch.float32), torch.empty_like(lse)
        dq, dk, dv, wide = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(q)
        grouped = q.shape[1] != k.shape[1]
        record("flash dO * O", (out, g, delta, dq32))
        made = (wide, wide) if grouped else (dk, dv)
        record("flash backward", (q, k, v, g, lse, delta, dq32, dq32, *made), 5 * 2 * ctx.pairs)
        record("flash dQ", (dq32, dq))
        for total in (dk, dv) if grouped else ():
            record("flash sum", (wide, total))
        return dq, dk, dv, None


def flash(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """transformers' attention function: [B, H, T, D] -> [B, T, H, D], with the copies of its own wrapper."""
    B, H, T, D = query.shape
    q, k, v = (t.transpose(1, 2).reshape(B * T, -1, D) for t in (query, key, value))
    return _Flash.apply(q, k, v, pairs(T, LENGTH, H * D)).view(B, T, H, D), None


def pairs(tokens: int, length: int, width: int) -> float:
    """Pairs of query and key in causal attention over sequences of one length, times heads and head width."""
    return tokens * (length + 1) / 2 * width


@contextlib.contextmanager
def block(model: Model, mode: str, best: str = "deep_gemm", rounds: bool = True) -> Iterator[Any]:
    """The one block of a model of these dimensions, prepared for a mode; ``best`` and ``rounds`` are those of ``hopper``."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from jetrl_patch.adapters.transformers.attention import NAME, exact_attention
    from jetrl_patch.adapters.transformers.prepare import prepare_model
    from jetrl_patch.config import Config

    config = AutoConfig.for_model(
        TYPES[model.name], hidden_size=model.hidden, intermediate_size=model.intermediate, num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads, head_dim=model.head_dim, num_hidden_layers=1, vocab_size=512,
    )  # fmt: skip
    known = {NAME: exact_attention, FLASH: flash}
    with hopper(best, rounds), mock.patch.dict(ALL_ATTENTION_FUNCTIONS._local_mapping, known):
        with torch.device(DEVICE):
            whole = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        whole.config._attn_implementation = FLASH
        if mode != "bf16":
            prepare_model(whole, Config(precision="fp8-unified", align=mode).resolved(), device_type="cuda")
        yield whole.model.layers[0]


class Passes:
    """The launches of a forward and of a backward pass, and in addition those that quantize the weights, once a step."""

    def __init__(self, forward: Sequence[Launch], backward: Sequence[Launch], weights: Sequence[Launch]) -> None:
        self.forward, self.backward, self.weights = tuple(forward), tuple(backward), tuple(weights)


def _twice(module: nn.Module, call: Any, inputs: Sequence[Tensor], amount: float) -> Passes:
    """Two micro-batches of a step: what the first launches in addition are the weights."""
    from jetrl_patch.fp8.unchanged import unchanged_weights

    counted = []
    parameters = list(module.parameters())
    # the guard of the promise quantizes one layer of the whole model again, not one of each block
    with mock.patch("jetrl_patch.fp8.unchanged._audit"), unchanged_weights(module):
        for _ in range(2):
            for t in inputs:
                t.grad = None
            with Counter(amount) as forward:
                outputs = call()
            gradients = [torch.empty_like(y) for y in outputs]
            with Counter(amount) as backward:
                torch.autograd.grad(outputs, [*inputs, *parameters], gradients)
            counted.append((forward.launches, backward.launches))
            del outputs
    (first, first_back), (again, again_back) = counted
    return Passes(again, again_back, _rest(first, again) + _rest(first_back, again_back))


def _rest(more: Sequence[Launch], fewer: Sequence[Launch]) -> list[Launch]:
    left = list(more)
    for launch in fewer:
        left.remove(launch)
    return left


def _tensor(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)


def count_block(model: Model, mode: str, best: str = "deep_gemm", tokens: int = TOKENS) -> Passes:
    """One micro-batch of a block."""
    from jetrl_patch.exact import attention as packed

    with block(model, mode, best) as layer:
        x = _tensor(1, tokens, model.hidden)
        positions = torch.empty(1, tokens, dtype=torch.int64, device=DEVICE)
        packed.mark(positions, tokens // LENGTH)
        tables = tuple(torch.empty(1, tokens, model.head_dim, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
        call = lambda: [layer(x, position_ids=positions, position_embeddings=tables)]  # noqa: E731
        return _twice(layer, call, [x], pairs(tokens, LENGTH, model.heads * model.head_dim))


def count_linears(
    model: Model, mode: str, best: str = "deep_gemm", tokens: int = TOKENS, rounds: bool = True
) -> Passes:
    """The linear layers of a block alone, each fed and asked by a tensor in BF16."""
    with block(model, mode, best, rounds) as layer:
        wide = model.heads * model.head_dim
        a, b, c, d = (_tensor(tokens, width) for width in (model.hidden, wide, model.hidden, model.intermediate))
        attention, mlp = layer.self_attn, layer.mlp
        pairs_of = [
            (attention.q_proj, a), (attention.k_proj, a), (attention.v_proj, a), (attention.o_proj, b),
            (mlp.gate_proj, c), (mlp.up_proj, c), (mlp.down_proj, d),
        ]  # fmt: skip
        linears = nn.ModuleList(linear for linear, _ in pairs_of)
        return _twice(linears, lambda: [linear(x) for linear, x in pairs_of], [a, b, c, d], 0.0)
