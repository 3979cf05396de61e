"""The vision tower in exact mode: transformers' own, on both sides, with ops whose rows do not depend on the other images.

A patch's features depend on its image alone: linear layers and norms compute each row by itself, and attention sees one image or
one window. So a batch of images, its order and its size change no bit, and a rollout may cache the features of an image.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from jetrl_patch.errors import ModelError, explain
from jetrl_patch.exact import dispatch, modules, ops
from jetrl_patch.exact.modules import swap

# ---- Norms and activations: FP64, rounded once ---------------------------------------------------
# FP64 is so much finer than BF16 that the order of a sum, or a vectorized loop's last bit, reaches no result.

class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *given: Tensor) -> Tensor:
        held = [t.to(torch.bfloat16) for t in given]
        ctx.save_for_backward(*held)
        ctx.function, ctx.dtypes = function, [t.dtype for t in given]
        return function(*(t.double() for t in held)).to(torch.bfloat16)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[1:]
        with torch.enable_grad():
            given = [t.float().requires_grad_(wants) for t, wants in zip(ctx.saved_tensors, wanted, strict=True)]
            y = ctx.function(*given)
        found = iter(torch.autograd.grad(y, [t for t in given if t.requires_grad], grad_outputs[0].float()))
        return None, *(next(found).to(dtype) if wants else None for dtype, wants in zip(ctx.dtypes, wanted, strict=True))


def rounded_once(function: Callable[..., Tensor], *given: Tensor) -> Tensor:
    """``function`` of the BF16 values of ``given``, computed in FP64 and rounded to BF16. Its gradients are computed in FP32."""
    result: Tensor = _Rounded.apply(function, *given)
    return result


# ---- Attention of an image or a window: every query sees every key -------------------------------
# This is a decoding step of the causal kernels. ROWS queries of a head become ROWS query heads of one new token, which share the
# keys of that head. The token is the last of its sequence, so all its heads see all keys. A row has the bits of any other step.

#: queries of a token; the last token of a sequence repeats its last query
ROWS = 64
#: head widths of the kernels on a GPU. Zeros fill a head up to the next one and change no sum
WIDTHS = (64, 128)


def _whole(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, ends: list[int], scale: float) -> Tensor:
    """BF16 [T, H, D], from queries, keys and values of sequences that end at ``ends[1:]``."""
    T, H, D = q_THD.shape
    width = next((width for width in WIDTHS if width >= D), D)
    q, k, v = (F.pad(t, (0, width - D)).contiguous() for t in (q_THD, k_THD, v_THD))
    pieces = [(a, b, row) for a, b in itertools.pairwise(ends) for row in range(a, b, ROWS)]
    longest = max(b - a for a, b in itertools.pairwise(ends))
    first, end, row = torch.tensor(pieces, device=q.device).T[..., None]
    places = row + torch.arange(ROWS, device=q.device)  # [R, ROWS]
    table = (first + torch.arange(longest, device=q.device)).clamp(max=T - 1).to(torch.int32)  # blocks of one key
    steps = (table, (end - first).flatten().to(torch.int32), torch.arange(len(pieces) + 1, dtype=torch.int32, device=q.device))
    q_RHD = q[places.minimum(end - 1)].transpose(1, 2).reshape(len(pieces), H * ROWS, width)
    with dispatch.attention_by("", q.device.type, width):  # the project's kernel: others have larger blocks
        out = ops.attention_paged(q_RHD, k.unsqueeze(1), v.unsqueeze(1), *steps, scale)
    count = (end - row).flatten().clamp(max=ROWS)
    piece_T = torch.arange(len(pieces), device=q.device).repeat_interleave(count, output_size=T)
    return out.view(-1, H, ROWS, width)[piece_T, :, torch.arange(T, device=q.device) - row[piece_T, 0], :D]


class _WholeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
        held = (q.to(torch.bfloat16), k.to(torch.bfloat16), v.to(torch.bfloat16))
        ctx.ends, ctx.scale, ctx.dtypes = list(dict.fromkeys(cu_seqlens.tolist())), scale, (q.dtype, k.dtype, v.dtype)
        ctx.save_for_backward(*held)
        return _whole(*held, ctx.ends, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        lengths = [b - a for a, b in itertools.pairwise(ctx.ends)]
        with torch.enable_grad():
            given = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            parts = zip(*(t.transpose(0, 1)[None].split(lengths, 2) for t in given), strict=True)
            out = torch.cat([F.scaled_dot_product_attention(*part, scale=ctx.scale) for part in parts], 2)[0].transpose(0, 1)
        found = torch.autograd.grad(out, given, grad_outputs[0].to(torch.bfloat16))
        return *(grad.to(dtype) for grad, dtype in zip(found, ctx.dtypes, strict=True)), None, None


def whole_attention(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """Attention within each sequence, without a mask: [T, H, D] converted to BF16, cu_seqlens [R + 1] -> BF16 [T, H, D].

    Gradients are those of torch's attention.
    """
    result: Tensor = _WholeAttention.apply(q_THD, k_THD, v_THD, cu_seqlens, scale)
    return result


# ---- Exact counterparts of a tower's modules -----------------------------------------------------

class ExactPatches:
    """A convolution over whole patches, as a product with independent rows."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        return ops.linear(input.flatten(1), self.weight.flatten(1), self.bias)


class ExactLayerNorm:
    """LayerNorm in FP64."""

    weight: Tensor
    bias: Tensor
    normalized_shape: tuple[int, ...]
    eps: float

    def forward(self, input: Tensor) -> Tensor:
        return rounded_once(lambda x, w, b: F.layer_norm(x, self.normalized_shape, w, b, self.eps), input, self.weight, self.bias)


class ExactActivation:
    """An elementwise function in FP64."""

    def forward(self, input: Tensor) -> Tensor:
        return rounded_once(super().forward, input)  # type: ignore[misc]


class ExactAngles:
    """Angles of a patch's row and column in FP64, so that the tower's cosines of them are the same in every batch.

    Frequencies are computed on the CPU: powers on a GPU differ in the last bits.
    """

    inv_freq: Tensor

    @torch.no_grad()
    def forward(self, *given: Any) -> Any:
        """Rows and columns [T, 2] -> Hugging Face's FP32 products as FP64 [T, D/2]. In old releases a number of positions.

        Since transformers 5.19 hidden states come first, and cosines and sines [T, D] are returned.
        """
        position_ids = given[-1]
        if not isinstance(position_ids, Tensor):
            position_ids = torch.arange(position_ids, device=self.inv_freq.device)
        angles = (position_ids.unsqueeze(-1) * _frequencies(self).to(position_ids.device)).flatten(1).double()
        if len(given) == 1:
            return angles
        whole = torch.cat((angles, angles), -1)
        return whole.cos(), whole.sin()


def _frequencies(rotary: Any) -> Tensor:
    """FP32 [D/4] of a rotary module of a tower, as its class computes them on a CPU."""
    with torch.device("cpu"):
        if hasattr(rotary, "compute_axial_rope_parameters"):
            found: Tensor = rotary.compute_axial_rope_parameters(rotary.config)[0]
            return found
        return 1.0 / (rotary.theta ** (torch.arange(0, rotary.dim, 2, dtype=torch.float) / rotary.dim))


class ExactVisionAttention:
    """Attention of patches, each of which sees its whole image or window.

    Rotates in FP32, as Hugging Face's code. Cosines are rounded to BF16: FSDP casts the inputs of each block to BF16.
    """

    qkv: nn.Module
    proj: nn.Module
    num_heads: int
    scaling: float

    def forward(
        self, hidden_states: Tensor, cu_seqlens: Tensor, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any
    ) -> Tensor:
        cos, sin = (t.to(torch.bfloat16).float().unsqueeze(1) for t in position_embeddings)

        def turn(x: Tensor) -> Tensor:
            low, high = x.float().chunk(2, -1)
            return (x.float() * cos + torch.cat((-high, low), -1) * sin).to(x.dtype)

        q, k, v = self.qkv(hidden_states).view(hidden_states.shape[0], 3, self.num_heads, -1).unbind(1)
        out: Tensor = self.proj(whole_attention(turn(q), turn(k), v, cu_seqlens, self.scaling).flatten(1))
        return out


def _counterpart(module: Any) -> type | None:
    """The exact counterpart of a tower's module; None if it needs none. By structure: the classes differ between families."""
    kind = type(module).__name__
    if isinstance(module, nn.Conv3d) and module.kernel_size == module.stride and not any(module.padding):
        return ExactPatches
    if isinstance(module, nn.LayerNorm):
        return ExactLayerNorm
    if isinstance(module, nn.Embedding):
        return modules.ExactEmbedding
    if isinstance(module, nn.Linear):
        return modules.ExactLinear
    if kind.endswith("RMSNorm"):
        return modules.ExactNorm
    if hasattr(module, "gate_proj"):
        return modules.ExactMLP
    if kind.endswith("VisionAttention"):
        return ExactVisionAttention
    if kind.endswith("VisionRotaryEmbedding"):
        return ExactAngles
    return ExactActivation if "GELU" in kind else None


def check(tower: Any, name: str) -> None:
    """Raise ModelError if a part of the vision tower ``name`` has no exact counterpart."""
    odd = {path: module for path, module in tower.named_modules() if _is_unknown(module)}
    attentions = sum(_counterpart(module) is ExactVisionAttention for module in tower.modules())
    if attentions != len(tower.blocks):
        odd[f"{attentions} attentions"] = tower
    for path, module in odd.items():
        required = "the patch embedding, attention, norms, MLPs and mergers of transformers' tower"
        found, fix = type(module).__name__, 'turn off what replaced it, or use align="linear"'
        raise ModelError(explain(f'align="exact" of {name}.{path}', required=required, found=found, fix=fix))


def _is_unknown(module: Any) -> bool:
    """Whether a module has parameters and no counterpart, or is an activation without one."""
    known = _counterpart(module)
    if known is modules.ExactMLP:
        return "silu" not in type(module.act_fn).__name__.lower()
    if known is ExactAngles:
        return not hasattr(module, "theta") and getattr(module, "rope_type", None) != "axial"
    own = getattr(module, "act_fn", None)
    if own is not None and _counterpart(own) is None:
        return True
    return known is None and next(module.parameters(recurse=False), None) is not None


def make_exact(tower: nn.Module) -> None:
    """Swap the modules of transformers' vision tower, in place."""
    for module in list(tower.modules()):
        if (found := _counterpart(module)) is not None:
            swap(module, found)
