"""A rollout engine of two fused, tensor-parallel parameters, as small as the receiver's protocol allows."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from jetrl_patch.backends.quantize import expand_weight_scale
from jetrl_patch.sync.digest import Rect, as_2d, digest
from jetrl_patch.sync.protocol import Terms

LAYERS = ("layers.0.self_attn.q_proj", "layers.0.mlp.down_proj")
TERMS = Terms(precision="fp8-unified", align="exact", scale_format="pow2", backend="torch")
SHAPES = {
    "layers.0.self_attn.q_proj.weight": (256, 128),
    "layers.0.mlp.down_proj.weight": (100, 256),
    "norm.weight": (128,),
}


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class Engine:
    """One tensor-parallel rank: q_proj split by rows, down_proj by columns; keeps per-row scales."""

    def __init__(self, rank: int = 0, size: int = 1, layers: tuple[str, ...] = LAYERS, height: int = 128) -> None:
        self.height = height  # rows that share a scale
        self.rank, self.size, self.layers = rank, size, layers
        self.tensors: dict[str, torch.Tensor] = {}
        self.poisoned = 0
        self.finished = 0
        self.break_bytes = ""
        self.guarded: list[str] = []
        self.refuses = False

    def quantized_layers(self) -> list[str]:
        return list(self.layers)

    def to_bf16(self, layers: list[str]) -> None:
        if self.refuses:
            raise MemoryError("no room for the BF16 weights")
        self.layers = tuple(layer for layer in self.layers if layer not in layers)
        self.guarded += layers

    def poison(self) -> None:
        self.poisoned += 1
        self.tensors = {name: torch.full_like(t.float(), float("nan")) for name, t in self.tensors.items()}

    def load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name.endswith("_scale_inv"):
                rows = SHAPES[name.removesuffix("_scale_inv")][0]
                tensor = tensor if self.height == 1 else expand_weight_scale(tensor, rows)
            self.tensors[name] = self._mine(name, tensor).clone()
            if name == self.break_bytes:
                self.tensors[name].view(torch.uint8).view(-1)[0] ^= 1

    def finish(self) -> None:
        self.finished += 1

    def installed(self, plain: Mapping[str, Any] = MappingProxyType({})) -> list[Rect]:
        """Norms are whole on every rank, and digested; the others are left out, as an engine may."""
        rects = [self._rect(name, self.tensors[name], 1) for name in plain if "norm" in name and name in self.tensors]
        for layer in self.layers:
            name = layer + ".weight"
            if name in self.tensors:
                rects.append(self._rect(name, self.tensors[name], 1))
                scales = self.tensors[name + "_scale_inv"][:: self.height]
                rects.append(self._rect(name + "_scale_inv", scales, self.height))
        names = [layer + ".weight" for layer in self.guarded]
        return rects + [self._rect(name, self.tensors[name], 1) for name in names if name in self.tensors]

    def _mine(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if "q_proj" in name:
            return tensor.chunk(self.size, 0)[self.rank]
        if "down_proj" in name:
            return tensor.chunk(self.size, 1)[self.rank]
        return tensor

    def _rect(self, name: str, tensor: torch.Tensor, unit: int) -> Rect:
        rows, cols = as_2d(tensor).shape
        row0 = self.rank * rows if "q_proj" in name else 0
        col0 = self.rank * cols if "down_proj" in name else 0
        return Rect(name, row0, row0 + rows, col0, col0 + cols, digest(tensor, row0, col0))


class Ranks:
    """gather() of two ranks in two threads."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=60)
        self.slots = [None, None]

    def gather(self, rank):
        def exchange(mine):
            self.slots[rank] = mine
            self.barrier.wait()
            both = list(self.slots)
            self.barrier.wait()
            return both

        return exchange
