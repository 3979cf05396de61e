"""The trainer's side of a weight sync: turn the framework's weights into the stream to send.

    manifest · (q, scales) per quantized layer, BF16 for the rest, in the framework's order · commit

Each weight is cast to BF16 (every process that sees the BF16 value then gets the same bytes), checked, and quantized
once. The stream holds one tensor at a time, besides what the framework's own transfer holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from jetrl_patch.errors import SyncError
from jetrl_patch.fp8.transformer_engine import is_te_tensor, take
from jetrl_patch.sync.digest import digest
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

NamedTensor = tuple[str, torch.Tensor]
#: (layer name, BF16 weight [N, K]) -> the bytes to send and install: (q [N, K], scales in FP32)
Quantize = Callable[[str, torch.Tensor], "tuple[torch.Tensor, torch.Tensor]"]

#: changes the weights before they are checked and quantized
Transform = Callable[[Iterable[NamedTensor]], Iterator[NamedTensor]]


@dataclass
class SyncStats:
    """Counts of one sync, sizes in bytes; filled while the stream runs.

    Attributes:
        total: all tensors.
        quantized: the quantized layers, weights and scales.
        quantized_as_bf16: the same layers in BF16.
        layers: number of quantized layers.
        tensors: number of tensors, scales included.
    """

    total: int = 0
    quantized: int = 0
    quantized_as_bf16: int = 0
    layers: int = 0
    tensors: int = 0
    digests: dict[str, int] = field(default_factory=dict)


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
        name: (tuple(shape), terms.weight_dtype if name in ours else "bfloat16") for name, shape in shapes.items()
    }
    manifest = Manifest(terms=terms, layers=tuple(sorted(layers)), tensors=announced, guarded=tuple(sorted(guarded)))
    yield MANIFEST, manifest.encode()
    for name, weight in weights if transform is None else transform(weights):
        _check_announced(name, weight, announced, stats)
        if name not in ours:
            yield _count(stats, name, _to_bf16(name, weight))
            continue
        stats.layers += 1
        stats.quantized_as_bf16 += 2 * weight.numel()
        if quantize is None or not terms.quantized:
            bf16 = _to_bf16(name, weight)
            stats.quantized += bf16.nbytes
            yield _count(stats, name, bf16)
            continue
        layer = name.removesuffix(".weight")
        if is_te_tensor(weight):  # already FP8: send its bytes and scales unchanged
            q, scales = take(layer, weight, terms.scale_format)  # type: ignore[arg-type]
        else:
            q, scales = quantize(layer, _to_bf16(name, weight))
        del weight
        stats.quantized += q.nbytes + scales.nbytes
        yield _count(stats, name, q)
        yield _count(stats, name + SCALE_SUFFIX, scales)
    missing = sorted(set(announced) - set(stats.digests))
    if missing:
        raise SyncError(f"the trainer announced {len(missing)} tensors but never sent them: {', '.join(missing[:3])}")
    yield COMMIT, encode_json({"digests": stats.digests})


def _check_announced(
    name: str, weight: torch.Tensor, announced: Mapping[str, tuple[tuple[int, ...], str]], stats: SyncStats
) -> None:
    if name not in announced:
        raise SyncError(f"the trainer sends {name}, which its own model did not have when it was built")
    if name in stats.digests:
        raise SyncError(f"the trainer sends {name} twice in one sync")
    if tuple(weight.shape) != announced[name][0]:
        raise SyncError(
            f"the trainer sends {name} with shape {tuple(weight.shape)}; the model was built with {announced[name][0]}"
        )


def _to_bf16(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Return a weight in BF16. Raises SyncError, with its name, if it is not finite or is unexpectedly FP8."""
    if is_te_tensor(weight):
        raise SyncError(
            f"{name} is a {type(weight).__name__} in the trainer but BF16 in the rollout. Keep this layer in BF16 in the "
            f"trainer too, or do not exclude it and use FP8 on both sides."
        )
    bf16 = weight.detach().to(torch.bfloat16)
    if not bool(torch.isfinite(bf16).all()):
        raise SyncError(
            f"{name} holds NaN or Inf, so the sync was stopped. Check the gradient norm and the learning rate of the last "
            f"optimizer step."
        )
    return bf16


def _by_contract(terms: Terms) -> Quantize:
    """Return the quantizer of a format that the trainer does not compute in."""
    assert terms.format is not None
    quantize = QUANTIZERS[terms.format.name]
    return lambda name, weight: quantize(weight, terms.scale_format)  # type: ignore[arg-type]


def _count(stats: SyncStats, name: str, tensor: torch.Tensor) -> NamedTensor:
    tensor = tensor.contiguous()
    stats.total += tensor.nbytes
    stats.tensors += 1
    stats.digests[name] = digest(tensor)
    return name, tensor


__all__ = ["NamedTensor", "Quantize", "SyncStats", "quantized_stream"]
