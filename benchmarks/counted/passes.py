"""The passes that the page counts: a block in training, its linear layers, and a decoding step of vLLM.

Training is one block of Hugging Face's model, prepared for each mode as the trainer does. BF16 and ``linear`` use
FlashAttention-2, as verl does. Its launches follow its source (``csrc/flash_attn``): the backward sums dO * O and clears an FP32
dQ, computes, converts dQ, and with fewer key heads than query heads sums dK and dV over the query heads.

Decoding runs the norms, activations and linear methods of ``adapters/vllm``. vLLM's own norm and activation read and write what
their kernels do (``csrc/layernorm_kernels.cu``, ``csrc/activation_kernels.cu``). Attention, with the rotary embedding and the
cache, is left out, because the modes do not differ in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.counted.counter import DEVICE, Counter, Launch, hopper, record, size
from benchmarks.shapes import Linear, Model
from jetrl_patch.backends import get_backend
from jetrl_patch.backends.quantize import Quantized
from jetrl_patch.config import Config
from jetrl_patch.kernels.formats import FP8, groups

#: tokens of a micro-batch, in sequences of the same length
TOKENS, LENGTH = 16384, 2048
#: model -> the type in its config.json
TYPES = {"Qwen2.5-7B": "qwen2", "Qwen3-8B": "qwen3", "Llama-3.1-8B": "llama"}
MODES = ("bf16", "linear", "exact")
FLASH = "counted_flash"


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
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
    """A block of these dimensions, prepared for a mode; ``best`` and ``rounds`` as in ``hopper``."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from jetrl_patch.adapters.transformers.attention import NAME, exact_attention
    from jetrl_patch.adapters.transformers.prepare import prepare_model
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


class Passes(NamedTuple):
    """Launches of a forward and of a backward pass, and those that quantize the weights once a step."""

    forward: list[Launch]
    backward: list[Launch]
    weights: list[Launch]


def _twice(module: nn.Module, call: Any, inputs: Sequence[Tensor], amount: float) -> Passes:
    """Run two micro-batches of a step. The additional launches of the first quantize the weights."""
    from jetrl_patch.fp8.unchanged import unchanged_weights

    counted = []
    parameters = list(module.parameters())
    # the audit quantizes one layer of the whole model again, not one per block
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


def count_block(model: Model, mode: str, best: str = "deep_gemm", tokens: int = TOKENS) -> Passes:
    """One micro-batch of a block."""
    from jetrl_patch.exact import attention as packed

    with block(model, mode, best) as layer:
        x = _empty(1, tokens, model.hidden).requires_grad_()
        positions = _empty(1, tokens, dtype=torch.int64)
        packed.mark(positions, tokens // LENGTH)
        tables = tuple(_empty(1, tokens, model.head_dim) for _ in range(2))
        call = lambda: [layer(x, position_ids=positions, position_embeddings=tables)]  # noqa: E731
        return _twice(layer, call, [x], pairs(tokens, LENGTH, model.heads * model.head_dim))


def count_linears(
    model: Model, mode: str, best: str = "deep_gemm", tokens: int = TOKENS, rounds: bool = True
) -> Passes:
    """The linear layers of a block alone; inputs and gradients are BF16."""
    with block(model, mode, best, rounds) as layer:
        wide = model.heads * model.head_dim
        a, b, c, d = (_empty(tokens, width).requires_grad_() for width in (model.hidden, wide, model.hidden, model.intermediate))
        attention, mlp = layer.self_attn, layer.mlp
        pairs_of = [
            (attention.q_proj, a), (attention.k_proj, a), (attention.v_proj, a), (attention.o_proj, b),
            (mlp.gate_proj, c), (mlp.up_proj, c), (mlp.down_proj, d),
        ]  # fmt: skip
        linears = nn.ModuleList(linear for linear, _ in pairs_of)
        return _twice(linears, lambda: [linear(x) for linear, x in pairs_of], [a, b, c, d], 0.0)


# ---- A decoding step of the rollout ---------------------------------------------------------------------------------

ROWS = 64
#: models whose q, k and v have a bias
BIASED = ("Qwen2.5-7B",)


def count_decode(model: Model, fp8: bool, best: str = "deep_gemm", rows: int = ROWS) -> list[Launch]:
    """The linear layers alone, fused as in vLLM, with the quantization of X. Both FP8 modes have the same linears."""
    with hopper(best), torch.no_grad(), Counter() as counted:
        for _, N, K in model.linears:
            x = _empty(rows, K)
            if not fp8:
                torch.nn.functional.linear(x, _empty(N, K))
                continue
            s_blocks = _empty(groups(N), groups(K), dtype=torch.float32)
            get_backend(best).fprop(x, Quantized(_empty(N, K, dtype=FP8), s_blocks, "blocks", "pow2"))
    return counted.launches


def _layer(linear: Linear, config: Config) -> Any:
    """A stand-in for one of vLLM's linear layers, with what its method reads."""
    from jetrl_patch.adapters.vllm.formats import BLOCKS
    from jetrl_patch.adapters.vllm.method import QuantizedLinearMethod

    G = groups(linear.K)
    rows, blocks = (_empty(height, G, dtype=torch.float32) for height in (linear.N, groups(linear.N)))
    method = QuantizedLinearMethod(config, linear.name, packed={}, cut=[])
    weight = _empty(linear.N, linear.K, dtype=FP8)
    return SimpleNamespace(weight=weight, weight_scale_inv=rows, quant_method=method, **{BLOCKS: blocks})


def _vllm_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    record("fused_add_rms_norm", (x, residual, weight, x, residual))  # writes both in place
    return x, residual


def _vllm_silu(both: Tensor) -> Tensor:
    y = _empty(both.shape[0], both.shape[1] // 2)
    record("silu_and_mul", (both, y))
    return y


def count_step(model: Model, mode: str, fused: bool, best: str = "deep_gemm") -> tuple[list[Launch], int]:
    """The launches, and how many of the bytes they read are weights and scales."""
    from jetrl_patch.adapters.vllm.ops import ExactRMSNorm, ExactSiluAndMul, FusedNorm, FusedSiluAndMul

    config = Config(precision="fp8-unified", align=mode).resolved()
    with hopper(best), torch.no_grad(), Counter() as counted:
        qkv, o, gate_up, down = (_layer(linear, config) for linear in model.linears)

        def module(kind: type, layer: Any, **own: Any) -> Any:
            made = kind() if fused else SimpleNamespace()
            made.__dict__.update(jetrl_reader=layer, jetrl_backend=get_backend(best), **own)
            return made

        def norm(x: Tensor, residual: Tensor, layer: Any) -> Any:
            weight = _empty(model.hidden)
            if not fused and mode == "linear":
                return _vllm_norm(x, residual, weight)
            given = {"weight": weight, "variance_epsilon": 1e-6, "variance_size_override": None, "has_weight": True}
            own = module(FusedNorm, layer, **given)
            return own.forward(x, residual) if fused else ExactRMSNorm.forward(own, x, residual)

        def silu(both: Tensor) -> Any:
            if not fused and mode == "linear":
                return _vllm_silu(both)
            own = module(FusedSiluAndMul, down)
            return own.forward(both) if fused else ExactSiluAndMul.forward(own, both)

        def times(layer: Any, x: Any, bias: Tensor | None = None) -> Tensor:
            product: Tensor = layer.quant_method.apply(layer, x, bias)
            return product

        x, residual = norm(_empty(ROWS, model.hidden), _empty(ROWS, model.hidden), qkv)
        times(qkv, x, _empty(qkv.weight.shape[0]) if model.name in BIASED else None)
        x = times(o, _empty(ROWS, model.heads * model.head_dim))
        x, residual = norm(x, residual, gate_up)
        times(down, silu(times(gate_up, x)))
    held = sum(size(layer.weight) + size(layer.weight_scale_blocks) for layer in (qkv, o, gate_up, down))
    return counted.launches, held
