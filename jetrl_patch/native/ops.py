"""Thin wrappers of the C kernels for torch tensors, which check the arguments. Without autograd.

Shape legend: M tokens, N output features, K input features, G = ceil(K/128); T query tokens, H query heads, KH key/value heads,
D head width, V width of a value, R requests.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jetrl_patch.kernels.formats import BLOCK, FP8, check_fprop, groups, split_width
from jetrl_patch.native.build import library, multiplies_bf16

_BF16 = torch.bfloat16


def _call(kernel: str, *arguments: Any) -> Any:
    """Call a C kernel. Tensors are passed by address, int as int64_t, bool as int, and float as float."""
    return getattr(library(), kernel)(*map(_to_c, arguments))


def _to_c(value: Any) -> Any:
    if isinstance(value, Tensor) or value is None:
        return ctypes.c_void_p(None if value is None else value.data_ptr())
    kinds: dict[type, Any] = {bool: ctypes.c_int, int: ctypes.c_int64, float: ctypes.c_float}
    return kinds[type(value)](value) if type(value) in kinds else value


def _threads(work: int) -> ctypes.c_int:
    """Threads for ``work`` multiply-adds. Below about 20 microseconds of work, a second thread costs more than it saves."""
    return ctypes.c_int(torch.get_num_threads() if work > 1_000_000 else 1)


def _rows(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """The tensor with a contiguous last dimension. Raises TypeError if it is not a CPU tensor of ``dtype``."""
    if tensor.dtype != dtype or tensor.device.type != "cpu":
        raise TypeError(f"{name}: expected a CPU {dtype} tensor, found {tensor.dtype} on {tensor.device}")
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _sized(tensor: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    """The tensor. Raises ValueError for another shape, because the kernel computes addresses from the shape."""
    if tensor.shape != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, found {list(tensor.shape)}")
    return tensor


def _checked(status: int) -> None:
    if status:
        raise MemoryError("The native kernels could not allocate scratch memory. Use shorter sequences or smaller batches.")


def quantize(x_MK: Tensor, layout: str, pow2: bool, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Quantize BF16 [M, K] to e4m3 [M, K] and FP32 scales, in layout "rows", "tokens" or "blocks" of ``backends.quantize``.

    ``block`` values share a scale; "blocks" are always 128x128.
    """
    x_MK = _rows(x_MK, _BF16, "w" if layout == "blocks" else "x")
    M, K = x_MK.shape
    scales = {"rows": (M, groups(K, block)), "tokens": (groups(M, block), K), "blocks": (groups(M), groups(K))}[layout]
    q_MK, s = torch.empty(M, K, dtype=FP8), torch.empty(scales, dtype=torch.float32)
    group = () if layout == "blocks" else (block,)
    _call(f"jetrl_quantize_{layout}", x_MK, x_MK.stride(0), M, K, *group, pow2, q_MK, s, _threads(M * K))
    return q_MK, s


def dequantize(q_MK: Tensor, scale: Tensor, row_group: int, col_group: int, dtype: torch.dtype) -> Tensor:
    """Compute q * s [M, K] in FP32 and convert to ``dtype`` (BF16 is exact for power-of-two scales).

    ``scale[m // row_group, k // col_group]`` belongs to ``q[m, k]``.
    """
    q_MK = _rows(q_MK, FP8, "q").contiguous()
    M, K = q_MK.shape
    scale = _sized(_rows(scale, torch.float32, "scale"), (-(-M // row_group), -(-K // col_group)), "scale")
    out = torch.empty(M, K, dtype=dtype)
    arguments = (q_MK, scale, scale.stride(0), M, K, row_group, col_group, dtype == _BF16, out)
    _call("jetrl_dequantize", *arguments, _threads(M * K))
    return out


def fingerprint(tensor: Tensor) -> int:
    """A 64-bit fingerprint of a contiguous CPU tensor's bytes."""
    if tensor.device.type != "cpu":
        raise TypeError(f"weight: expected a CPU tensor, found one on {tensor.device}")
    function = library().jetrl_fingerprint
    function.restype = ctypes.c_uint64
    return int(function(_to_c(tensor), _to_c(tensor.numel() * tensor.element_size())))


def digest(matrix_RC: Tensor, row0: int, col0: int) -> tuple[int, bool]:
    """The digest (``sync.digest``) of a CPU matrix with contiguous rows, and whether it is BF16 or FP32 and holds NaN or Inf.

    ``row0`` and ``col0`` (elements) place it in the whole tensor.
    """
    if matrix_RC.device.type != "cpu" or matrix_RC.stride(1) != 1:
        raise TypeError(f"matrix: expected contiguous rows on the CPU, found strides {matrix_RC.stride()} on {matrix_RC.device}")
    (rows, cols), size = matrix_RC.shape, matrix_RC.element_size()
    out = (ctypes.c_uint64 * 2)()
    special = ctypes.c_int(size if matrix_RC.dtype in (_BF16, torch.float32) else 0)
    place = (matrix_RC.stride(0) * size, rows, cols * size, row0, col0 * size)
    _call("jetrl_digest", matrix_RC, *place, special, out, _threads(rows * cols * size // 4))
    return out[0], bool(out[1])


def pack(w_NK: Tensor) -> Tensor | None:
    """An e4m3 weight [N, K] as ``fp8_gemm`` reads it fastest: uint8 [ceil(N/32), K, 32]. None if it holds NaN.

    The bytes of 32 rows are adjacent for each k. The copy does not follow the weight.
    """
    w_NK = _rows(w_NK, FP8, "w")
    N, K = w_NK.shape
    packed = torch.empty(-(-N // 32), K, 32, dtype=torch.uint8)
    special = _call("jetrl_pack", w_NK, w_NK.stride(0), N, K, packed, _threads(N * K))
    return None if special else packed


def fp8_gemm(
    q_MK: Tensor,
    s_MG: Tensor,
    w_NK: Tensor,
    s_NG: Tensor,
    out_dtype: torch.dtype,
    splits: int = 1,
    packed: Tensor | None = None,
    block: int = BLOCK,
) -> Tensor:
    """FProp: Y [M, N] = sum over blocks of fma(dot128, sX * sW, acc), in FP32 or rounded once to BF16.

    ``packed`` is the result of ``pack`` for this weight: the same bits, faster.
    """
    check_fprop(q_MK, s_MG, w_NK, s_NG, out_dtype, block=block)
    q_MK, s_MG = _rows(q_MK, FP8, "q"), s_MG.contiguous()
    w_NK, s_NG = _rows(w_NK, FP8, "w"), _rows(s_NG, torch.float32, "s")
    N, K = w_NK.shape
    split_width(K, splits, block)  # raises if that cuts a block
    if packed is not None:
        _sized(packed, (-(-N // 32), K, 32), "packed")
    return _gemm((q_MK, s_MG, w_NK, s_NG, packed), out_dtype, block, splits)


def _gemm(
    operands: tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None], out_dtype: torch.dtype, block: int, splits: int
) -> Tensor:
    """``block`` is 0 for BF16 operands."""
    x_MK, sx, w_NK, sw, packed = operands
    (M, K), N = x_MK.shape, w_NK.shape[0]
    out, ld_sw = torch.empty(M, N, dtype=out_dtype), 0 if sw is None else sw.stride(0)
    how = (ctypes.c_int(block), ctypes.c_int(splits), out_dtype == _BF16)
    matrices = (x_MK, x_MK.stride(0), sx, w_NK, w_NK.stride(0), sw, ld_sw, packed)
    _checked(_call("jetrl_gemm", *matrices, M, N, K, *how, out, _threads(M * N * K // 16)))
    return out


def bf16_gemm(x_MK: Tensor, w_NK: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Y [M, N] = X W^T with BF16 operands and FP32 sums over ascending K, in FP32 or rounded once to BF16."""
    x_MK, w_NK = _rows(x_MK, _BF16, "x"), _rows(w_NK, _BF16, "w")
    _sized(w_NK, (w_NK.shape[0], x_MK.shape[1]), "w")
    return _gemm((x_MK, None, w_NK, None, None), out_dtype, 0, 1)


def product(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """torch's BF16 product A B [M, N] on any device, for gradients. Its rows may depend on the batch."""
    if a_MK.device.type == "cpu" and not multiplies_bf16():
        return torch.mm(a_MK.float(), b_KN.float()).to(_BF16)
    return torch.mm(a_MK, b_KN)


def rms_norm(x_MK: Tensor, weight: Tensor, eps: float, one_plus: bool = False) -> tuple[Tensor, Tensor]:
    """RMSNorm over K, y = bf16(w * bf16(x / rms(x))). Returns y [M, K] BF16 and 1/rms [M] FP32.

    With ``one_plus``, y = bf16((1 + w) * (x / rms(x))).
    """
    x_MK, weight = _rows(x_MK, _BF16, "x").contiguous(), _rows(weight, _BF16, "weight")
    M, K = x_MK.shape
    _sized(weight, (K,), "weight")
    y, rstd = torch.empty_like(x_MK), torch.empty(M, dtype=torch.float32)
    _call("jetrl_rms_norm", x_MK, weight, M, K, float(eps), one_plus, y, rstd, _threads(M * K))
    return y, rstd


def silu_mul(gate_MK: Tensor, up_MK: Tensor) -> Tensor:
    """bf16(bf16(silu(gate)) * up), [M, K]; gate and up may be strided halves of one tensor."""
    gate_MK, up_MK = _rows(gate_MK, _BF16, "gate"), _rows(up_MK, _BF16, "up")
    M, K = gate_MK.shape
    _sized(up_MK, (M, K), "up")
    y = torch.empty(M, K, dtype=_BF16)
    inputs = (gate_MK, gate_MK.stride(0), up_MK, up_MK.stride(0))
    _call("jetrl_silu_mul", *inputs, M, K, y, _threads(M * K * 4))
    return y


def route(
    logits_ME: Tensor, k: int, renormalize: bool, rule: tuple[Tensor, int, int, float] | None = None
) -> tuple[Tensor, Tensor]:
    """The k experts of each row: weights FP32 [M, k] and ascending indices int64 [M, k].

    By a softmax; with a ``rule`` (bias FP32 [E], groups, groups kept, scale), by a sigmoid: see ``exact.route.Sigmoid``.
    """
    bias_E, groups, kept, scale = rule or (None, 1, 1, 1.0)
    logits_ME = _rows(logits_ME.float(), torch.float32, "logits").contiguous()
    M, E = logits_ME.shape
    if not 0 < k <= E:
        raise ValueError(f"k: expected 1 to {E} experts, found {k}")
    if bias_E is not None:
        bias_E = _sized(_rows(bias_E, torch.float32, "bias"), (E,), "bias")
    if E % groups or not 0 < kept <= groups or k > kept * (E // groups):
        raise ValueError(f"groups: expected {k} experts within {kept} of {groups} equal groups of {E}")
    ids, weights = torch.empty(M, k, dtype=torch.int64), torch.empty(M, k, dtype=torch.float32)
    sigmoid = (bias_E, groups, kept, float(scale))
    _call("jetrl_route", logits_ME, M, E, k, bool(renormalize), *sigmoid, ids, weights, _threads(M * E * (k + 32)))
    return weights, ids


def rotary(x_ThD: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    """Rotate [T, h, D] by the BF16 tables [P, D/2] at ``positions`` [T] int64. Returns a new [T, h, D]."""
    T, h, D = x_ThD.shape
    if x_ThD.stride(2) != 1 or x_ThD.stride(1) != D:
        x_ThD = x_ThD.contiguous()
    y = torch.empty(T, h, D, dtype=_BF16)
    positions = positions.to(torch.int64).contiguous()
    sizes = (T, h, D)
    _call("jetrl_rotary", x_ThD, x_ThD.stride(0), cos, sin, positions, *sizes, y, y.stride(0), _threads(T * h * D))
    return y


def attention(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    scale: float,
    want_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Causal attention of queries [T, H, D] over caches [blocks, block size, KH, D or V] with a contiguous last dimension.

    ``block_table`` int32 [R, B], ``seq_lens`` int32 [R] (keys so far), ``query_start`` int32 [R + 1].
    Returns the output [T, H, V] BF16 and, with ``want_lse``, the log-sum-exp [T, H] FP32.
    """
    T, H, D = q_THD.shape
    if q_THD.stride(2) != 1 or q_THD.stride(1) != D:
        q_THD = q_THD.contiguous()
    if k_cache.shape[:3] != v_cache.shape[:3] or not k_cache.stride(3) == v_cache.stride(3) == 1:
        raise ValueError("k_cache and v_cache need equal blocks and heads and a contiguous last dimension.")
    V = v_cache.shape[3]
    block_table, seq_lens, query_start = block_table.contiguous(), seq_lens.contiguous(), query_start.contiguous()
    out = torch.empty(T, H, V, dtype=_BF16)
    lse = torch.empty(T, H, dtype=torch.float32) if want_lse else None
    caches = (k_cache, *k_cache.stride()[:3], v_cache, *v_cache.stride()[:3])
    blocks = (block_table, block_table.stride(0), k_cache.shape[1])
    sizes = (seq_lens.shape[0], H, k_cache.shape[2], D, V)
    results = (out, out.stride(0), lse, _threads(T * H * D * 64))
    queries = (q_THD, q_THD.stride(0))
    _checked(_call("jetrl_attention", *queries, *caches, *blocks, seq_lens, query_start, *sizes, float(scale), *results))
    return out, lse


# ---- Gated delta nets (``exact.delta_net``, with a legend of the shapes) ----
# ``starts`` is int32 [R + 1]. Sequence r continues from the state in ``slots[r]`` of a pool unless ``fresh[r]``, and leaves its
# state there. Without a ``Pool`` every sequence begins with an empty state, which is not kept.

class Pool(NamedTuple):
    """States of sequences: ``states`` [slots, ...], each contiguous, ``slots`` int64 [R] and ``fresh`` bool [R]."""

    states: Tensor
    slots: Tensor
    fresh: Tensor


def _pool(pool: Pool | None, dtype: torch.dtype, size: int, R: int) -> tuple[Any, ...]:
    if pool is None:
        return None, None, None, 0
    states, slots, fresh = pool
    if states.dtype != dtype or not states[0].is_contiguous() or states[0].numel() != size:
        found = f"{states.dtype} {list(states.shape)} with strides {states.stride()}"
        raise ValueError(f"states: expected contiguous states of {size} numbers in {dtype}, found {found}")
    slots, fresh = slots.to(torch.int64).contiguous(), fresh.contiguous()
    _sized(slots, (R,), "slots"), _sized(_rows(fresh, torch.bool, "fresh"), (R,), "fresh")
    return slots, fresh, states, states.stride(0)


def conv(x_TC: Tensor, w_CW: Tensor, starts: Tensor, pool: Pool | None = None) -> Tensor:
    """bf16(silu(causal convolution)) of each channel [T, C]: FP32 sums over ascending taps. States: BF16 [slots, W - 1, C]."""
    x_TC, w_CW, starts = _rows(x_TC, _BF16, "x"), _rows(w_CW, _BF16, "w").contiguous(), starts.contiguous()
    (T, C), W, R = x_TC.shape, w_CW.shape[1], starts.numel() - 1
    _sized(w_CW, (C, W), "w")
    y = torch.empty(T, C, dtype=_BF16)
    held = _pool(pool, _BF16, (W - 1) * C, R)
    _call("jetrl_conv", x_TC, x_TC.stride(0), w_CW, starts, R, *held, C, W, y, _threads(T * C * W * 8))
    return y


class DeltaInputs(NamedTuple):
    """FP32: ``q`` and ``k`` [T, KH, K] of length 1, ``q`` divided by sqrt(K); ``decay`` and ``beta`` [T, H], in 0 to 1."""

    q: Tensor
    k: Tensor
    decay: Tensor
    beta: Tensor


def delta_inputs(
    y_TC: Tensor, a_TH: Tensor, b_TH: Tensor, A_log: Tensor, dt_bias: Tensor, sizes: tuple[int, int, int, int]
) -> DeltaInputs:
    """The inputs of the delta rule from its BF16 gates and the convolution [T, C]. ``sizes`` is (KH, H, K, V)."""
    KH, H, K, _ = sizes
    T, C = y_TC.shape
    a_TH, b_TH = (_sized(_rows(t, _BF16, name), (T, H), name) for t, name in ((a_TH, "a"), (b_TH, "b")))
    A_log, dt_bias = (_sized(_rows(t, _BF16, name), (H,), name) for t, name in ((A_log, "A_log"), (dt_bias, "dt_bias")))
    found = DeltaInputs(*(torch.empty(T, *shape, dtype=torch.float32) for shape in ((KH, K), (KH, K), (H,), (H,))))
    gates = (a_TH, a_TH.stride(0), b_TH, b_TH.stride(0), A_log, dt_bias)
    _call("jetrl_delta_inputs", y_TC.contiguous(), *gates, T, KH, H, K, C, *found, _threads(T * (KH * K + 64 * H)))
    return found


def delta_rule(
    inputs: DeltaInputs, y_TC: Tensor, starts: Tensor, sizes: tuple[int, int, int, int], pool: Pool | None = None
) -> Tensor:
    """The delta rule, token by token: BF16 [T, H, V]. The values are the last H * V channels. States: FP32 [slots, H, K, V]."""
    KH, H, K, V = sizes
    v, starts = y_TC[:, 2 * KH * K :], starts.contiguous()
    T, R = y_TC.shape[0], starts.numel() - 1
    o = torch.empty(T, H, V, dtype=_BF16)
    q, k, decay, beta = inputs
    held = _pool(pool, torch.float32, H * K * V, R)
    arguments = (q, k, v, v.stride(0), decay, beta, starts, R, *held, *sizes, o)
    _checked(_call("jetrl_delta_rule", *arguments, _threads(T * H * K * V)))
    return o


def delta_gradients(
    inputs: DeltaInputs, y_TC: Tensor, starts: Tensor, sizes: tuple[int, int, int, int], grad_THV: Tensor
) -> tuple[DeltaInputs, Tensor]:
    """The gradients of ``delta_rule`` without a pool, FP32: of the inputs, with log(decay), and of the values [T, H, V]."""
    KH, H, K, V = sizes
    v, starts, grad_THV = y_TC[:, 2 * KH * K :], starts.contiguous(), grad_THV.float().contiguous()
    T, R = y_TC.shape[0], starts.numel() - 1
    per_head = [torch.empty(T, H, *shape, dtype=torch.float32) for shape in ((K,), (K,), (V,), (), ())]
    q, k, decay, beta = inputs
    arguments = (q, k, v, v.stride(0), decay, beta, starts, R, grad_THV, *sizes, *per_head)
    _checked(_call("jetrl_delta_gradients", *arguments, _threads(T * H * K * V)))
    dq, dk, dv, ddecay, dbeta = per_head
    dq, dk = (t.unflatten(1, (KH, H // KH)).sum(2) for t in (dq, dk))  # the heads that share a key head
    return DeltaInputs(dq, dk, ddecay * decay, dbeta), dv
