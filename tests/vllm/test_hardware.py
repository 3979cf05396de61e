"""A backend that this hardware cannot run: trainer and rollout raise the same error before anything changes."""

from __future__ import annotations

import pytest
import torch
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability

from jetrl_patch.adapters.vllm.engine import device_problems
from jetrl_patch.backends import capability, choose_backend, get_backend
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError
from jetrl_patch.trainer.prepare import prepare_model

from ..models import build


def trainer(backend):
    model = build("qwen3", num_hidden_layers=1)
    before = [type(module) for module in model.modules()]
    try:
        prepare_model(model, Config(precision="fp8-unified", align="linear", backend=backend).resolved(), device_type="cuda")
    finally:
        assert [type(module) for module in model.modules()] == before


def rollout(backend):
    from jetrl_patch.adapters.vllm.formats import BlockFp8

    return BlockFp8(Config(precision="fp8-unified", align="linear", backend=backend)).backend(torch.device("cuda"))


CASES = pytest.mark.parametrize(
    ("backend", "sm", "cuda", "match"),
    [
        ("triton", None, "13.0", "sees no CUDA device"),
        ("triton", (8, 9), "13.0", r"needs compute capability 9\.0 \(Hopper\), and this device has 8\.9"),
        ("deep_gemm", (8, 9), "13.0", r"this device has 8\.9"),
        ("cublaslt", (9, 0), "12.8", r"need CUDA 12\.9 or newer, and this torch was built with CUDA 12\.8"),
        ("native", (9, 0), "13.0", "required a CPU, found device type 'cuda'"),
    ],
)


@pytest.mark.parametrize("side", [trainer, rollout])
@CASES
def test_both_sides_say_the_same(side, backend, sm, cuda, match, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sm is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: sm)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *a: "a GPU")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(ConfigError, match=match):
        side(backend)


def asked(*args):
    raise AssertionError("this initializes CUDA")


def on_cuda(monkeypatch, sm):
    """vLLM's platform is CUDA, and the driver says this capability; asking torch is an error."""
    found = None if sm is None else DeviceCapability(*sm)
    for name, answer in (("is_cpu", False), ("is_cuda", True), ("get_device_capability", found)):
        monkeypatch.setattr(type(current_platform), name, lambda *args, answer=answer: answer)
    for name in ("get_device_capability", "get_device_name"):
        monkeypatch.setattr(torch.cuda, name, asked)


@CASES
def test_so_does_the_process_that_builds_an_exact_engine(backend, sm, cuda, match, monkeypatch):
    on_cuda(monkeypatch, sm)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(ConfigError, match=match):
        device_problems(None, Config(backend=backend))


@pytest.mark.parametrize(
    ("settings", "sm", "match"),
    [
        ({}, (8, 0), r"required a CPU, or an NVIDIA GPU of compute capability 8\.9 .* found compute capability 8\.0\. "),
        ({"scale_format": "mxfp8"}, (9, 0), r"required a CPU, or a Blackwell .* found compute capability 9\.0"),
    ],
)
def test_what_exact_mode_needs_is_asked_of_the_driver(settings, sm, match, monkeypatch):
    on_cuda(monkeypatch, sm)
    with pytest.raises(ConfigError, match=match):
        device_problems(None, Config(**settings))


def test_deep_gemm_is_not_imported_there(monkeypatch):
    monkeypatch.setattr(capability, "_missing", lambda name: None)
    monkeypatch.setattr(capability, "deep_gemm_version", lambda: None)
    monkeypatch.setattr(capability, "check_nvcc", lambda version: (True, "nvcc 13.0"))
    monkeypatch.setattr(capability, "find_deep_gemm", asked)
    for backend in ("deep_gemm", "auto"):
        assert choose_backend(backend, "cuda", sm=(9, 0)) == backend


@pytest.mark.parametrize("side", [trainer, rollout])
def test_an_older_gpu_falls_back_to_the_reference_on_both_sides(side, monkeypatch):
    monkeypatch.setattr(capability, "check_hopper", lambda *sm: (False, "this device has 8.0"))
    if side is rollout:
        assert rollout("auto") is get_backend("torch")
        return
    model = build("qwen3", num_hidden_layers=1)
    names = prepare_model(model, Config(precision="fp8-unified", align="linear").resolved(), device_type="cuda")
    assert {model.get_submodule(name).fp8.backend for name in names} == {get_backend("torch")}
    assert type(model.model.layers[0].mlp).__name__ == "Qwen3MLP"  # no kernels, so nothing is fused
