"""What the tests read from an export, and what the command prints."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file


class Lines:
    """A console that records its lines."""

    def __init__(self) -> None:
        self.text = ""

    def print(self, line: str) -> None:
        self.text += line + "\n"


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        new = load_file(file)
        assert not set(new) & set(found)
        found |= new
    return found


def config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def straightforward(w: torch.Tensor, scale_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A plain Python quantizer, block by block."""
    rows, columns = -(-w.shape[0] // 128), -(-w.shape[1] // 128)
    q, s = torch.empty(w.shape, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            at = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            block = w[at].to(torch.bfloat16).float()
            scale = block.abs().max().clamp(min=1e-10) / 448
            if scale_format == "pow2":
                mantissa, exponent = torch.frexp(scale)
                scale = torch.ldexp(torch.tensor(1.0), exponent - (mantissa == 0.5).int())
            s[i, j] = scale
            q[at] = (block / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return q, s
