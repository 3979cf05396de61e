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
#: name -> family, settings of the plugin, engine arguments, and what happens on purpose (``engine.on_purpose``)
Cases = dict[str, tuple[str, dict[str, Any], dict[str, Any], str]]

EXACT = {"precision": "fp8-unified"}
LINEAR = {**EXACT, "align": "linear"}
DELTA = {**EXACT, "sync": "delta"}
_PER_CHANNEL = {"precision": "fp8-rollout", "rollout_granularity": "channel"}
#: whole decoding steps, without a compiler
_GRAPHS = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
#: vLLM's default but for the code generator, of which ``traced.without_inductor`` says more
_COMPILED = {"compilation_config": {"backend": "eager", "custom_ops": ["none"]}}
_TWO = {"tensor_parallel_size": 2}
_BY_EXPERTS = {**_TWO, "enable_expert_parallel": True}

CASES: Cases = {
    "exact": ("qwen3", EXACT, {}, ""),
    "exact, FP8 cache": ("qwen3", {**DELTA, "kv_cache": "fp8"}, {}, ""),
    "exact, mixture": ("qwen3_moe", DELTA, {}, ""),
    "exact, latent attention": ("deepseek_v3", EXACT, {}, ""),
    "exact, delta nets": ("qwen3_next", EXACT, {}, ""),
    "exact, two ranks": ("qwen3", EXACT, _TWO, ""),
    "exact, mixture, two ranks": ("qwen3_moe", DELTA, _BY_EXPERTS, ""),
    "linear": ("qwen3", LINEAR, _GRAPHS, ""),
    "linear, compiled": ("qwen3", LINEAR, _COMPILED, "compiled"),
    "fp8-rollout": ("qwen3", {"precision": "fp8-rollout"}, _GRAPHS, ""),
}
#: run with the Python of the CUDA wheels only, because they take long
MORE: Cases = {
    "linear, mixture, compiled": ("qwen3_moe", LINEAR, _COMPILED, "compiled"),
    "linear, two ranks, compiled": ("qwen3", LINEAR, {**_COMPILED, **_TWO}, "compiled"),
    "fp8-rollout, compiled": ("qwen3", {"precision": "fp8-rollout"}, _COMPILED, "compiled"),
    "fp8-rollout, scales per channel, compiled": ("qwen3", _PER_CHANNEL, _COMPILED, "compiled"),
    "exact, V2 runner": ("qwen3", EXACT, {}, "V2"),
    "linear, V2 runner, compiled": ("qwen3", LINEAR, _COMPILED, "compiled, V2"),
    "exact, sums gathered": ("qwen3", EXACT, {**_TWO, "disable_custom_all_reduce": True}, ""),
    "exact, sums by slices": ("qwen3", EXACT, {**_TWO, "disable_custom_all_reduce": True}, "slices"),
    "exact, a sum differs": ("qwen3", EXACT, _TWO, "a sum differs"),
    "exact, a graph differs": ("qwen3", EXACT, _TWO, "a graph differs"),
    "exact, mixture split over ranks": ("qwen3_moe", EXACT, _TWO, ""),
    "exact, latent attention, two ranks": ("deepseek_v3", {**EXACT, "on_cut": "bf16"}, _BY_EXPERTS, ""),
    "exact, delta nets, two ranks": ("qwen3_next", {**EXACT, "on_cut": "bf16"}, _BY_EXPERTS, ""),
    "linear, two ranks": ("qwen3", LINEAR, {**_GRAPHS, **_TWO}, ""),
    "fp8-rollout, mixture, two ranks": ("qwen3_moe", {"precision": "fp8-rollout"}, {**_GRAPHS, **_BY_EXPERTS}, ""),
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
    run = subprocess.run(words, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, timeout=300 * len(cases))
    assert run.returncode == 0, run.stderr[-6000:]
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"name"')]
    return {result.pop("name"): result for result in found}


def check(name: str, found: dict[str, Any]) -> None:
    """What holds of every case, in every version of vLLM."""
    family, plugin, engine, purpose = (CASES | MORE)[name]
    assert "error" not in found, found["trace"]
    exact = plugin["precision"] == "fp8-unified" and "align" not in plugin
    assert found["backend"] == "deep_gemm"
    assert found["attention"] == ("flash3" if exact and "kv_cache" not in plugin and family != "deepseek_v3" else "")
    assert (found["load"].get("compiled", 0) > 0) is ("compiled" in purpose)
    assert found["runner"] == ("vllm.v1.worker.gpu.model_runner" if "V2" in purpose else "vllm.v1.worker.gpu_model_runner")
    eager = purpose in ("a graph differs", "V2")
    assert found["eager"] is eager and (found["graphs"] > 0) is (purpose != "V2")
    for step in found["steps"]:  # prefill runs eagerly, decoding from graphs
        assert step["replays"] == (0 if eager else 3) and step["launches"]["DeepGEMM"] > 0
        assert "compiled" not in step["launches"]
        assert step == found["steps"][0]
    if "V2" in purpose:  # its own kernels round in other ways than the trainer
        own = {"_temperature_kernel", "_topk_log_softmax_kernel"} & found["steps"][0]["launches"].keys()
        assert bool(own) is not exact, own
    if engine.get("tensor_parallel_size") == 2 and exact:
        check_sums(found["steps"][0]["launches"], purpose, "disable_custom_all_reduce" not in engine)
    whole = found["synced"]["bytes"] > 1 << 20
    assert whole is (plugin.get("sync") != "delta")


def check_sums(launches: dict[str, int], purpose: str, custom: bool) -> None:
    """How a step added over ranks: in one shot, by gathering, or by slices. The rest are vLLM's sum of embeddings and gathers."""
    one_shot = launches.get("all_reduce", 0) - custom
    assert (one_shot > 0) is (custom and purpose != "a sum differs"), launches
    assert (launches.get("alltoall_base_", 0) > 0) is (purpose == "slices"), launches
    assert (launches.get("rank_sum_kernel", 0) > 0) is (not one_shot), launches
