"""Write ``tests/anchors/deep_gemm.json``: what DeepGEMM's sources assert, read out of a clone of its repository.

    python -m tests.anchors.deep_gemm PATH REVISION...

Its C++ is compiled into vLLM's CUDA wheels; only the headers beside it tell which revision a wheel holds. The tests compare the
recorded facts with the backend and with the double that stands for the library.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
HEURISTIC = "csrc/jit_kernels/heuristics/sm90.hpp"
HOST = "csrc/jit_kernels/impls/sm90_fp8_gemm_{}.hpp"
KERNEL = "deep_gemm/include/deep_gemm/impls/sm90_fp8_gemm_{}.cuh"


def facts(path: str, revision: str) -> dict[str, Any]:
    """The numbers and rules of one revision. Raises AttributeError where the source reads differently: then read it again."""

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
        "variables": sorted(set(re.findall(r'"(DG_JIT_(?:NVCC_COMPILER|USE_NVRTC|CACHE_DIR))"', compiler))),
    }  # fmt: skip


if __name__ == "__main__":
    _, folder, *wanted = sys.argv
    found = {revision: facts(folder, revision) for revision in wanted}
    FILE.write_text(json.dumps(found, indent=1) + "\n")
