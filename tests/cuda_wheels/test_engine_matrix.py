"""How an engine on an H100 resolves each mode, with the Python of vLLM's CUDA wheels: ``make engine-matrix``.

No kernel runs and no GPU is needed: ``h100_double`` answers for the driver and the compiled libraries. Outside exact mode the
plugin must leave all of vLLM's choices as they are without it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from jetrl_patch.config.modes import MODES
from scripts.anchors.cuda_python import VERSIONS, unpacked
from scripts.anchors.patches import ROOT

from .cases import CASES, OTHERS, REFUSED, Case

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("version", VERSIONS)]

#: the model of every case: 3 blocks, 2 heads of 64 for keys and values; pages of 16 tokens
BLOCKS, HEADS, WIDTH, PAGE = 3, 2, 64, 16


@cache
def resolved(version: str) -> dict[str, Any]:
    """What ``resolve`` found, in one process per version."""
    folder = unpacked(version)
    if folder is None:
        pytest.skip(f"build/cuda-python/{version} is not there: make engine-matrix downloads vLLM's CUDA wheels")
    out = folder / "resolved.json"
    out.unlink(missing_ok=True)
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "tests.cuda_wheels.resolve", str(folder), str(out)]
    environment = {**os.environ, "PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def stock(version: str, case: Case) -> dict[str, Any]:
    """vLLM without the plugin, on the same model."""
    found: dict[str, Any] = resolved(version)["stock" if case.model == "qwen3" else "mixture, stock"]
    return found


def on_gpus(case: Case) -> int:
    return int(case.engine.get("tensor_parallel_size", 1))


def captures(case: Case) -> bool:
    """Whether an exact engine replays decoding steps: docs/configuration.md, ``decode_graphs``."""
    assert case.plugin is not None
    asked = case.plugin.get("decode_graphs", "auto")
    graphs = case.engine.get("compilation_config", {}).get("cudagraph_mode") != "NONE"
    follows = graphs and not case.engine.get("enforce_eager") and "guard_sqnr" not in case.plugin
    return bool(follows if asked == "auto" else asked)


def test_the_wheel_is_read_as_on_an_h100(version: str) -> None:
    about = resolved(version)["about"]
    assert about["vllm"] == version and Path(about["file"]).is_relative_to(ROOT / "build" / "cuda-python" / version)
    assert about["platform"] == "NvmlCudaPlatform" and about["triton"]


def test_vllm_alone_compiles_and_captures(version: str) -> None:
    """What the other tests compare with: the defaults of vLLM on Hopper."""
    for model in ("qwen3", "qwen3_moe"):
        found = stock(version, Case(None, model=model))
        chosen = {key: found[key] for key in ("mode", "graphs", "attention", "async", "quantization", "eager")}
        assert chosen == {
            "mode": "VLLM_COMPILE", "graphs": "FULL_AND_PIECEWISE", "attention": "FLASH_ATTN", "async": True,
            "quantization": None, "eager": False,
        }  # fmt: skip
        assert found["page bytes"] == found["cache bytes"] == PAGE * HEADS * 2 * WIDTH * 2


@pytest.mark.parametrize("name", ["stock", *CASES, *OTHERS])
def test_only_a_worker_initializes_cuda(version: str, name: str) -> None:
    """The process that builds the engine would take memory of the first GPU, and could no longer be forked."""
    assert resolved(version)[name]["asked"] == []


@pytest.mark.parametrize("name", CASES)
def test_settings(version: str, name: str) -> None:
    case, found = CASES[name], resolved(version)[name]
    assert "error" not in found, found
    alone = stock(version, case)
    assert case.plugin is not None
    mode = MODES[case.plugin["precision"]]
    expected = {key: alone[key] for key in ("eager", "mode", "graphs", "runner", "async", "worker", "flashinfer")}
    expected |= {
        "quantization": mode.formats[0].quantization if mode.formats else None,
        "dtype": f"torch.{mode.dtype}",
        "cache": {"auto": "auto", "fp8": "fp8"}[case.plugin.get("kv_cache", "auto")],
    }
    if case.exact:
        graphs = captures(case)
        expected |= {"eager": not graphs, "mode": "NONE", "graphs": "FULL_DECODE_ONLY" if graphs else "NONE"}
        expected |= {"flashinfer": "0", "runner": "V1"}  # its graphs are proven
        expected |= {"cache": "fp8_per_token_head"} if expected["cache"] == "fp8" else {}
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if on_gpus(case) == 1])
def test_layers(version: str, name: str) -> None:
    """Linear layers are quantized: four per dense block, two and the experts per block of the mixture. Its routers are not."""
    case, found, alone = CASES[name], resolved(version)[name], stock(version, CASES[name])
    assert case.plugin is not None
    dense = case.model == "qwen3"
    ours, experts = "QuantizedLinearMethod", {"QuantizedExpertsMethod": BLOCKS}
    if not MODES[case.plugin["precision"]].formats:
        assert found["methods"] == alone["methods"]
    elif case.exact:
        assert found["methods"] == {"ExactHeadMethod": 2} | (
            {ours: 4 * BLOCKS} if dense else {ours: 2 * BLOCKS, "ExactLinearMethod": BLOCKS, **experts}
        )
    else:
        assert found["methods"] == {"UnquantizedEmbeddingMethod": 2} | (
            {ours: 4 * BLOCKS} if dense else {ours: 2 * BLOCKS, "UnquantizedLinearMethod": BLOCKS, **experts}
        )
    assert found["norms"] == (["ExactRMSNorm"] if case.exact else alone["norms"])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if on_gpus(case) == 1])
def test_attention_and_its_cache(version: str, name: str) -> None:
    """The exact attention reads the cache that vLLM allocates; in FP8 a token's head has a scale of four bytes (``Pages``)."""
    case, found, alone = CASES[name], resolved(version)[name], stock(version, CASES[name])
    assert case.plugin is not None
    fp8 = case.plugin.get("kv_cache") == "fp8"
    row = (WIDTH + 4 if case.exact else WIDTH) if fp8 else 2 * WIDTH
    assert found["block"] == PAGE
    assert found["page bytes"] == found["cache bytes"] == PAGE * HEADS * 2 * row
    if case.exact:
        assert (found["attention"], found["implementation"]) == ("CUSTOM", "ExactCudaAttentionImpl")
        views = [[3, PAGE, HEADS, WIDTH]] * 2
        assert found["pages"] == (views + [[3, PAGE, HEADS]] * 2 if fp8 else views)
    else:
        assert (found["attention"], found["implementation"]) == (alone["attention"], alone["implementation"])


@pytest.mark.parametrize("name", OTHERS)
def test_other_attention_in_exact_mode(version: str, name: str) -> None:
    """Of three blocks two have a delta net, or all have latent attention. A worker turns vLLM's own kernels off."""
    found, attention = resolved(version)[name], "Attention ExactCudaAttentionImpl CUSTOM ExactCudaAttentionBuilder"
    assert "error" not in found, found
    latent = OTHERS[name].model == "deepseek_v3"
    assert found["layers"] == (
        {"MLAAttention ExactCudaLatentImpl TRITON_MLA ExactLatentBuilder": BLOCKS}
        if latent
        else {"ExactDeltaNet NoneType GDN_ATTN ExactDeltaNetBuilder": 2, attention: 1}
    )
    assert found["own kernels"] == ({} if latent else {"use_fused_qk_norm_rope_gate": 1})
    assert (found["eager"], found["graphs"]) == ((False, "FULL_DECODE_ONLY") if captures(OTHERS[name]) else (True, "NONE"))


@pytest.mark.parametrize("name", [name for name, case in (CASES | OTHERS).items() if on_gpus(case) == 1])
def test_a_model_is_built_on_its_device(version: str, name: str) -> None:
    """A buffer that moves there in the first step is no longer where a weight sync into captured graphs expects it."""
    assert resolved(version)[name].get("elsewhere", []) == []


@pytest.mark.parametrize("name", REFUSED)
def test_refused(version: str, name: str) -> None:
    _, error, words = REFUSED[name]
    found = resolved(version)[name]
    assert found.get("error") == error and words in found["text"], found


def test_the_v2_runner_in_exact_mode(version: str) -> None:
    found = resolved(version)["the V2 runner"]
    assert {key: found[key] for key in ("runner", "eager", "graphs")} == {"runner": "V2", "eager": True, "graphs": "NONE"}
