"""Multi-head latent attention (MLA) in its absorbed form, the one form of exact mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetrl_patch.errors import ModelError, explain
from jetrl_patch.exact.dispatch import implementation
from jetrl_patch.exact.logprob import linear
from jetrl_patch.models.structure import has_latent_attention

# ---- The formula ---------------------------------------------------------------------------------
# A token's keys and values are compressed to one latent c [L], which ``kv_b_proj [H (P + V), L]`` would expand for each head h:
#
#     k_h = W_UK_h c [P]        v_h = W_UV_h c [V]        score = q_h . k_h + q_rope_h . k_rope
#
# Stock trainers and vLLM's prefill expand; vLLM's decoding does not, because q . (W c) = (W^T q) . c. The two round differently,
# so exact mode never expands. Every token of the trainer, of a prefill, a chunk or a decoding step computes
#
#     u_h = bf16(W_UK_h^T q_h) [L]        a_h = attention of (u_h, q_rope_h) over keys (c, k_rope) and values c [L]
#     o_h = bf16(W_UV_h a_h) [V]
#
# with one key/value head, whose keys are as wide as the cache (L + R) and whose values are their first L numbers. The products
# are those of ``lm_head``: a row depends on nothing else. The weight is BF16 on both sides, as with ``align="linear"``: both
# products take BF16 inputs, so FP8 would round the weight and speed up nothing.
#
# Shape legend: T tokens, H heads, P width of a head without rotary part, R rotary part, L latent, V width of a value.

def into_latent(q_THP: Tensor, weight: Tensor) -> Tensor:
    """Queries over latents: q [..., H, P] and the weight [H (P + V), L] -> BF16 [..., H, L]."""
    heads, width = q_THP.shape[-2:]
    w_HLP = weight.unflatten(0, (heads, -1))[:, :width].transpose(1, 2)
    return _by_head(q_THP, w_HLP)


def out_of_latent(a_THL: Tensor, weight: Tensor, width: int) -> Tensor:
    """Values from weighted latents: a [..., H, L] and the weight [H (P + V), L] -> BF16 [..., H, V], with V = ``width``."""
    w_HVL = weight.unflatten(0, (a_THL.shape[-2], -1))[:, -width:]
    return _by_head(a_THL, w_HVL)


class _ByHead(torch.autograd.Function):
    """One launch for all heads, on a GPU."""

    @staticmethod
    def forward(ctx: Any, x_THK: Tensor, w_HNK: Tensor) -> Tensor:
        from jetrl_patch.kernels.latent import product_by_head

        x, w = x_THK.to(torch.bfloat16), w_HNK.to(torch.bfloat16)
        ctx.save_for_backward(x, w)
        ctx.dtypes = x_THK.dtype, w_HNK.dtype
        return product_by_head(x, w)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        g_HTN = grad_outputs[0].to(torch.bfloat16).transpose(0, 1)
        dx = torch.bmm(g_HTN, w).transpose(0, 1)
        dw = torch.bmm(g_HTN.transpose(1, 2), x.transpose(0, 1))
        return dx.to(ctx.dtypes[0]), dw.to(ctx.dtypes[1])


def _by_head(x_THK: Tensor, w_HNK: Tensor) -> Tensor:
    if implementation(x_THK) == "triton":
        found: Tensor = _ByHead.apply(x_THK.flatten(0, -3), w_HNK)
        return found.unflatten(0, x_THK.shape[:-2])
    return torch.stack([linear(x, w) for x, w in zip(x_THK.unbind(-2), w_HNK.unbind(0), strict=True)], -2)


def rotated_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [..., R]: neighboring numbers are one pair, and come out in two halves (``apply_rotary_pos_emb_interleave``)."""
    low, high = x[..., 0::2], x[..., 1::2]
    return torch.cat((low, high), -1) * cos + torch.cat((-high, low), -1) * sin


class ExactAbsorbed:
    """``kv_b_proj`` in the trainer. It multiplies by one half of its weight, inside ``forward``, where FSDP has gathered it."""

    weight: Tensor

    def forward(self, x: Tensor, values: int = 0) -> Tensor:
        """``into_latent``, or ``out_of_latent`` to values of this width."""
        return out_of_latent(x, self.weight, values) if values else into_latent(x, self.weight)


def check_latent(hf_config: Any, kv_cache: str, device_type: str = "cpu", backend: str = "auto") -> None:
    """Raise ModelError for latent attention in exact mode with an FP8 cache, or without kernels for its widths on a device."""
    if not has_latent_attention(hf_config):
        return
    what, fix = f'align="exact" of model_type={hf_config.model_type!r}', 'use align="linear"'
    if device_type == "cuda" and backend != "torch":
        from jetrl_patch.kernels.latent import check_widths

        check_widths(hf_config.kv_lora_rank, hf_config.kv_lora_rank + hf_config.qk_rope_head_dim)
    elif device_type != "cpu":
        required, found = "a CPU, or a GPU with Triton kernels", f"{device_type} with backend={backend!r}"
        raise ModelError(explain(what, required=required, found=found, fix=fix))
    if kv_cache != "auto":
        required = "a BF16 cache (its keys and values are the same numbers, which would get two scales)"
        raise ModelError(explain(what, required=required, found=f"kv_cache={kv_cache!r}", fix=f"drop kv_cache, or {fix}"))
