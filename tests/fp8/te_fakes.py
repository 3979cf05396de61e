"""Stand-ins for TransformerEngine's classes, with the names that the code relies on; ``test_te_package`` compares them.

The quantizer follows TransformerEngine's formula: scale = 448 / amax (1 for 0), rounded down to a power of two if asked;
q = e4m3(x * scale); s = 1 / scale. Scales of blocks are padded with columns to a multiple of 4, here with 7.
"""

from __future__ import annotations

import enum
import sys
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

B = 128


def of(module: str) -> Any:
    """Give a class the module path that it has in TransformerEngine."""

    def move(kind: type) -> type:
        kind.__module__ = f"transformer_engine.{module}"
        return kind

    return move


class DType(enum.IntEnum):
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8


class Format(enum.Enum):
    E4M3 = 448
    HYBRID = 57344


@of("pytorch.tensor.float8_blockwise_tensor")
class Float8BlockwiseQTensor:
    """A quantized [N, K]: uint8 bytes with scales; ``but`` replaces any of its parts."""

    def __init__(self, shape: tuple[int, int], **parts: Any) -> None:
        self.shape = torch.Size(shape)
        self.parts = parts

    def numel(self) -> int:
        return self.shape.numel()

    def detach(self) -> Any:
        return self

    def get_metadata(self) -> dict[str, Any]:
        return self.parts

    def but(self, **parts: Any) -> Float8BlockwiseQTensor:
        return Float8BlockwiseQTensor(tuple(self.shape), **{**self.parts, **parts})


@of("pytorch.tensor.mxfp8_tensor")
class MXFP8Tensor:
    """Another quantized tensor."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = torch.Size(shape)

    def numel(self) -> int:
        return self.shape.numel()


@of("pytorch.tensor.float8_blockwise_tensor")
class Float8BlockQuantizer:
    block_len = B

    def __init__(
        self, fp8_dtype: Any, *, rowwise: bool, columnwise: bool, amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True, block_scaling_dim: int = 2,
    ) -> None:  # fmt: skip
        assert rowwise and amax_epsilon == 0.0
        self.dtype, self.pow2, self.dims = fp8_dtype, force_pow_2_scales, block_scaling_dim

    def __call__(self, x: torch.Tensor) -> Float8BlockwiseQTensor:
        assert x.dtype == torch.bfloat16 and x.is_contiguous()
        rows, cols = x.shape
        high = B if self.dims == 2 else 1
        n, g = -(-rows // high), -(-cols // B)
        tiles = F.pad(x.float(), (0, g * B - cols, 0, n * high - rows)).view(n, high, g, B)
        amax = tiles.abs().amax(dim=(1, 3))
        scale = torch.where(amax == 0, 1.0, 448.0 / amax)
        if self.pow2:
            scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
        q = (tiles * scale[:, None, :, None]).to(torch.float8_e4m3fn).view(n * high, g * B)[:rows, :cols]
        s = 1.0 / scale
        s = F.pad(s, (0, -g % 4), value=7.0) if self.dims == 2 else F.pad(s.t(), (0, -rows % 4), value=7.0)
        return Float8BlockwiseQTensor(
            (rows, cols), rowwise_data=q.contiguous().view(torch.uint8), rowwise_scale_inv=s.contiguous(),
            columnwise_data=None, columnwise_scale_inv=None, fp8_dtype=self.dtype, quantizer=self,
            is_2D_scaled=self.dims == 2, fake_dtype=torch.bfloat16,
        )  # fmt: skip


def quantized(weight: torch.Tensor, pow2: bool = True) -> Float8BlockwiseQTensor:
    return Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=False, force_pow_2_scales=pow2)(weight)


@of("common.recipe")
class Recipe:
    pass


@of("common.recipe")
class DelayedScaling(Recipe):
    fp8_format = Format.HYBRID


@of("common.recipe")
class MXFP8BlockScaling(Recipe):
    fp8_format = Format.E4M3


@of("common.recipe")
class Float8BlockScaling(Recipe):
    def __init__(self, pow2: bool = True, **other: Any) -> None:
        self.fp8_format = Format.E4M3
        params = types.SimpleNamespace(power_2_scale=pow2, amax_epsilon=0.0)
        self.fp8_quant_fwd_inp = self.fp8_quant_fwd_weight = self.fp8_quant_bwd_grad = params
        self.x_block_scaling_dim = self.grad_block_scaling_dim = 1
        self.w_block_scaling_dim = 2
        vars(self).update(other)


@of("pytorch.module.base")
class TransformerEngineBaseModule(nn.Module):
    pass


@of("pytorch.module.linear")
class Linear(TransformerEngineBaseModule):
    def __init__(self, in_features: int, out_features: int, recipe: Any = None) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.zeros(out_features, in_features, dtype=torch.bfloat16))
        self.fp8_meta = {} if recipe is None else {"recipe": recipe}


@of("pytorch.module.layernorm_linear")
class LayerNormLinear(Linear):
    """The real class does not derive from ``Linear``; nothing depends on that."""


@of("pytorch.attention.dot_product_attention")
class DotProductAttention(nn.Module):
    pass


class TELayerNormColumnParallelLinear(LayerNormLinear):
    """As Megatron's: a subclass defined outside TransformerEngine."""


class TERowParallelLinear(Linear):
    """As Megatron's."""


def install(monkeypatch: Any) -> None:
    """Make the quantizer importable from its path in TransformerEngine."""
    dotted = "transformer_engine.pytorch.tensor.float8_blockwise_tensor"
    parts = dotted.split(".")
    for end in range(1, len(parts) + 1):
        module = types.ModuleType(".".join(parts[:end]))
        module.__path__ = []  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    sys.modules[dotted].Float8BlockQuantizer = Float8BlockQuantizer  # type: ignore[attr-defined]
    extension = types.ModuleType("transformer_engine_torch")
    extension.DType = DType  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", extension)
