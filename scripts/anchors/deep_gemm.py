"""Write ``tests/anchors/deep_gemm.json``: what DeepGEMM asserts, read from a clone of its repository and from vLLM's CUDA wheels.

    python -m scripts.anchors.deep_gemm PATH REVISION... WHEEL...

A wheel holds the kernels' headers, and the host code as a binary with readable messages. Tests compare the record with the
backend and with the library's test double.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[2] / "tests" / "anchors" / "deep_gemm.json"
HEURISTIC = "csrc/jit_kernels/heuristics/sm90.hpp"
HOST = "csrc/jit_kernels/impls/sm90_fp8_gemm_{}.hpp"
KERNEL = "deep_gemm/include/deep_gemm/impls/sm90_fp8_gemm_{}.cuh"


def facts(path: str, revision: str) -> dict[str, Any]:
    """The numbers and rules of one revision. Raises AttributeError if the source has changed: then adapt the patterns."""

    def text(name: str) -> str:
        command = ["git", "-C", path, "show", f"{revision}:{name}"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def one(pattern: str, source: str) -> str:
        found = re.search(pattern, source, re.DOTALL)
        if found is None:
            raise AttributeError(f"{revision}: nothing matches {pattern}")
        return found[1]

    tiles, api, init = text(HEURISTIC), text("csrc/apis/gemm.hpp"), text("deep_gemm/__init__.py")
    compiler = text("csrc/jit/compiler.hpp")
    host, kernel = ({kind: text(name.format(kind)) for kind in ("1d1d", "1d2d")} for name in (HOST, KERNEL))
    call = one(r'm\.def\("fp8(?:_fp4)?_gemm_nt",(.*?)\);', api)
    numbers = r"block_m_candidates = \{([\d, ]+)\};"
    return {
        "version": one(r"__version__ = '([\d.]+)'", init),
        "arguments": re.findall(r'py::arg\("(\w+)"\)', call),
        "shared memory": int(one(r"smem_capacity = (\d+)", tiles)),
        "block_m": [int(n) for n in one(numbers, tiles).split(",")],
        "block_m up to m": dict(re.findall(r"desc\.m <= (\d+)\) block_m_candidates\.push_back\((\d+)\)", tiles)),
        "block_m for BF16": int(one(r"cd_dtype != torch::kFloat\)\s*block_m_candidates\.push_back\((\d+)\)", tiles)),
        "block_n ends": {kind: int(one(rf"Kernel{kind.upper()}\)\s*end = (\d+)", tiles)) for kind in host},
        "wgmma m": int(one(r"wgmma_m = (\d+);", tiles)),
        "row pitch": {
            kind: "stride" if "a.stride(" in one(r"make_tma_a_desc\((.*?)\);", source) else "k" for kind, source in host.items()
        },
        "c and FP32": {
            kind: "not" not in one(r"DG_HOST_ASSERT\(([^;]*c\.has_value\(\)[^;]*)\);", source) for kind, source in host.items()
        },
        "tiles below wgmma": {kind: "or BLOCK_M < WGMMA::M" in source for kind, source in kernel.items()},
        "TMA bytes": int(one(r"kNumTMAAlignmentBytes = (\d+)", text("csrc/utils/math.hpp"))),
        "nvcc": [int(n) for n in re.findall(r"(?:== |>= )(\d+)", one(r'HOST_ASSERT\(([^;]*)"NVCC version', compiler))],
        "CUDA": [*re.findall(r"environ\.get\('(\w+)'\)", init), one(r"cuda_home = '(/[\w/]+)'", init)],
        "a kernel is a folder renamed into the cache": "get(dir_path)" in one(r"> build\((.*?)compile\(", compiler)
        and "rename(tmp_dir_path, dir_path" in compiler,
        "variables": sorted(set(re.findall(r'"(DG_JIT_(?:NVCC_COMPILER|USE_NVRTC|CACHE_DIR))"', compiler))),
    }  # fmt: skip


def vendored(wheel: Path) -> dict[str, Any]:
    """What a CUDA wheel of vLLM reveals about its DeepGEMM."""
    with zipfile.ZipFile(wheel) as files:
        root = "vllm/third_party/deep_gemm/"
        binary = files.read(next(name for name in files.namelist() if name.startswith(f"{root}_C.")))
        init = files.read(f"{root}__init__.py").decode()
        kernels = {kind: files.read(f"{root}{KERNEL.format(kind).partition('/')[2]}").decode() for kind in ("1d1d", "1d2d")}
    version = re.search(r"__version__ = '([\d.]+)'", init)
    nvcc = re.search(rb"NVCC version (?:must be at least|should be >=) (\d+)\.(\d+)", binary)
    assert version is not None and nvcc is not None
    return {
        "version": version[1],
        "exports": "fp8_gemm_nt" in init,
        "nvcc": [int(n) for n in nvcc.groups()],
        "NVRTC": b"USE_NVRTC" in binary,
        "variables": sorted({name.decode() for name in re.findall(rb"JIT_(?:NVCC_COMPILER|CACHE_DIR)", binary)}),
        "CUDA": b"/usr/local/cuda" in binary + init.encode() and b"CUDA_PATH" in binary + init.encode(),
        "c and FP32": {
            "1d1d": b"c.has_value() and d.scalar_type() == torch::kFloat" in binary,
            "1d2d": b"not c.has_value() and d.scalar_type() == torch::kBFloat16" not in binary,
        },
        "tiles below wgmma": {kind: "or BLOCK_M < WGMMA::M" in source for kind, source in kernels.items()},
    }


if __name__ == "__main__":
    _, folder, *wanted = sys.argv
    wheels = [Path(name) for name in wanted if name.endswith(".whl")]
    sources = {name: facts(folder, name) for name in wanted if not name.endswith(".whl")}
    found = {"sources": sources, "wheels": {"-".join(path.name.split("-")[:2]): vendored(path) for path in wheels}}
    FILE.write_text(json.dumps(found, indent=1) + "\n")
