"""Triton compiles a kernel anew for arguments of 1 and for multiples of 16: not for those that change from batch to batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from jetrl_patch.backends import quantize as formulas
from jetrl_patch.kernels import (
    attention_backward,
    delta_net,
    digest,
    elementwise,
    gemm,
    gemm_backward,
    gemm_common,
    gemm_grouped,
    head,
    latent,
    mixture,
    norm,
    quantize,
    silu,
)

from .specs import specs

BATCHES = (1, 2, 3, 16, 17, 31, 32, 128, 1008, 1024)
N, K = 64, 256


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[str, str]]]:
    """The kernels that launches on Hopper would compile, by name and by what Triton specializes on; nothing runs."""
    found: set[tuple[str, str]] = set()
    backend = make_backend(GPUTarget("cuda", 90, 32))

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        bind = create_function_from_signature(self.signature, self.params, backend)
        _, specialization, options = bind(*args, **kwargs)
        found.add((self.__name__, f"{specialization} {options}"))

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)  # lets tensors of a CPU pass the checks
    return found


def rows(M: int, width: int) -> torch.Tensor:
    return torch.randn(M, width).to(torch.bfloat16)


def weight() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, s = formulas.quantize_weight(torch.randn(N, K), "pow2")
    return q, s, formulas.expand_weight_scale(s, N)


def forward(M: int) -> None:
    q, _, s = weight()
    for dtype in (torch.bfloat16, torch.float32):
        gemm.fprop(*formulas.quantize_activation(rows(M, K), "pow2"), q, s, dtype)


def few(M: int) -> None:
    q, _, s = weight()
    if M <= gemm.ROWS:
        gemm.fprop_few(rows(M, K), q, s, "pow2")


def backward(M: int) -> None:
    q, blocks, _ = weight()
    gemm_backward.dgrad(*formulas.quantize_activation(rows(M, N), "pow2"), q, blocks)
    whole = -(-M // 128) * 128
    g, x = (torch.zeros(width, whole, dtype=torch.uint8).view(torch.float8_e4m3fn) for width in (N, K))
    gemm_backward.wgrad(g, torch.ones(whole // 128, N), x, torch.ones(whole // 128, K))


def quantized(M: int) -> None:
    for columns in (False, True):
        quantize.quantize_rows(rows(M, K), "pow2", columns)
        quantize.quantize_both(rows(M, K), "pow2", columns)
        norm.norm_quantize_rows(rows(M, K), None, torch.ones(K).bfloat16(), 1e-6, "pow2", columns, keep=True)
        norm.norm_quantize_rows(rows(M, K), rows(M, K), torch.ones(K).bfloat16(), 1e-6, "pow2", columns)
        silu.silu_mul_quantize_rows(rows(M, K), rows(M, K), "pow2", columns=columns)
        silu.silu_mul_backward_both(rows(M, K), rows(M, K), rows(M, K), "pow2", columns)
        q, _ = formulas.quantize_activation(rows(M, K), "pow2")
        quantize.requantize_tokens(q, quantize.new_rows(q, M, K, columns)[1], "pow2")
    quantize.quantize_transposed(rows(M, K), "pow2")
    norm.rms_norm(rows(M, K), torch.ones(K).bfloat16(), 1e-6)
    digest.rank_sum(torch.zeros(2, M, K))


def experts(M: int) -> None:
    plan = gemm_grouped.plan(torch.zeros(M, 1, dtype=torch.int64), 4)
    w, s, ones = weight()[0].new_zeros(8, N, K), torch.ones(8, 1, 2), torch.ones(M, 1)
    for columns in (True, False):
        x = quantize.quantize_rows(rows(M, K), "pow2", columns)
        gemm_grouped.grouped(*x, w, s, plan, tokens=True)
        gemm_grouped.regroup(*x, plan, "pow2", tokens=True)
    halves, scales = w.new_zeros(M, 2 * N), torch.ones(M, 2)
    gemm_grouped.grouped(halves, scales, w.new_zeros(8, K, N), torch.ones(8, 2, 1), plan, torch.float32, summed=2)
    gemm_grouped.combine(torch.zeros(M, K), plan, ones, torch.bfloat16)
    gemm_grouped.pair_backward(torch.zeros(M, K), rows(M, 2 * K), *x, ones, plan)
    operands = gemm_grouped.group_tokens(rows(M, N), plan, "pow2"), gemm_grouped.group_tokens(rows(M, K), plan, "pow2", ones)
    gemm_grouped.grouped_wgrad(*operands, plan, torch.bfloat16)
    mixture.route(torch.zeros(M, 16), 4, True)


def scored(M: int) -> None:
    logits, ones = rows(M, K), torch.ones(M)
    for temperature in (torch.ones(1), ones) if M > 1 else (torch.ones(1),):
        head.log_prob_backward(logits, ones.long(), ones, ones, ones, temperature, logits)


def rotated(M: int) -> None:
    for batch in (1, 3):
        q, k = (torch.zeros(batch, M, heads, 64).bfloat16() for heads in (6, 1))
        for rows_of_tables in {1, batch}:
            tables = [torch.zeros(rows_of_tables, M, 64).bfloat16() for _ in range(2)]
            for back in (False, True):
                elementwise.rotary_pair(q, k, *tables, (q.dtype, k.dtype), back)


def delta_nets(M: int) -> None:
    """Training, and steps of the rollout over a pool of states of any number, on ranks with different numbers of heads."""
    for KH, H in ((2, 4), (1, 2), (1, 1)):
        sizes = (KH, H, 64, 64)
        x, w, gates = rows(M, (2 * KH + H) * 64), rows((2 * KH + H) * 64, 4), (rows(M, 2 * H)[:, :H], rows(M, 2 * H)[:, H:])
        inputs = delta_net.delta_inputs(x, *gates, *rows(2, H), sizes)
        for R in (1, M):
            starts = torch.arange(R + 1, dtype=torch.int32)
            delta_net.delta_gradients(inputs, x, starts, sizes, torch.zeros(M, H, 64))
            page = torch.zeros(R + 1, 3 * x.shape[1] * 2 + H * 64 * 64 * 4 + 16 * M, dtype=torch.uint8)
            states = page[:, : 3 * x.shape[1] * 2].view(torch.bfloat16), page[:, -H * 64 * 64 * 4 :].view(torch.float32)
            for pool in (None, *((state, starts[:R], torch.zeros(R, dtype=torch.bool)) for state in states)):
                if pool is None or pool[0].dtype == torch.bfloat16:
                    delta_net.conv(x, w, starts, pool)
                if pool is None or pool[0].dtype == torch.float32:
                    delta_net.delta_rule(inputs, x, starts, sizes, pool)


def attention_gradients(M: int) -> None:
    q, k = rows(M, 3 * 64).view(M, 3, 64), rows(M, 64).view(M, 1, 64)
    starts = torch.tensor([0, M], dtype=torch.int32)
    attention_backward.attention_backward(q, k, k, q, torch.ones(M, 3), q, starts, 1.0)


def latents(M: int) -> None:
    starts = torch.tensor([0, M], dtype=torch.int32)
    q, keys, out = rows(M, 2 * 576).view(M, 2, 576), rows(M, 576).view(M, 1, 576), rows(M, 1024).view(M, 2, 512)
    latent.attention_varlen(q, keys, 512, starts, 1.0)
    latent.attention_backward(q, keys, out, torch.ones(M, 2), out, starts, 1.0)
    table, seen = torch.zeros(M, 1, dtype=torch.int32), torch.ones(M, dtype=torch.int32)
    step = torch.arange(M + 1, dtype=torch.int32)
    latent.attention_paged(q, torch.zeros(5, 64, 1, 576).bfloat16(), 512, table, seen, step, 1.0)
    latent.product_by_head(q[..., :128], rows(2 * 512, 128).view(2, 512, 128))


def test_training_and_rollout_run_one_binary(compiled: set[tuple[str, str]]) -> None:
    """Its sums over K then have one order: in both, for any number of heads, and wherever states begin."""
    delta_nets(5)
    names = [name for name, _ in compiled]
    assert sorted(set(names)) == sorted(names) and "rule_kernel" in names, names


CALLS = (forward, few, backward, quantized, experts, scored, rotated, attention_gradients, delta_nets, latents)


@pytest.mark.parametrize("call", CALLS)
def test_a_batch_of_another_size_compiles_nothing(call: Any, compiled: set[tuple[str, str]]) -> None:
    for M in (5, gemm_common.FEW_ROWS + 1):  # the product has two tiles
        call(M)
    first = set(compiled)
    assert first
    for M in BATCHES:
        call(M)
    assert compiled == first, {name for name, _ in compiled - first}


def test_what_is_specialized_on_shows(compiled: set[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    free = JITFunction(gemm.fprop_kernel.fn)  # the same kernel without the promise
    monkeypatch.setattr(gemm, "fprop_kernel", free)
    for M in (5, 16, 1):
        forward(M)
    assert len(compiled) == 2 * 3  # two output dtypes


def test_kernels_are_inspected_as_they_are_compiled() -> None:
    for spec in specs().values():
        assert not set(spec.aligned) & set(spec.kernel.do_not_specialize), spec.name
    assert attention_backward.dq_kernel.do_not_specialize == attention_backward.dkdv_kernel.do_not_specialize == ["R", "T"]
