"""The formats of the rollout's linears: dtype, scales, quantizer and GEMM of each."""

from __future__ import annotations

import abc
import importlib
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol, cast

import torch
from vllm.model_executor.parameter import ChannelQuantScaleParameter, ModelWeightParameter

from jetrl_patch.adapters.vllm.shards import Shard
from jetrl_patch.backends import choose_backend, get_backend, rowwise
from jetrl_patch.backends.deep_gemm import pitched
from jetrl_patch.backends.quantize import Quantized, expand_weight_scale
from jetrl_patch.backends.row_equality import TRAINED, Layout, require_row_equality
from jetrl_patch.errors import SyncError
from jetrl_patch.fp8.producers import available, fits
from jetrl_patch.kernels.formats import BLOCK, FP8, groups
from jetrl_patch.sync.digest import Pieces

if TYPE_CHECKING:
    from jetrl_patch.backends import Backend
    from jetrl_patch.backends.gpu import GpuBackend
    from jetrl_patch.config import Config

__all__ = ["BLOCKS", "BlockFp8", "BlockScales", "ChannelFp8", "LinearFormat", "RowScales", "Scales", "format_of"]


# ---- The layout of a quantized linear's scales in the rollout: per 128x128 block, or per row -----
# Both are an FP32 parameter ``weight_scale_inv`` (the factor that dequantizes), with one row for each row of the weight, so
# that any fused (qkv, gate_up) or tensor-parallel slice is a plain ``narrow``.

class Scales(Protocol):
    """The layout of a format's scales."""

    def parameter(self, n: int, k: int, load: Callable[..., None]) -> torch.nn.Parameter:
        """Create the scales of this rank's weight ``[n, k]``, to be loaded."""

    def cuts(self, k: int, whole: int) -> bool:
        """Whether a rank's ``k`` columns of ``whole`` cut through a block with one scale."""

    def per_row(self, loaded: torch.Tensor, rows: int, name: str) -> torch.Tensor:
        """Expand the scales of a whole weight, as received, to ``[rows, …]``. Raises SyncError for a wrong shape."""

    def add_to(self, pieces: Pieces, shard: Shard, scale: torch.Tensor) -> None:
        """Add this rank's scales, in the coordinates in which they were sent."""


class BlockScales:
    """``[N, ceil(K/128)]``: the scale of a 128x128 block is repeated for each of its rows.

    Each row carries its own scales, so widths need not be multiples of 128. vLLM's own block layout refuses fused layers
    whose parts are not multiples of 128.
    """

    def parameter(self, n: int, k: int, load: Callable[..., None]) -> torch.nn.Parameter:
        """FP32 ``[n, ceil(k/128)]``."""
        data = torch.ones(n, groups(k), dtype=torch.float32)
        return ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=load)

    def cuts(self, k: int, whole: int) -> bool:
        """Whether a rank's share of K cuts a block."""
        return k != whole and bool(k % BLOCK)

    def per_row(self, loaded: torch.Tensor, rows: int, name: str) -> torch.Tensor:
        """Expand block scales ``[ceil(rows/128), G]`` from the trainer; per-row scales from a loader pass unchanged."""
        if loaded.shape[0] == rows:
            return loaded
        if loaded.shape[0] != groups(rows):
            raise SyncError(
                f"{name}.weight_scale_inv: required {groups(rows)} block rows or {rows} rows, found shape "
                f"{list(loaded.shape)}. Install the same version of jetrl_patch on both sides."
            )
        return expand_weight_scale(loaded, rows)

    def add_to(self, pieces: Pieces, shard: Shard, scale: torch.Tensor) -> None:
        """Reduce per-row scales ``[rows, G]`` to block scales. A block that ranks share is a separate rectangle, equal on all.

        If two rows of one block differ, ``pieces.read`` raises SyncError.
        """
        g0 = shard.col0 // BLOCK
        g1 = g0 + scale.shape[1]
        first, last = shard.row0 // BLOCK, groups(shard.row1)
        lead = -shard.row0 % BLOCK  # rows of a block that begins on another rank
        blocks = torch.cat((scale[:1], scale[lead::BLOCK])) if lead else scale[::BLOCK]
        block_of_row = (torch.arange(scale.shape[0], device=scale.device) + shard.row0 % BLOCK) // BLOCK
        pieces.refuse(
            (blocks.view(torch.int32)[block_of_row] != scale.view(torch.int32)).any(),
            f"{shard.name}.weight_scale_inv: rows of one 128-block hold different scales in the engine",
        )
        edges = {first, last}
        if shard.row0 % BLOCK:
            edges.add(first + 1)
        if shard.row1 % BLOCK and shard.row1 != shard.rows:
            edges.add(last - 1)
        for b0, b1 in itertools.pairwise(sorted(edges)):
            pieces.add(f"{shard.name}.weight_scale_inv", b0, b1, g0, g1, blocks[b0 - first : b1 - first])


class RowScales:
    """``[N, 1]``: one scale per output channel.

    A slice along K (row-parallel) keeps the scale of the whole row, because weights are quantized before they are sliced,
    while each rank's activations have the scale of its own slice.
    """

    def parameter(self, n: int, k: int, load: Callable[..., None]) -> torch.nn.Parameter:
        """FP32 ``[n, 1]``."""
        return ChannelQuantScaleParameter(data=torch.ones(n, 1, dtype=torch.float32), output_dim=0, weight_loader=load)

    def cuts(self, k: int, whole: int) -> bool:
        """Return False: a slice keeps whole rows' scales."""
        return False

    def per_row(self, loaded: torch.Tensor, rows: int, name: str) -> torch.Tensor:
        """Return the scales unchanged, ``[rows, 1]``."""
        if tuple(loaded.shape) != (rows, 1):
            raise SyncError(
                f"{name}.weight_scale_inv: required shape {[rows, 1]}, found {list(loaded.shape)}. "
                f"Install the same version of jetrl_patch on both sides."
            )
        return loaded

    def add_to(self, pieces: Pieces, shard: Shard, scale: torch.Tensor) -> None:
        """Add one rectangle; ranks that split a row along K hold the same scale."""
        pieces.add(f"{shard.name}.weight_scale_inv", shard.row0, shard.row1, 0, 1, scale)


# ---- The formats of the rollout's linears: dtype, scales, quantizer and GEMM of each -------------
# A layer holds ``weight [N, K]`` in the format's dtype, and FP32 scales. Weights are quantized whole, before they are
# sliced, so that the bytes do not depend on the tensor-parallel size.

logger = logging.getLogger("vllm.jetrl_patch")  # vLLM shows information from loggers below its own
#: the buffer of a layer that holds the block scales of its weight
BLOCKS = "weight_scale_blocks"


class LinearFormat(abc.ABC):
    """Storage and GEMM of one linear. Each layer has its own instance."""

    dtype: ClassVar[torch.dtype]
    scales: ClassVar[Scales]

    def __init__(self, config: Config) -> None:
        self.config = config
        self._backend: Backend | None = None

    def backend(self, device: torch.device) -> Backend:
        """Return the FP8 GEMM backend, chosen once by the same rule as in the trainer."""
        if self._backend is None:
            self._backend = get_backend(choose_backend(self.config.backend, device.type))
        return self._backend

    def check_width(self, name: str, K: int) -> None:  # noqa: B027  # most formats take any width
        """Raise ModelError for a layer that is too wide."""

    def check_serving(self, weight: torch.Tensor, layout: Layout | None = None, most: int = TRAINED) -> None:
        """Choose the GEMM, and raise ModelError before serving if the format does not keep its guarantee on this device.

        Dummy weights are never quantized, so without this the first call would choose: inside a compiled graph, which
        cannot import a backend. ``layout`` says how this rank's weight is made of the trainer's; None if they are the same.
        """
        self.backend(weight.device)

    def compiled_rows(self, device: torch.device, most: int) -> Sequence[int]:
        """Numbers of rows up to ``most`` whose products compile every kernel of this layer."""
        return self.backend(device).compiled_rows(most)

    def lay_out(self, layer: torch.nn.Module) -> None:  # noqa: B027  # see BlockFp8
        """Store the parameters as the GEMM reads them. What is loaded later keeps this layout."""

    def hold_blocks(self, layer: torch.nn.Module, layout: Layout | None) -> None:  # noqa: B027  # see BlockFp8
        """Keep what the GEMM reads beside the parameters, if anything."""

    def renew_blocks(self, layer: torch.nn.Module) -> None:  # noqa: B027
        """Compute it again, after a write to the parameters."""

    def written(self) -> None:  # noqa: B027  # see BlockFp8
        """Drop what was made of the weight: it is being written."""

    @abc.abstractmethod
    def quantize(self, w_NK: torch.Tensor) -> Quantized:
        """Quantize a whole BF16 weight [N, K] to bytes [N, K] and scales, as the trainer does."""

    def weight(self, layer: torch.nn.Module) -> Quantized:
        """The layer's parameters as ``product`` reads them."""
        return Quantized(layer.weight.data, layer.weight_scale_inv.data, "channels", self.config.scale_format)

    def producers(self, layer: torch.nn.Module) -> GpuBackend | None:
        """Return the backend that can quantize what this layer reads where it is computed; None: the layer takes BF16 alone."""
        return None

    @abc.abstractmethod
    def product(self, x_MK: torch.Tensor, w: Quantized, out_dtype: torch.dtype) -> torch.Tensor:
        """Multiply BF16 activations by this rank's weight: [M, N] in BF16, or in FP32 as an unrounded partial sum."""


class BlockFp8(LinearFormat):
    """e4m3 weights in 128x128 blocks, activations in groups of 128, as in the trainer."""

    dtype = FP8
    scales = BlockScales()

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._packed: torch.Tensor | None = None
        self._is_packed = False

    def written(self) -> None:
        """The next product packs the weight anew."""
        self._packed, self._is_packed = None, False

    def weight(self, layer: torch.nn.Module) -> Quantized:
        """With scales per row, per block if they are held, and packed as the backend reads it fastest, once after a load."""
        q, s = layer.weight.data, layer.weight_scale_inv.data
        w = Quantized(q, s, "rows", self.config.scale_format, s_blocks=getattr(layer, BLOCKS, None))
        if torch.compiler.is_compiling():  # a graph would keep the copy of the weights that it was traced with
            return w
        if not self._is_packed:
            self._packed, self._is_packed = self.backend(q.device).pack(w), True
        w.packed = self._packed
        return w

    def check_serving(self, weight: torch.Tensor, layout: Layout | None = None, most: int = TRAINED) -> None:
        """Refuse a backend whose rows depend on the batch or on what the weight is fused with: the trainer computes others."""
        super().check_serving(weight, layout, most)
        if self.config.fp8_train:
            if layout is not None and not self.config.exact:
                layout = layout._replace(ranks=1)  # vLLM adds rounded sums, which the trainer does not follow
            backend, shape, start = self.backend(weight.device), (weight.shape[0], weight.shape[1]), time.monotonic()
            if require_row_equality(backend, shape, weight.device, self.config.scale_format, layout, most):
                words = "jetrl_patch: backend=%r computes the trainer's rows for weights %s, tried in %.1f s"
                logger.info(words, backend.name, list(shape), time.monotonic() - start)

    def lay_out(self, layer: torch.nn.Module) -> None:
        """Scales per row by columns where products read them so: for partial sums, or where blocks have no scale of their own.

        Else each of these products would copy them first.
        """
        if getattr(self.backend(layer.weight.device), "columns", False):
            layer.weight_scale_inv.data = pitched(layer.weight_scale_inv.data)

    def hold_blocks(self, layer: torch.nn.Module, layout: Layout | None) -> None:
        """For a backend that reads block scales: keep them as a buffer, at the same address for every weight sync.

        A part that starts inside a block, on disk or here, leaves a block with two scales; FProp then reads those per row.
        """
        if self.backend(layer.weight.device).blocks and layout is not None and layout.in_blocks:
            if getattr(layer, BLOCKS, None) is None:
                layer.register_buffer(BLOCKS, self._blocks(layer), persistent=False)
            else:
                self.renew_blocks(layer)

    def renew_blocks(self, layer: torch.nn.Module) -> None:
        """A scale was written."""
        held = getattr(layer, BLOCKS, None)
        if held is not None:
            held.copy_(self._blocks(layer))

    def _blocks(self, layer: torch.nn.Module) -> torch.Tensor:
        scale = layer.weight_scale_inv.data
        return self.backend(scale.device).block_scales(scale)

    def producers(self, layer: torch.nn.Module) -> GpuBackend | None:
        """On a GPU, for widths that the kernels take."""
        backend, weight = self.backend(layer.weight.device), layer.weight
        if not available(backend.name, weight.device.type):
            return None
        found = cast("GpuBackend", backend)
        return found if fits(found, weight, weight.shape[1]) else None

    def quantize(self, w_NK: torch.Tensor) -> Quantized:
        """Scales [ceil(N/128), ceil(K/128)]."""
        return self.backend(w_NK.device).quantize_weight(w_NK, self.config.scale_format)

    def product(self, x_MK: torch.Tensor, w: Quantized, out_dtype: torch.dtype) -> torch.Tensor:
        """By the backend, scales [N, ceil(K/128)]."""
        return self.backend(x_MK.device).fprop(x_MK, w, out_dtype)


class ChannelFp8(LinearFormat):
    """e4m3 with per-channel weight scales and per-token activation scales: a block GEMM with scales constant along K."""

    dtype = FP8
    scales = RowScales()

    def quantize(self, w_NK: torch.Tensor) -> Quantized:
        """Scales [N, 1]."""
        return rowwise.quantize_fp8_rows(w_NK, self.config.scale_format)

    def product(self, x_MK: torch.Tensor, w: Quantized, out_dtype: torch.dtype) -> torch.Tensor:
        """By the backend, scales [N, 1]."""
        return rowwise.channel_fprop(self.backend(x_MK.device), x_MK, w, out_dtype)


#: format name -> class, imported on first use
_CLASSES = {
    "fp8-block": "formats:BlockFp8",
    "fp8-channel": "formats:ChannelFp8",
    "int8-channel": "head:ChannelInt8",
}


def format_of(config: Config) -> LinearFormat:
    """Return the format for one layer of a quantized rollout."""
    assert config.format is not None
    module, _, name = _CLASSES[config.format.name].partition(":")
    found: LinearFormat = getattr(importlib.import_module(f"jetrl_patch.adapters.vllm.{module}"), name)(config)
    return found
