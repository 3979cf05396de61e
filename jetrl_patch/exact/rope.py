"""Rotary embedding: one table of cosines and sines for both sides, applied in Hugging Face's rounding order."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from jetrl_patch.exact.dispatch import implementation, kernels_serve
from jetrl_patch.native import ops


def rope_parameters(hf_config: Any) -> dict[str, Any]:
    """``rope_type``, ``rope_theta`` and the rest, from either of the config's two spellings."""
    found = dict(getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {})
    found["rope_type"] = found.get("rope_type") or found.get("type") or "default"
    found.setdefault("rope_theta", getattr(hf_config, "rope_theta", None) or 10000.0)
    return found


def rope_frequencies(hf_config: Any) -> Tensor:
    """inv_freq FP32 [D/2] for the rope types "default", "linear" and "llama3", as Hugging Face computes it.

    D is the head's width, or the part of it that is rotated.

    Both sides compute it from the config, because a module's buffer may have been rounded to BF16. It is always computed
    on the CPU, whatever the default device, because powers on a GPU differ in the last bits.

    Raises:
        ValueError: the rope type is another one.
    """
    rope = rope_parameters(hf_config)
    dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
    dim = int(dim * rope.get("partial_rotary_factor", 1.0))
    inv_freq = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").float() / dim))
    if rope["rope_type"] == "default":
        return inv_freq
    factor = rope["factor"]
    if rope["rope_type"] == "linear":
        return inv_freq / factor
    if rope["rope_type"] != "llama3":
        raise ValueError(f"rope type: expected default, linear or llama3, found {rope['rope_type']!r}")
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    context = rope["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > context / low, inv_freq / factor, inv_freq)
    smooth = (context / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    medium = ~(wavelength < context / high) * ~(wavelength > context / low)
    return torch.where(medium, smoothed, scaled)


def rotary_table(inv_freq: Tensor, positions: int, scaling: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin of position * inv_freq, BF16 [positions, D/2].

    The angle is Hugging Face's FP32 product. Its cosine is computed in FP64, where the last bit, which may depend
    on how a vectorized loop splits the table, is far below the rounding to BF16.
    ``scaling`` is the ``attention_scaling`` of the rope type.
    """
    p = torch.arange(positions, dtype=torch.float32, device=inv_freq.device)
    angle = (p[:, None] * inv_freq.float()[None, :]).double()
    return (angle.cos() * scaling).float().to(torch.bfloat16), (angle.sin() * scaling).float().to(torch.bfloat16)


def apply_rotary(x_ThD: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    """Rotate [T, h, D] BF16 by the tables [P, D/2] at ``positions`` [T]: bf16(bf16(x cos) + bf16(rotate_half(x) sin)).

    Tables that are narrower rotate the first part of each head.

    For the rollout (no gradient). The trainer runs Hugging Face's own expression on the same tables, or ``rotate_pair``. Each
    of the operations rounds separately, so all give the same bits.
    """
    width = 2 * cos.shape[-1]
    if width < x_ThD.shape[-1]:
        rotated = apply_rotary(x_ThD[..., :width].contiguous(), cos, sin, positions)
        return torch.cat((rotated, x_ThD[..., width:]), -1)
    serves = implementation(x_ThD)
    if serves == "native":
        return ops.rotary(x_ThD, cos, sin, positions)
    if serves == "triton":
        from jetrl_patch.kernels import elementwise

        return elementwise.rotary(x_ThD, cos, sin, positions)
    c, s = (torch.cat((t, t), -1)[positions].unsqueeze(1) for t in (cos, sin))
    low, high = x_ThD.chunk(2, -1)
    return x_ThD * c + torch.cat((-high, low), -1) * s


class _RotatedPair(torch.autograd.Function):
    """Queries and keys [B, T, heads, D]; tables [B or 1, T, R]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        from jetrl_patch.kernels.elementwise import rotary_pair

        ctx.save_for_backward(cos, sin)
        ctx.dtypes = q.dtype, k.dtype
        promoted = [t.dtype if t.dtype == cos.dtype else torch.float32 for t in (q, k)]
        return rotary_pair(q, k, cos, sin, (promoted[0], promoted[1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:
        from jetrl_patch.kernels.elementwise import rotary_pair

        cos, sin = ctx.saved_tensors
        return *rotary_pair(grad_outputs[0], grad_outputs[1], cos, sin, ctx.dtypes, backward=True), None, None


def rotate_pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor] | None:
    """Hugging Face's ``apply_rotary_pos_emb`` by one kernel forward and one backward, with its bits; None if it cannot serve.

    The gradients are computed in FP32 and rounded once. torch.compile fuses the operations itself.

    Args:
        q, k: [B, heads, T, D], BF16 or FP32, with any strides.
        cos, sin: [B or 1, T, R], BF16 or FP32; the first R elements of a head are rotated.
    """
    if torch.compiler.is_compiling() or not kernels_serve(q, unless_chosen=q.is_cuda):
        return None
    if (q.dim(), k.dim(), cos.dim()) != (4, 4, 3) or cos.shape != sin.shape or cos.requires_grad or sin.requires_grad:
        return None
    if not {t.dtype for t in (q, k, cos, sin)} <= {torch.bfloat16, torch.float32} or cos.dtype != sin.dtype:
        return None
    (B, _, T, D), (rows, places, width) = q.shape, cos.shape
    if (k.shape[0], *k.shape[2:]) != (B, T, D) or rows not in (1, B) or places != T or width % 2 or not 2 <= width <= D:
        return None
    q_BThD, k_BTgD = _RotatedPair.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return q_BThD.transpose(1, 2), k_BTgD.transpose(1, 2)
