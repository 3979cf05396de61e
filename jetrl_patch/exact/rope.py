"""Rotary embedding: one table of cosines and sines for both sides, applied in Hugging Face's rounding order."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from jetrl_patch.exact.dispatch import implementation
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

    For the rollout (no gradient). The trainer runs Hugging Face's own expression on the same tables. Each of its
    operations rounds separately, so both give the same bits.
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
