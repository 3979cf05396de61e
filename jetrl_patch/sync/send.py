"""The trainer's side of a weight sync: the stream of messages, buckets for transfers, and syncs in FP16."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from jetrl_patch.backends import rowwise
from jetrl_patch.backends.quantize import Quantized, quantize_weight
from jetrl_patch.backends.transformer_engine import is_te_tensor, take
from jetrl_patch.config.formats import ScaleFormat
from jetrl_patch.errors import UNQUANTIZED, ModelError, SyncError
from jetrl_patch.sync.delta import NamedTensor, Sent, SyncStats
from jetrl_patch.sync.digest import Pending, read, start
from jetrl_patch.sync.packing import packing_of
from jetrl_patch.sync.protocol import (
    ALIGNMENT,
    COMMIT,
    MANIFEST,
    SCALE_SUFFIX,
    Manifest,
    Terms,
    dtype_name,
    encode_json,
    weights_of,
)

__all__ = [
    "BUCKET_BYTES", "QUANTIZERS", "Bucket", "Entry", "NamedTensor", "Quantize", "SyncStats", "check_fits", "half_stream",
    "misfit", "pack", "quantized_stream", "unpack",
]  # fmt: skip


# ---- The weight quantizer of each rollout format, for a trainer that computes in BF16 itself -----

#: name of a ``RolloutFormat`` -> (BF16 weight [N, K], scale format) -> bytes [N, K] and the FP32 scales to send
QUANTIZERS: dict[str, Callable[[torch.Tensor, ScaleFormat], Quantized]] = {
    "fp8-block": quantize_weight,
    "fp8-channel": rowwise.quantize_fp8_rows,
    "int8-channel": lambda weight, _: rowwise.quantize_int8_rows(weight),
}


# ---- The stream: a sync as the trainer sends it ---------------------------------------------------
#     manifest · (q, scales) per quantized layer, BF16 for the rest, in the framework's order · commit
#
# Each weight is cast to BF16 and quantized once, so every process that sees the BF16 value gets the same bytes. NaN or Inf in a
# block of weights makes its scale NaN or Inf, which the digest of the scales reports. The stream holds one tensor at a time. With
# a base (``delta``), it sends only the changes since the last sync.

#: (layer name, BF16 weight [N, K]) -> the bytes and scales to send and install
Quantize = Callable[[str, torch.Tensor], Quantized]

#: bytes of digested tensors between two reads of the device, as many as in a bucket
_READ_EVERY = 256 << 20

#: types of plain tensors; TransformerEngine's quantized ones are subclasses
_PLAIN = (torch.Tensor, torch.nn.Parameter)

#: changes the weights before they are checked and quantized
Transform = Callable[[Iterable[NamedTensor]], Iterator[NamedTensor]]


class _Outgoing:
    """What is sent, with its digests. Those on a device are read together, once for every ``_READ_EVERY`` bytes."""

    def __init__(self, stats: SyncStats, base: Sent | None) -> None:
        self.names: set[str] = set()
        self._stats = stats
        self._base = base
        self._started: dict[str, Pending] = {}
        self._bytes = 0

    def add(self, name: str, tensor: torch.Tensor, packed: Callable[[torch.Tensor], torch.Tensor] | None = None) -> NamedTensor:
        """Start a tensor's digest, and return what to send for it. Raises SyncError as ``read`` does, now or at a later call.

        ``packed`` makes what is sent, unless only changes are.
        """
        tensor = tensor.contiguous()
        self._stats.tensors += 1
        self.names.add(name)
        started = self._started[name] = start(tensor)
        self._bytes += tensor.nbytes
        if isinstance(started, tuple) or self._bytes > _READ_EVERY:  # a tuple has been read: the tensor is on the CPU
            self.read()
        if self._base is not None:
            sent = self._base.pack(name, tensor, self._stats)
        else:
            sent = name, tensor if packed is None else packed(tensor)
        self._stats.total += sent[1].nbytes
        return sent

    def read(self) -> None:
        """Read the started digests. Raises SyncError, with the weight's name, if a value is NaN or Inf."""
        for name, (value, special) in zip(self._started, read(list(self._started.values())), strict=True):
            if special:  # a scale is NaN or Inf if a weight in its block is
                raise SyncError(
                    f"{name.removesuffix(SCALE_SUFFIX)} holds NaN or Inf, so the sync was stopped. Check the gradient norm and "
                    f"the learning rate of the last optimizer step."
                )
            self._stats.digests[name] = value
        self._started, self._bytes = {}, 0


def quantized_stream(
    weights: Iterable[NamedTensor],
    *,
    terms: Terms,
    layers: Collection[str],
    shapes: Mapping[str, tuple[int, ...]],
    stats: SyncStats,
    quantize: Quantize | None = None,
    transform: Transform | None = None,
    guarded: Collection[str] = (),
    base: Sent | None = None,
    fp32: Collection[str] = (),
) -> Iterator[NamedTensor]:
    """Yield the messages of one sync.

    Args:
        weights: the framework's ``(Hugging Face name, full tensor)``, any float dtype, or TransformerEngine's FP8.
        terms: how the trainer computes.
        layers: names of the quantized modules.
        shapes: name -> shape of every tensor that ``weights`` must yield.
        stats: filled by the stream.
        quantize: the trainer's own quantizer, which may have the bytes already; by default that of the format.
        transform: applied to the weights before they are checked and quantized.
        guarded: modules that the precision guard moved to BF16; none of them is in ``layers``.
        base: what the last sync sent, if only changes are to be sent.
        fp32: names of the tensors that are sent in FP32.

    Raises:
        SyncError: a weight holds NaN or Inf; a tensor is unannounced, duplicated or missing.
    """
    ours = set(weights_of(layers))
    absent = sorted(ours - set(shapes))
    if absent:
        raise SyncError(f"quantized layers without a weight in the model that is sent ({len(absent)}): {', '.join(absent[:3])}")
    if quantize is None and terms.quantized:
        quantize = _by_contract(terms)
    dtypes = dict.fromkeys(fp32, "float32") | dict.fromkeys(ours, terms.weight_dtype)
    announced = {name: (tuple(shape), dtypes.get(name, "bfloat16")) for name, shape in shapes.items()}
    manifest = Manifest(
        terms=terms,
        layers=tuple(sorted(layers)),
        tensors=announced,
        guarded=tuple(sorted(guarded)),
        base="" if base is None else base.begin(),
    )
    yield MANIFEST, manifest.encode()
    outgoing, packing = _Outgoing(stats, base), packing_of(terms.scale_format)
    for name, weight in weights if transform is None else transform(weights):
        _check_announced(name, weight, announced, outgoing.names)
        theirs = type(weight) not in _PLAIN and is_te_tensor(weight)
        if name in ours and quantize is not None and terms.quantized:
            layer = name.removesuffix(".weight")
            if theirs:  # already FP8: send its bytes and scales unchanged
                q, scales = take(layer, weight, terms.scale_format)  # type: ignore[arg-type]
            else:
                q, scales = quantize(layer, weight.detach().to(torch.bfloat16))
            del weight
            # both before q is yielded, because the digest of the scales reports NaN and Inf
            sent = [outgoing.add(name, q, packing.elements), outgoing.add(name + SCALE_SUFFIX, scales, packing.scales)]
        elif theirs:
            raise SyncError(
                f"{name} is a {type(weight).__name__} in the trainer but BF16 in the rollout. Keep this layer in BF16 in the "
                f"trainer too, or do not exclude it and use FP8 on both sides."
            )
        else:
            sent = [outgoing.add(name, weight.detach().to(getattr(torch, announced[name][1])))]
        if name in ours:
            stats.layers += 1
            stats.quantized_as_bf16 += 2 * math.prod(shapes[name])
            stats.quantized += sum(tensor.nbytes for _, tensor in sent)
        yield from sent
    missing = sorted(set(announced) - outgoing.names)
    if missing:
        raise SyncError(f"the trainer announced {len(missing)} tensors but never sent them: {', '.join(missing[:3])}")
    outgoing.read()
    if base is not None:
        base.seal(stats.digests)
    yield COMMIT, encode_json({"digests": stats.digests})


def _check_announced(
    name: str, weight: torch.Tensor, announced: Mapping[str, tuple[tuple[int, ...], str]], sent: Collection[str]
) -> None:
    if name not in announced:
        raise SyncError(f"the trainer sends {name}, which its model did not have when it was built")
    if name in sent:
        raise SyncError(f"the trainer sends {name} twice in one sync")
    if tuple(weight.shape) != announced[name][0]:
        raise SyncError(
            f"the trainer sends {name} with shape {tuple(weight.shape)}; the model was built with {announced[name][0]}"
        )


def _by_contract(terms: Terms) -> Quantize:
    """The quantizer of a format in which the trainer does not compute."""
    assert terms.format is not None
    quantize = QUANTIZERS[terms.format.name]
    return lambda name, weight: quantize(weight, terms.scale_format)  # type: ignore[arg-type]


# ---- Buckets: a stream of tensors packed into flat byte buffers, each with an index of its tensors
# A framework that makes a remote call for each tensor makes one for each bucket instead.

#: extra memory that a sync needs on each side: half of it for the bucket that travels, half for the next one
BUCKET_BYTES = 256 << 20

#: (name, dtype such as "float8_e4m3fn", shape, byte offset): plain types that JSON can carry
Entry = tuple[str, str, list[int], int]


@dataclass
class Bucket:
    """Bytes, uint8 ``[n]``, and the tensors they contain."""

    flat: torch.Tensor
    entries: list[Entry] = field(default_factory=list)


def pack(stream: Iterable[NamedTensor], device: torch.device, limit: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Copy the tensors of a stream into buckets of at most ``limit // 2`` bytes. A larger tensor gets its own bucket.

    One bucket is filled while another travels, so a bucket is valid until the second one after it is requested.
    """
    half = limit // 2
    buffer, other = (torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2))
    entries: list[Entry] = []
    used = 0
    for name, tensor in stream:
        if entries and used + tensor.nbytes > half:
            yield Bucket(buffer[:used], entries)
            buffer, other = other, buffer
            entries, used = [], 0
        source = tensor.detach().contiguous().view(-1).view(torch.uint8)
        kind = dtype_name(tensor.dtype)
        if tensor.nbytes > half:  # a copy: the framework may free the tensor when the next one is requested
            yield Bucket(source.to(device, copy=True), [(name, kind, list(tensor.shape), 0)])
            continue
        if not buffer.numel():
            buffer = torch.empty(half + ALIGNMENT, dtype=torch.uint8, device=device)
        buffer[used : used + tensor.nbytes].copy_(source)
        entries.append((name, kind, list(tensor.shape), used))
        used += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    if entries:
        yield Bucket(buffer[:used], entries)


def unpack(flat: torch.Tensor, entries: Iterable[Entry]) -> list[NamedTensor]:
    """The tensors as views of the bytes, in packing order. Raises SyncError if an entry is invalid."""
    found: list[NamedTensor] = []
    for name, dtype, shape, at in entries:
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype):
            raise SyncError(f"{name} arrived with the unknown dtype {dtype!r}. Install the same versions on both sides.")
        size = math.prod(shape) * kind.itemsize
        if min(at, *shape, 0) < 0 or at % ALIGNMENT or at + size > flat.numel():
            place = f"bytes {at}:{at + size}"
            raise SyncError(f"{name} should be at {place}, but {flat.numel()} bytes arrived, aligned to {ALIGNMENT}")
        found.append((name, flat[at : at + size].view(kind).view(shape)))
    return found


# ---- Syncs in FP16, and which weights fit --------------------------------------------------------
# FP16 has 10 mantissa bits (BF16: 7) and 5 exponent bits (BF16: 8), so its largest value is 65504. A larger weight of a BF16
# checkpoint would silently become Inf; here it is an error that names the weight.

#: the largest finite FP16 value
_MAX = 65504.0


def misfit(weight: torch.Tensor) -> str:
    """Why a weight of any dtype and shape cannot be FP16, as a phrase; empty if it can.

    FP16 rounds to nearest, so a value between 65504 and 65520 becomes 65504 and fits.
    """
    if weight.numel() == 0 or not weight.is_floating_point() or weight.is_meta:
        return ""
    weight = weight.detach()
    if bool(torch.isnan(weight).any()):
        return "NaN"
    if bool(torch.isfinite(weight.to(torch.float16)).all()):
        return ""
    greatest = float(weight.abs().max())
    if greatest == float("inf"):
        return "Inf (a weight above 65504, if it was loaded in FP16)" if weight.dtype == torch.float16 else "Inf"
    return f"|w| = {greatest:g}"


def check_fits(weights: Iterable[NamedTensor], where: str) -> None:
    """Raise ModelError if weights of a loaded model do not fit FP16. The message names at most three."""
    found = [f"{name} has {why}" for name, weight in weights if (why := misfit(weight))]
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise ModelError(
            f"{where} does not fit FP16, whose largest value is {_MAX:g}: {'; '.join(found[:3])}{more}. "
            f"Use {UNQUANTIZED} for this model."
        )


def half_stream(weights: Iterable[NamedTensor], stats: SyncStats) -> Iterator[NamedTensor]:
    """Yield the framework's ``(name, full tensor)`` pairs in FP16, one at a time, counted in ``stats``.

    Raises:
        SyncError: a weight is NaN, Inf or does not fit. The weights sent before it stay in the engine, so the run must stop.
    """
    for name, weight in weights:
        why = misfit(weight)
        if why:
            raise SyncError(
                f"{name} has {why}, which FP16 cannot hold (largest value {_MAX:g}), so the weight sync stops. Check the last "
                f"optimizer steps (gradient norm, learning rate), or use {UNQUANTIZED}."
            )
        half = weight.detach().to(torch.float16) if weight.is_floating_point() else weight
        stats.total += half.nbytes
        stats.tensors += 1
        yield name, half
