"""How the elements and scales of a quantized weight travel in a sync: as they are in memory, or in the format's own bits."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from jetrl_patch.backends.quantize import two_levels
from jetrl_patch.errors import SyncError, explain
from jetrl_patch.kernels.formats import FP8, exponents

# Digests are those of the unpacked tensors, which trainer and engine hold, so they also prove this step.


class Packing:
    """Sends elements, e4m3 [N, K], and FP32 scales as they are. Subclasses pack one or both of them into uint8.

    Unpacking restores every bit, and raises SyncError for a tensor that packing cannot have made.
    """

    def elements(self, q_NK: Tensor) -> Tensor:
        """What is sent for the elements."""
        return q_NK

    def scales(self, s: Tensor) -> Tensor:
        """What is sent for the scales."""
        return s

    def unpacked_elements(self, sent: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The elements, of this shape."""
        return sent

    def unpacked_scales(self, sent: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The scales, of this shape."""
        return sent


class Exponents(Packing):
    """MXFP8: a scale is a power of two, and travels as E8M0, one byte."""

    def scales(self, s: Tensor) -> Tensor:
        """Uint8 of the same shape."""
        return exponents(s)

    def unpacked_scales(self, sent: Tensor, shape: tuple[int, ...]) -> Tensor:
        """FP32."""
        _check(sent, shape)
        scale = (sent.to(torch.int32) << 23).view(torch.float32)
        return torch.where(sent == 255, torch.nan, scale)


#: the e4m3 bytes of the sixteen e2m1 values, in the order of their codes
_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]).to(FP8).view(torch.uint8)
_DECODED = torch.cat((_VALUES, _VALUES | 0x80))
#: e4m3 byte -> code
_CODES = torch.zeros(256, dtype=torch.uint8).index_copy(0, _DECODED.long(), torch.arange(16, dtype=torch.uint8))


class FourBits(Packing):
    """NVFP4: two elements to a byte; e4m3 scales, and one FP32 number for the weight after them."""

    def elements(self, q_NK: Tensor) -> Tensor:
        """Uint8 [N, ceil(K / 2)], the element with the lower index in the lower half."""
        codes = F.pad(_CODES.to(q_NK.device)[q_NK.view(torch.uint8).long()], (0, q_NK.shape[1] % 2))
        return codes[:, ::2] | codes[:, 1::2] << 4

    def scales(self, s: Tensor) -> Tensor:
        """Uint8 [N * G + 4]."""
        inner, outer = two_levels(s, one=True)
        return torch.cat([part.contiguous().view(torch.uint8).flatten() for part in (inner, outer)])

    def unpacked_elements(self, sent: Tensor, shape: tuple[int, ...]) -> Tensor:
        """E4m3."""
        N, K = shape
        _check(sent, (N, -(-K // 2)))
        codes = torch.stack((sent & 15, sent >> 4), -1).flatten(1)[:, :K]
        return _DECODED.to(sent.device)[codes.long()].view(FP8)

    def unpacked_scales(self, sent: Tensor, shape: tuple[int, ...]) -> Tensor:
        """FP32."""
        count = math.prod(shape)
        _check(sent, (count + 4,))
        return sent[:count].view(FP8).view(shape).float() * sent[count:].clone().view(torch.float32)


def _check(sent: Tensor, shape: tuple[int, ...]) -> None:
    if sent.dtype != torch.uint8 or tuple(sent.shape) != shape:
        required, found = f"uint8 {list(shape)}", f"{sent.dtype} {list(sent.shape)}"
        fix = "install the same version of jetrl_patch in the trainer and in the rollout"
        raise SyncError(explain("a packed weight", required=required, found=found, fix=fix))


_PACKINGS: dict[str, Packing] = {"mxfp8": Exponents(), "nvfp4": FourBits()}
_PLAIN = Packing()


def packing_of(scale_format: str) -> Packing:
    """How weights of a scale format travel."""
    return _PACKINGS.get(scale_format, _PLAIN)
