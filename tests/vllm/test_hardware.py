"""A backend that this hardware cannot run: trainer and rollout raise the same error before anything changes."""

from __future__ import annotations

import pytest
import torch

from jetrl_patch.adapters.transformers.prepare import prepare_model
from jetrl_patch.backends import capability, get_backend
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError

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


@pytest.mark.parametrize("side", [trainer, rollout])
@pytest.mark.parametrize(
    ("backend", "sm", "cuda", "match"),
    [
        ("triton", None, "13.0", "sees no CUDA device"),
        ("triton", (8, 0), "13.0", r"needs compute capability 9\.0 \(Hopper\), and this device has 8\.0"),
        ("deep_gemm", (8, 9), "13.0", r"this device has 8\.9"),
        ("cublaslt", (9, 0), "12.8", r"need CUDA 12\.9 or newer, and this torch was built with CUDA 12\.8"),
        ("native", (9, 0), "13.0", "required a CPU, found device type 'cuda'"),
    ],
)
def test_both_sides_say_the_same(side, backend, sm, cuda, match, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: sm is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: sm)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *a: "a GPU")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(ConfigError, match=match):
        side(backend)


@pytest.mark.parametrize("side", [trainer, rollout])
def test_an_older_gpu_falls_back_to_the_reference_on_both_sides(side, monkeypatch):
    monkeypatch.setattr(capability, "check_hopper", lambda: (False, "this device has 8.0"))
    if side is rollout:
        assert rollout("auto") is get_backend("torch")
        return
    model = build("qwen3", num_hidden_layers=1)
    names = prepare_model(model, Config(precision="fp8-unified", align="linear").resolved(), device_type="cuda")
    assert {model.get_submodule(name).fp8.backend for name in names} == {get_backend("torch")}
    assert type(model.model.layers[0].mlp).__name__ == "Qwen3MLP"  # no kernels, so nothing is fused
