"""Build ``device.cpp``, and run engines on it in a process of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from torch.utils.cpp_extension import include_paths, library_paths

HERE = Path(__file__).resolve().parent
#: name -> family, settings of the plugin, engine arguments
Cases = dict[str, tuple[str, dict[str, Any], dict[str, Any]]]

EXACT = {"precision": "fp8-unified"}
DELTA = {**EXACT, "sync": "delta"}
#: without a compiler, which cannot trace tensors without values
_GRAPHS = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}

CASES: Cases = {
    "exact": ("qwen3", EXACT, {}),
    "exact, FP8 cache": ("qwen3", {**DELTA, "kv_cache": "fp8"}, {}),
    "exact, mixture": ("qwen3_moe", DELTA, {}),
    "exact, latent attention": ("deepseek_v3", EXACT, {}),
    "exact, delta nets": ("qwen3_next", EXACT, {}),
    "linear": ("qwen3", {**EXACT, "align": "linear"}, _GRAPHS),
    "fp8-rollout": ("qwen3", {"precision": "fp8-rollout"}, _GRAPHS),
}


def compile_device(folder: Path) -> Path | None:
    """Compile ``device.cpp`` into a folder. None without a compiler."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++"))), None)
    if compiler is None:
        return None
    built = folder / "device.so"
    folders = [f"-I{path}" for path in include_paths()]
    folders += [flag for path in library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    words = [compiler, "-std=c++20", "-w", "-shared", "-fPIC", *folders, str(HERE / "device.cpp"), "-ltorch_cpu", "-lc10"]
    run = subprocess.run([*words, "-o", str(built)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    return built


def run_engines(library: Path, operators: Path, cases: Cases, path: str = "") -> dict[str, dict[str, Any]]:
    """Run cases (``engine.py``). Returns what each found, or its error. ``path`` comes first on PYTHONPATH."""
    paths = os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "tests.cuda_double.engine", str(library), str(operators), json.dumps(cases)]
    run = subprocess.run(words, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, run.stderr[-6000:]
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"name"')]
    return {result.pop("name"): result for result in found}


def check(name: str, found: dict[str, Any]) -> None:
    """What holds of every case, in every version of vLLM."""
    family, plugin, _ = CASES[name]
    assert "error" not in found, found["trace"]
    exact = plugin["precision"] == "fp8-unified" and "align" not in plugin
    assert found["backend"] == "deep_gemm"
    assert found["attention"] == ("flash3" if exact and "kv_cache" not in plugin and family != "deepseek_v3" else "")
    assert not found["eager"] and found["graphs"]
    for step in found["steps"]:  # prefill runs eagerly, decoding from graphs
        assert step["replays"] == 3 and step["launches"]["DeepGEMM"] > 0
        assert step == found["steps"][0]
    whole = found["synced"]["bytes"] > 1 << 20
    assert whole is (plugin.get("sync") != "delta")
