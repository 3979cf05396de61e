"""The formats of the rollout's linears: dtype, scales, quantizer and GEMM of each."""

from __future__ import annotations

import abc
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from vllm.model_executor.parameter import ChannelQuantScaleParameter, ModelWeightParameter

from jetrl_patch.adapters.vllm.shards import Shard
from jetrl_patch.backends import choose_backend, get_backend, rowwise
from jetrl_patch.backends.deep_gemm import pitched
from jetrl_patch.backends.quantize import Quantized, expand_weight_scale
from jetrl_patch.backends.row_equality import TRAINED, Layout, require_row_equality
from jetrl_patch.config.formats import POW2, Format
from jetrl_patch.errors import SyncError
from jetrl_patch.fp8.producers import available, fits
from jetrl_patch.kernels.formats import FP8, groups
from jetrl_patch.sync.digest import Pieces

if TYPE_CHECKING:
    from jetrl_patch.backends import Backend
    from jetrl_patch.backends.gpu import GpuBackend
    from jetrl_patch.config import Config


# ---- Layouts of scales: per block, or per row ----------------------------------------------------
# Both are an FP32 parameter ``weight_scale_inv`` (the factor that dequantizes) with one row per row of the weight. So any fused
# (qkv, gate_up) or tensor-parallel slice is a plain ``narrow``.

class BlockScales:
    """``[N, ceil(K/width)]``: the scale of a block is repeated for each of its rows.

    So the parts of a fused layer need not be multiples of 128, which vLLM's own block layout requires.

    """

    def __init__(self, form: Format = POW2) -> None:
        self.form, self.height, self.width = form, form.height, form.block

    def parameter(self, n: int, k: int, load: Callable[..., None]) -> torch.nn.Parameter:
        """Create the parameter for this rank's weight ``[n, k]``: FP32 ``[n, ceil(k/width)]``."""
        data = torch.ones(n, groups(k, self.width), dtype=torch.float32)
        return ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=load)

    def cuts(self, k: int, whole: int) -> bool:
        """Whether a rank's ``k`` of ``whole`` columns cut a block."""
        return self.form.cuts(k, whole)

    def per_row(self, loaded: torch.Tensor, rows: int, name: str) -> torch.Tensor:
        """Expand the trainer's block scales ``[ceil(rows/height), G]`` to ``[rows, G]``. Scales per row pass unchanged.

        Raises SyncError for a wrong shape.
        """
        if loaded.shape[0] == rows:
            return loaded
        if loaded.shape[0] != groups(rows, self.height):
            raise SyncError(
                f"{name}.weight_scale_inv: required {groups(rows, self.height)} block rows or {rows} rows, found shape "
                f"{list(loaded.shape)}. Install the same version of jetrl_patch on both sides."
            )
        return expand_weight_scale(loaded, rows)

    def add_to(self, pieces: Pieces, shard: Shard, scale: torch.Tensor) -> None:
        """Add this rank's scales ``[rows, G]``, one per block. A block that several ranks share is a rectangle of its own.

        If two rows of a block differ, ``pieces.read`` raises SyncError.
        """
        g0, height = shard.col0 // self.width, self.height
        g1 = g0 + scale.shape[1]
        first, last = shard.row0 // height, groups(shard.row1, height)
        lead = -shard.row0 % height  # rows of a block that begins on another rank
        blocks = torch.cat((scale[:1], scale[lead::height])) if lead else scale[::height]
        block_of_row = (torch.arange(scale.shape[0], device=scale.device) + shard.row0 % height) // height
        pieces.refuse(
            (blocks.view(torch.int32)[block_of_row] != scale.view(torch.int32)).any(),
            f"{shard.name}.weight_scale_inv: rows of one block hold different scales in the engine",
        )
        edges = {first, last}
        if shard.row0 % height:
            edges.add(first + 1)
        if shard.row1 % height and shard.row1 != shard.rows:
            edges.add(last - 1)
        for b0, b1 in itertools.pairwise(sorted(edges)):
            pieces.add(f"{shard.name}.weight_scale_inv", b0, b1, g0, g1, blocks[b0 - first : b1 - first])


class RowScales:
    """``[N, 1]``: one scale per output channel.

    Weights are quantized before they are sliced, so a slice along K (row-parallel) keeps the scale of the whole row. Each rank
    scales its slice of the activations by itself.
    """

    def parameter(self, n: int, k: int, load: Callable[..., None]) -> torch.nn.Parameter:
        """Create the parameter for this rank's weight ``[n, k]``: FP32 ``[n, 1]``."""
        return ChannelQuantScaleParameter(data=torch.ones(n, 1, dtype=torch.float32), output_dim=0, weight_loader=load)

    def cuts(self, k: int, whole: int) -> bool:
        """Return False: no split cuts a row's scale."""
        return False

    def per_row(self, loaded: torch.Tensor, rows: int, name: str) -> torch.Tensor:
        """Return the scales unchanged, ``[rows, 1]``. Raises SyncError for a wrong shape."""
        if tuple(loaded.shape) != (rows, 1):
            raise SyncError(
                f"{name}.weight_scale_inv: required shape {[rows, 1]}, found {list(loaded.shape)}. "
                f"Install the same version of jetrl_patch on both sides."
            )
        return loaded

    def add_to(self, pieces: Pieces, shard: Shard, scale: torch.Tensor) -> None:
        """Add one rectangle; ranks that split a row along K hold the same scale."""
        pieces.add(f"{shard.name}.weight_scale_inv", shard.row0, shard.row1, 0, 1, scale)


# ---- The formats ---------------------------------------------------------------------------------
# A layer holds ``weight [N, K]`` in the format's dtype, and FP32 scales. Weights are quantized whole and then sliced, so their
# bytes do not depend on the tensor-parallel size.

logger = logging.getLogger("vllm.jetrl_patch")  # vLLM shows INFO only of loggers below its own
#: name of a layer's buffer with the block scales of its weight
BLOCKS = "weight_scale_blocks"


class LinearFormat(abc.ABC):
    """Storage and GEMM of one linear. Each layer has its own instance."""

    dtype: ClassVar[torch.dtype]
    scales: BlockScales | RowScales

    def __init__(self, config: Config) -> None:
        self.config = config
        self._backend: Backend | None = None

    def backend(self, device: torch.device) -> Backend:
        """Return the FP8 backend. It is chosen once, by the trainer's rule."""
        if self._backend is None:
            self._backend = get_backend(choose_backend(self.config.backend, device.type, self.config.scale_format))
        return self._backend

    def check_width(self, name: str, K: int) -> None:  # noqa: B027  # most formats take any width
        """Raise ModelError for a layer that is too wide."""

    def prepare(self, layer: torch.nn.Module, layout: Layout | None = None, most: int = TRAINED) -> None:
        """Choose the GEMM after a load. Raise ModelError before serving if the format's guarantee does not hold on this device.

        Otherwise the first product would choose. With dummy weights, which are never quantized, that would be inside a compiled
        graph, where a backend cannot be imported. ``layout`` says how this rank's weight is composed of the trainer's weights
        (None: it is one of them), ``most`` is the largest number of rows in one step.
        """
        self.backend(layer.weight.device)

    def compiled_rows(self, device: torch.device, most: int) -> Sequence[int]:
        """Row counts up to ``most`` whose products compile every kernel of this layer."""
        return self.backend(device).compiled_rows(most)

    def written(self, layer: torch.nn.Module) -> None:  # noqa: B027  # see BlockFp8
        """Renew or drop what was derived from the parameters, which have been written."""

    @abc.abstractmethod
    def quantize(self, w_NK: torch.Tensor) -> Quantized:
        """Quantize a whole BF16 weight [N, K] to bytes [N, K] and scales, as the trainer does."""

    def weight(self, layer: torch.nn.Module) -> Quantized:
        """The layer's parameters as ``product`` reads them."""
        return Quantized(layer.weight.data, layer.weight_scale_inv.data, "channels", self.config.scale_format)

    def producers(self, layer: torch.nn.Module) -> GpuBackend | None:
        """Return the backend that can fuse norms and activations with the quantization for this layer; None if none can."""
        return None

    def product(self, x_MK: torch.Tensor, w: Quantized, out_dtype: torch.dtype) -> torch.Tensor:
        """Multiply BF16 activations by this rank's weight: [M, N] in BF16, or in FP32 as an unrounded partial sum."""
        return self.backend(x_MK.device).fprop(x_MK, w, out_dtype)


class BlockFp8(LinearFormat):
    """e4m3 weights and activations with scales per block, as in the trainer."""

    dtype = FP8

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.scales = BlockScales(config.scales)
        self._packed: torch.Tensor | None = None
        self._is_packed = False

    def written(self, layer: torch.nn.Module) -> None:
        """Recompute the block scales, and pack the weight again for the next product."""
        self._packed, self._is_packed = None, False
        held = getattr(layer, BLOCKS, None)
        if held is not None:
            held.copy_(self._blocks(layer))

    def weight(self, layer: torch.nn.Module) -> Quantized:
        """With scales per row, per block if they are kept, and in the backend's fastest layout, packed once after a load."""
        q, s = layer.weight.data, layer.weight_scale_inv.data
        w = Quantized(q, s, "rows", self.config.scale_format, s_blocks=getattr(layer, BLOCKS, None))
        if torch.compiler.is_compiling():  # a graph would keep the packed copy that it was traced with
            return w
        if not self._is_packed:
            self._packed, self._is_packed = self.backend(q.device).pack(w), True
        w.packed = self._packed
        return w

    def prepare(self, layer: torch.nn.Module, layout: Layout | None = None, most: int = TRAINED) -> None:
        """Refuse a backend whose rows depend on the batch or on fused weights, and lay out the scales as the backend reads them.

        Rows that depend on them would not be the trainer's. If a fused part starts inside a block, on disk or here, that block
        has two scales, so no block scales are kept and FProp reads scales per row.
        """
        backend, weight = self.backend(layer.weight.device), layer.weight
        if self.config.fp8_train:
            compared = layout
            if layout is not None and not self.config.exact:
                compared = layout._replace(ranks=1)  # vLLM adds rounded sums over ranks, and the trainer does not
            shape, start = (weight.shape[0], weight.shape[1]), time.monotonic()
            if require_row_equality(backend, shape, weight.device, self.config.scale_format, compared, most):
                words = "jetrl_patch: backend=%r computes the trainer's rows for weights %s, tried in %.1f s"
                logger.info(words, backend.name, list(shape), time.monotonic() - start)
        if getattr(backend, "columns", False):  # by columns, or each product that reads scales per row would copy them first
            layer.weight_scale_inv.data = pitched(layer.weight_scale_inv.data)
        if backend.blocks and layout is not None and layout.in_blocks and getattr(layer, BLOCKS, None) is None:
            layer.register_buffer(BLOCKS, self._blocks(layer), persistent=False)  # no weight sync changes its address
        self.written(layer)

    def _blocks(self, layer: torch.nn.Module) -> torch.Tensor:
        scale = layer.weight_scale_inv.data
        return self.backend(scale.device).block_scales(scale)

    def producers(self, layer: torch.nn.Module) -> GpuBackend | None:
        """Return the backend on a GPU, for widths that its kernels support."""
        backend, weight = self.backend(layer.weight.device), layer.weight
        if not available(backend.name, weight.device.type):
            return None
        found = cast("GpuBackend", backend)
        return found if fits(found, weight, weight.shape[1]) else None

    def quantize(self, w_NK: torch.Tensor) -> Quantized:
        """Scales [ceil(N/128), ceil(K/128)]."""
        return self.backend(w_NK.device).quantize_weight(w_NK, self.config.scale_format)


class ChannelFp8(LinearFormat):
    """e4m3 with per-channel weight scales and per-token activation scales: a block GEMM with scales constant along K."""

    dtype = FP8
    scales = RowScales()

    def quantize(self, w_NK: torch.Tensor) -> Quantized:
        """Scales [N, 1]."""
        return rowwise.quantize_fp8_rows(w_NK, self.config.scale_format)


# ---- INT8 ----------------------------------------------------------------------------------------
# Weights have one scale per output channel and are installed as the trainer sends them. Activations have one scale per token. The
# GEMM is exact in int32. On CUDA vLLM's own kernels run if they apply (not yet tried on a GPU), otherwise torch's.

class ChannelInt8(LinearFormat):
    """int8 with per-channel weight scales and per-token activation scales."""

    dtype = torch.int8
    scales = RowScales()
    _mm: rowwise.IntMM | None = None

    def check_width(self, name: str, K: int) -> None:
        """Raise ModelError for a layer too wide for an int32 sum."""
        rowwise.check_width(name, K)

    def prepare(self, layer: torch.nn.Module, layout: Layout | None = None, most: int = TRAINED) -> None:
        self._mm = rowwise.choose(self.config.backend, layer.weight.device.type)

    def compiled_rows(self, device: torch.device, most: int) -> Sequence[int]:
        """Return nothing: vLLM's wheel has compiled kernels."""
        return ()

    def quantize(self, w_NK: torch.Tensor) -> Quantized:
        """Scales [N, 1]."""
        return rowwise.quantize_int8_rows(w_NK)

    def product(self, x_MK: torch.Tensor, w: Quantized, out_dtype: torch.dtype) -> torch.Tensor:
        """Use vLLM's quantizer and CUTLASS GEMM on CUDA (Triton for widths CUTLASS does not support), else torch's."""
        name = self.config.backend
        if x_MK.is_cuda and name != "torch" and out_dtype == torch.bfloat16:  # not yet run on a GPU
            from vllm import _custom_ops

            (q_MK, s_M1, _), (w_NK, s_N1) = _custom_ops.scaled_int8_quant(x_MK.contiguous(), symmetric=True), w
            return _custom_ops.cutlass_scaled_mm(q_MK, w_NK.t(), scale_a=s_M1, scale_b=s_N1, out_dtype=torch.bfloat16)
        if self._mm is None:
            self._mm = rowwise.choose(name, x_MK.device.type)
        return rowwise.int8_fprop(x_MK, w, out_dtype, self._mm)


_CLASSES: dict[str, type[LinearFormat]] = {"fp8-block": BlockFp8, "fp8-channel": ChannelFp8, "int8-channel": ChannelInt8}


def format_of(config: Config) -> LinearFormat:
    """Return the format for one layer of a quantized rollout."""
    assert config.format is not None
    return _CLASSES[config.format.name](config)
