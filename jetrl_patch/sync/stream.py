"""The trainer's side of a weight sync: turn the framework's weights into the stream to send.

    manifest · (q, scales) per quantized layer, BF16 for the rest, in the framework's order · commit

Each weight is cast to BF16 (every process that sees the BF16 value then gets the same bytes) and quantized once. Its digest
also tells whether it is finite: NaN or Inf in a block of weights makes the block's scale NaN or Inf. The stream holds one
tensor at a time, besides what the framework's own transfer holds. With a base (``base.py``), what has changed since the last sync
takes a tensor's place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import torch

from jetrl_patch.errors import SyncError
from jetrl_patch.fp8.transformer_engine import is_te_tensor, take
from jetrl_patch.sync.base import NamedTensor, Sent, SyncStats
from jetrl_patch.sync.digest import Pending, read, start
from jetrl_patch.sync.manifest import (
    COMMIT,
    MANIFEST,
    SCALE_SUFFIX,
    Manifest,
    Terms,
    encode_json,
    weights_of,
)
from jetrl_patch.sync.quantizers import QUANTIZERS

#: (layer name, BF16 weight [N, K]) -> the bytes to send and install: (q [N, K], scales in FP32)
Quantize = Callable[[str, torch.Tensor], "tuple[torch.Tensor, torch.Tensor]"]

#: bytes sent between two reads of the device: a bucket's
_READ_EVERY = 256 << 20

#: changes the weights before they are checked and quantized
Transform = Callable[[Iterable[NamedTensor]], Iterator[NamedTensor]]


class _Outgoing:
    """What is sent, with its digests. On a device they are read together, once for every ``_READ_EVERY`` bytes."""

    def __init__(self, stats: SyncStats, base: Sent | None) -> None:
        self.names: set[str] = set()
        self._stats = stats
        self._base = base
        self._started: dict[str, Pending] = {}
        self._bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> NamedTensor:
        """Start a tensor's digest, and return what to send for it. Raises SyncError as ``read``, now or at a later call."""
        tensor = tensor.contiguous()
        self._stats.tensors += 1
        self.names.add(name)
        self._started[name] = start(tensor)
        self._bytes += tensor.nbytes
        if not _waits(tensor) or self._bytes > _READ_EVERY:
            self.read()
        sent = (name, tensor) if self._base is None else self._base.pack(name, tensor, self._stats)
        self._stats.total += sent[1].nbytes
        return sent

    def read(self) -> None:
        """Read what has been started. Raises SyncError, with the weight's name, if a value is NaN or Inf."""
        for name, (value, special) in zip(self._started, read(list(self._started.values())), strict=True):
            if special:  # a scale is NaN or Inf if a weight in its block is
                raise SyncError(
                    f"{name.removesuffix(SCALE_SUFFIX)} holds NaN or Inf, so the sync was stopped. Check the gradient norm and "
                    f"the learning rate of the last optimizer step."
                )
            self._stats.digests[name] = value
        self._started, self._bytes = {}, 0


def _waits(tensor: torch.Tensor) -> bool:
    """Whether reading a digest makes the host wait for a device."""
    return tensor.device.type != "cpu"


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
    """Yield the protocol for one sync.

    Args:
        weights: the framework's ``(Hugging Face name, full tensor)``, any float dtype, or TransformerEngine's FP8.
        terms: how the trainer computes.
        layers: names of the quantized modules.
        shapes: name -> shape of every tensor that ``weights`` must yield.
        stats: filled by the stream.
        quantize: the trainer's own quantizer, which may hold the bytes already; by default that of the format.
        transform: applied to the weights before they are checked and quantized.
        guarded: modules that the precision guard moved to BF16; none of them is in ``layers``.
        base: what the last sync sent, if only changes are to be sent.
        fp32: names of the tensors that are sent in FP32.

    Raises:
        SyncError: a weight holds NaN or Inf; a tensor is unannounced, duplicated or missing.
    """
    ours = set(weights_of(sorted(layers)))
    if quantize is None and terms.quantized:
        quantize = _by_contract(terms)
    absent = sorted(ours - set(shapes))
    if absent:
        raise SyncError(
            f"quantized layers without a weight in the model that is sent ({len(absent)}): {', '.join(absent[:3])}"
        )
    announced = {
        name: (tuple(shape), terms.weight_dtype if name in ours else "float32" if name in fp32 else "bfloat16")
        for name, shape in shapes.items()
    }
    manifest = Manifest(
        terms=terms,
        layers=tuple(sorted(layers)),
        tensors=announced,
        guarded=tuple(sorted(guarded)),
        base="" if base is None else base.begin(),
    )
    yield MANIFEST, manifest.encode()
    outgoing = _Outgoing(stats, base)
    for name, weight in weights if transform is None else transform(weights):
        _check_announced(name, weight, announced, outgoing.names)
        if name not in ours:
            yield outgoing.add(name, weight.detach().float() if name in fp32 else _to_bf16(name, weight))
            continue
        stats.layers += 1
        stats.quantized_as_bf16 += 2 * weight.numel()
        if quantize is None or not terms.quantized:
            sent = [outgoing.add(name, _to_bf16(name, weight))]
            stats.quantized += sent[0][1].nbytes
            yield from sent
            continue
        layer = name.removesuffix(".weight")
        if is_te_tensor(weight):  # already FP8: send its bytes and scales unchanged
            q, scales = take(layer, weight, terms.scale_format)  # type: ignore[arg-type]
        else:
            q, scales = quantize(layer, _to_bf16(name, weight))
        del weight
        sent = [outgoing.add(name, q), outgoing.add(name + SCALE_SUFFIX, scales)]  # the scales tell whether q may be sent
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
        raise SyncError(f"the trainer sends {name}, which its own model did not have when it was built")
    if name in sent:
        raise SyncError(f"the trainer sends {name} twice in one sync")
    if tuple(weight.shape) != announced[name][0]:
        raise SyncError(
            f"the trainer sends {name} with shape {tuple(weight.shape)}; the model was built with {announced[name][0]}"
        )


def _to_bf16(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Return a weight in BF16. Raises SyncError, with its name, if it is unexpectedly FP8."""
    if is_te_tensor(weight):
        raise SyncError(
            f"{name} is a {type(weight).__name__} in the trainer but BF16 in the rollout. Keep this layer in BF16 in the "
            f"trainer too, or do not exclude it and use FP8 on both sides."
        )
    return weight.detach().to(torch.bfloat16)


def _by_contract(terms: Terms) -> Quantize:
    """Return the quantizer of a format that the trainer does not compute in."""
    assert terms.format is not None
    quantize = QUANTIZERS[terms.format.name]
    return lambda name, weight: quantize(weight, terms.scale_format)  # type: ignore[arg-type]


__all__ = ["NamedTensor", "Quantize", "SyncStats", "quantized_stream"]
