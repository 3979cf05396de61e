"""Count a block in training: one of Hugging Face's, prepared for each mode as the trainer does. ``--write`` writes the page.

BF16 and ``linear`` use FlashAttention-2, as verl does. Its launches follow its source (``csrc/flash_attn``): the backward sums
dO * O and clears an FP32 dQ, computes, and converts dQ. With fewer key heads than query heads it sums dK and dV over the latter.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from benchmarks.counted.counter import DEVICE, Counter, Launch, hopper, record
from benchmarks.shapes import MODELS, PUBLISHED, Model
from jetrl_patch.config import Config
from scripts.tables import Row, filled, markdown

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "counted.md"
#: tokens of a micro-batch, in sequences of the same length
TOKENS, LENGTH = 16384, 2048
#: the first part of a model's name -> the type in its config.json. The attention of a mixture is that of its dense models
TYPES = {"Qwen2.5": "qwen2", "Qwen3": "qwen3", "Llama": "llama"}
MODES = ("bf16", "linear", "exact")
FLASH = "counted_flash"


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


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


def _flash(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """transformers' attention function: [B, H, T, D] -> [B, T, H, D], with the copies of its own wrapper."""
    B, H, T, D = query.shape
    q, k, v = (t.transpose(1, 2).reshape(B * T, -1, D) for t in (query, key, value))
    return _Flash.apply(q, k, v, pairs(T, H * D)).view(B, T, H, D), None


def pairs(tokens: int, width: int) -> float:
    """Pairs of query and key in causal attention over sequences of ``LENGTH``, times heads and head width."""
    return tokens * (LENGTH + 1) / 2 * width


@contextlib.contextmanager
def block(model: Model, mode: str) -> Iterator[Any]:
    """A block of these dimensions, prepared for a mode. "exact, FP8 KV cache" rounds its keys and values for that."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from jetrl_patch.exact.hf_attention import NAME, exact_attention
    from jetrl_patch.trainer.prepare import prepare_model

    config = AutoConfig.for_model(
        TYPES[model.name.split("-")[0]], hidden_size=model.hidden, intermediate_size=model.intermediate,
        num_attention_heads=model.heads, num_key_value_heads=model.kv_heads, head_dim=model.head_dim, num_hidden_layers=1,
        vocab_size=512,
    )  # fmt: skip
    align, _, cache = mode.partition(", ")
    known = {NAME: functools.partial(exact_attention, fp8_cache=bool(cache)), FLASH: _flash}
    with hopper(), mock.patch.dict(ALL_ATTENTION_FUNCTIONS._local_mapping, known):
        with torch.device(DEVICE):
            whole = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        whole.config._attn_implementation = FLASH
        if mode != "bf16":
            prepare_model(whole, Config(precision="fp8-unified", align=align).resolved(), device_type="cuda")
        yield whole.model.layers[0]


class Passes(NamedTuple):
    """Launches of a forward and of a backward pass, and milliseconds in which the weights are quantized once a step."""

    forward: list[Launch]
    backward: list[Launch]
    weights: float


def count_block(model: Model, mode: str, tokens: int = TOKENS) -> Passes:
    """One micro-batch of a block. The additional launches of a step's first micro-batch quantize the weights."""
    from jetrl_patch.exact import sequences
    from jetrl_patch.fp8.unchanged import unchanged_weights

    counted, amount = [], pairs(tokens, model.heads * model.head_dim)
    # the audit quantizes one layer of the whole model again, not one per block
    with block(model, mode) as layer, mock.patch("jetrl_patch.fp8.unchanged._audit"), unchanged_weights(layer):
        x = empty(1, tokens, model.hidden).requires_grad_()
        positions = empty(1, tokens, dtype=torch.int64)
        sequences.mark(positions, tokens // LENGTH)
        tables = tuple(empty(1, tokens, model.head_dim) for _ in range(2))
        for _ in range(2):
            with Counter(amount) as forward:
                y = layer(x, position_ids=positions, position_embeddings=tables)
            with Counter(amount) as backward:
                torch.autograd.grad(y, [x, *layer.parameters()], torch.empty_like(y))
            counted.append((forward.launches, backward.launches))
            del y
    first, again = (total([*ahead, *back])[2] for ahead, back in counted)
    return Passes(*counted[1], first - again)


@functools.cache
def moved(model: Model, mode: str) -> tuple[float, float]:
    """Bytes per token of a block's launches other than products, forward and backward."""
    forward, backward, _ = count_block(model, mode, LENGTH)
    total, back = (sum(launch.bytes for launch in launches if not launch.flops) / LENGTH for launches in (forward, backward))
    return total, back


# ---- The page -------------------------------------------------------------------------------------------------------


def total(launches: Sequence[Launch]) -> tuple[int, float, float]:
    """Launches, GB and milliseconds."""
    return len(launches), sum(x.bytes for x in launches) / 1e9, sum(x.seconds(PUBLISHED) for x in launches) * 1e3


def table() -> list[Row]:
    """A row for each model and mode."""
    rows: list[Row] = []
    for model in MODELS:
        passes = {mode: count_block(model, mode) for mode in MODES}
        base = total([*passes["bf16"].forward, *passes["bf16"].backward])[2]
        for mode, (forward, backward, weights) in passes.items():
            (n, gb, ms), (n_back, gb_back, ms_back) = total(forward), total(backward)
            rows.append({
                "model": model.name, "mode": mode, "launches, forward": n, "backward": n_back, "GB, forward": gb,
                "GB, backward": gb_back, "ms": ms + ms_back, "BF16 / this": base / (ms + ms_back), "ms, weights": weights,
            })  # fmt: skip
    return rows


def page(rows: list[Row]) -> str:
    """The text of ``docs/benchmarks/counted.md``."""
    bf16, fp8, wgrad, bandwidth = (f"{figure:.0f}" for figure in PUBLISHED)
    texts = {
        "peaks": f"{bandwidth} GB/s and {bf16} (BF16), {fp8} (FP8) and {wgrad} TFLOP/s (FP8, WGrad)",
        "batch": f"{TOKENS} tokens in sequences of {LENGTH}",
        "table": markdown(rows),
    }
    return filled(PAGE.read_text(), texts)


if __name__ == "__main__":
    text = page(table())
    if "--write" in sys.argv[1:]:
        PAGE.write_text(text)
    print(text)
