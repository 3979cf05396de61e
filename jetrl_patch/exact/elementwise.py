"""RMSNorm, SiLU(gate) * up and the rotary embedding, with the rounding of Hugging Face models."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from jetrl_patch.backends.gpu import written
from jetrl_patch.exact.dispatch import implementation, kernel_for, kernels_serve

# ---- RMSNorm in the rounding order of Hugging Face models: y = bf16(w * bf16(x / rms(x))) --------
# Some families multiply by 1 + weight, and round once: y = bf16((1 + w) * (x / rms(x))).

class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, one_plus: bool = False) -> Tensor:
        x_MK = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
        w_K = weight.detach().to(torch.bfloat16)
        if (rms_norm_kernel := kernel_for("rms_norm", x)) is not None:
            y, rstd = rms_norm_kernel(x_MK, w_K, eps, one_plus)
        else:  # FP64 sums, whose order changes the FP32 result of about one row in 10^8
            exact = x_MK.double()
            rstd = (exact.pow(2).mean(-1) + eps).rsqrt().float()
            y = x_MK.float() * rstd.unsqueeze(-1)
            y = ((1 + w_K.float()) * y).to(torch.bfloat16) if one_plus else w_K * y.to(torch.bfloat16)
        if one_plus:
            w_K = 1 + w_K.float()
        ctx.save_for_backward(x_MK, w_K, rstd)
        ctx.x_dtype, ctx.w_dtype = x.dtype, weight.dtype
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return *rms_norm_gradients(ctx, implementation(grad_outputs[0]) == "triton", grad_outputs[0]), None, None


def rms_norm_gradients(ctx: Any, kernel: bool, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and of the weight, computed in FP32.

    Args:
        ctx: of a forward pass with inputs x and weight, which saved x as BF16 [M, K], what it multiplied by [K], and 1/rms FP32
            [M].
        kernel: use the Triton kernel, not torch's operations.
        dy: the gradient of the result.
    """
    x_MK, w_K, rstd = ctx.saved_tensors
    wants_x, wants_w = ctx.needs_input_grad[:2]
    dy_MK = dy.reshape(x_MK.shape)
    dx = dw = None
    if kernel:
        from jetrl_patch.kernels.norm import rms_norm_backward

        dx, dw = rms_norm_backward(x_MK, w_K, rstd, dy_MK, written(ctx.x_dtype), wants_w)
    else:
        g, hat = dy_MK.float(), x_MK.float() * rstd.unsqueeze(-1)
        if wants_x:
            gw = g * w_K.float()
            dx = (gw - hat * (gw * hat).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
        if wants_w:
            dw = (g * hat).sum(0)
    dx = dx.to(ctx.x_dtype).view(dy.shape) if dx is not None and wants_x else None
    return dx, None if dw is None else dw.to(ctx.w_dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, one_plus: bool = False) -> Tensor:
    """RMSNorm over the last dimension of x [..., K], which is converted to BF16, with a weight [K]: BF16 [..., K].

    ``one_plus``: whether it multiplies by 1 + weight.
    """
    result: Tensor = _RMSNorm.apply(x, weight, eps, one_plus)
    return result


# ---- SiLU(gate) * up with the rounding of Hugging Face models: bf16(bf16(silu(gate)) * up) -------

class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        g, u = gate.to(torch.bfloat16), up.to(torch.bfloat16)
        silu_mul_kernel, width = kernel_for("silu_mul", g), g.shape[-1]
        if silu_mul_kernel is not None:
            y = silu_mul_kernel(g.reshape(-1, width), u.reshape(-1, width)).view(g.shape)
        else:  # elementwise, so no element can depend on another one
            exact = g.double()
            y = (exact * torch.sigmoid(exact)).to(torch.bfloat16) * u
        ctx.save_for_backward(g, u)
        ctx.dtypes = gate.dtype, up.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return silu_mul_gradients(gate, up, grad_outputs[0], ctx.dtypes, implementation(gate) == "triton")


def silu_mul_gradients(
    gate: Tensor, up: Tensor, dy: Tensor, dtypes: tuple[torch.dtype, torch.dtype], kernel: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up, BF16 [..., K], in ``dtypes``: in FP32, by the Triton ``kernel`` or by torch's operations."""
    if kernel:
        from jetrl_patch.kernels.silu import silu_mul_backward

        gate_MK, up_MK, dy_MK = (t.reshape(-1, t.shape[-1]) for t in (gate, up, dy))
        dgate, dup = silu_mul_backward(gate_MK, up_MK, dy_MK, (written(dtypes[0]), written(dtypes[1])))
        return dgate.view(gate.shape).to(dtypes[0]), dup.view(up.shape).to(dtypes[1])
    g, u, dy = gate.float(), up.float(), dy.float()
    sigmoid = torch.sigmoid(g)
    dg = dy * u * sigmoid * (1 + g * (1 - sigmoid))
    return dg.to(dtypes[0]), (dy * g * sigmoid).to(dtypes[1])


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) * up, BF16 [..., K], computed from the BF16 values of gate and up [..., K]."""
    result: Tensor = _SiluMul.apply(gate, up)
    return result


# ---- Rotary embedding: one table of cosines and sines for both sides, in Hugging Face's rounding order

def rope_parameters(hf_config: Any) -> dict[str, Any]:
    """``rope_type``, ``rope_theta`` and the rest, from a config with ``rope_parameters`` or ``rope_scaling``."""
    found = dict(getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {})
    rope_type = found.get("rope_type") or found.get("type") or "default"
    found["rope_type"] = "yarn" if rope_type == "deepseek_yarn" else rope_type  # vLLM writes its own name into the config
    found.setdefault("rope_theta", getattr(hf_config, "rope_theta", None) or 10000.0)
    return found


def rope_frequencies(hf_config: Any) -> Tensor:
    """inv_freq FP32 [D/2] for the rope types "default", "linear", "llama3" and "yarn", as Hugging Face computes it.

    D is the number of elements of a head that are rotated, usually all. Both sides compute the frequencies from the config,
    because a module's buffer may have been rounded to BF16, and on the CPU, because powers on a GPU differ in the last bits.

    Raises ValueError if the rope type is another one.
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
    if rope["rope_type"] == "yarn":
        return _yarn_frequencies(rope, dim)
    if rope["rope_type"] != "llama3":
        raise ValueError(f"rope type: expected default, linear, llama3 or yarn, found {rope['rope_type']!r}")
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    context = rope["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > context / low, inv_freq / factor, inv_freq)
    smooth = (context / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    medium = ~(wavelength < context / high) * ~(wavelength > context / low)
    return torch.where(medium, smoothed, scaled)


def _yarn_frequencies(rope: dict[str, Any], dim: int) -> Tensor:
    """YaRN (arXiv 2309.00071): low frequencies divided by the factor, high ones unchanged, a ramp between them."""
    base, context = rope["rope_theta"], rope["original_max_position_embeddings"]
    low, high = (
        dim * math.log(context / (2 * math.pi * turns)) / (2 * math.log(base))
        for turns in (rope.get("beta_fast") or 32, rope.get("beta_slow") or 1)
    )
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    powers = base ** (torch.arange(0, dim, 2, device="cpu").float() / dim)
    ramp = (torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low or 0.001)
    unchanged = 1 - ramp.clamp(0, 1)
    return 1.0 / (rope["factor"] * powers) * (1 - unchanged) + 1.0 / powers * unchanged


def rope_magnitude(hf_config: Any) -> float:
    """The number that Hugging Face multiplies cosines and sines by: 1 unless the rope type is "yarn"."""
    rope = rope_parameters(hf_config)
    if rope["rope_type"] != "yarn":
        return 1.0
    alone, whole = rope.get("mscale"), rope.get("mscale_all_dim")
    numbers = (alone, whole) if alone and whole else (1.0, 0.0)
    above, below = (0.1 * number * math.log(max(rope["factor"], 1.0)) + 1.0 for number in numbers)
    return above / below


def rotary_table(inv_freq: Tensor, positions: int, magnitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin of position * inv_freq, times ``magnitude``, BF16 [positions, D/2].

    The angle is Hugging Face's FP32 product. Its cosine is computed in FP64: the last bit may depend on how a vectorized loop
    splits the table, but cannot affect the rounding to BF16.
    """
    p = torch.arange(positions, dtype=torch.float32, device=inv_freq.device)
    angle = (p[:, None] * inv_freq.float()[None, :]).double()
    cos, sin = ((wave * magnitude).float().to(torch.bfloat16) for wave in (angle.cos(), angle.sin()))
    return cos, sin


def apply_rotary(x_ThD: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    """Rotate [T, h, D] BF16 by the tables [P, D/2] at ``positions`` [T]: bf16(bf16(x cos) + bf16(rotate_half(x) sin)).

    If the tables are narrower than D/2, only the first part of each head is rotated.

    For the rollout (no gradient). The trainer runs Hugging Face's own expression on the same tables, or ``rotate_pair``. All of
    them round each operation separately, so the bits are the same.
    """
    width = 2 * cos.shape[-1]
    if width < x_ThD.shape[-1]:
        rotated = apply_rotary(x_ThD[..., :width].contiguous(), cos, sin, positions)
        return torch.cat((rotated, x_ThD[..., width:]), -1)
    rotary_kernel = kernel_for("rotary", x_ThD)
    if rotary_kernel is not None:
        rotated = rotary_kernel(x_ThD, cos, sin, positions)
        return rotated
    c, s = (torch.cat((t, t), -1)[positions].unsqueeze(1) for t in (cos, sin))
    low, high = x_ThD.chunk(2, -1)
    return x_ThD * c + torch.cat((-high, low), -1) * s


class _RotatedPair(torch.autograd.Function):
    """Rotates queries and keys [B, T, heads, D] by tables [B or 1, T, R]."""

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
    """Hugging Face's ``apply_rotary_pos_emb``, bit for bit, in one kernel forward and one backward.

    The gradients are computed in FP32 and rounded once.

    Args:
        q, k: [B, heads, T, D], BF16 or FP32, with any strides.
        cos, sin: [B or 1, T, R], BF16 or FP32. The first R elements of a head are rotated.

    Returns:
        The rotated queries and keys. None if the kernel cannot take the inputs, or under torch.compile, which fuses the
        operations itself.
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
