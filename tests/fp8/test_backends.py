"""The choice of a backend, and the operands of the GPU libraries, replaced by the oracle."""

from __future__ import annotations

import builtins
import types

import pytest
import torch
import torch.nn.functional as F

from jetrl_patch import backends
from jetrl_patch.backends import capability, choose_backend, get_backend, quantize, row_equality
from jetrl_patch.backends.cublaslt import CublasLtBackend
from jetrl_patch.backends.deep_gemm import DeepGemmBackend
from jetrl_patch.backends.gpu import TritonBackend
from jetrl_patch.backends.quantize import Quantized, block_scales
from jetrl_patch.errors import ConfigError, ModelError

from . import scaled_mm_double
from .deep_gemm_double import DeepGemm
from .thresholds import SQNR_GEMM, sqnr

FORMATS = ["pow2", "fp32"]
BLOCK = 128


@pytest.fixture
def machine(monkeypatch):
    """A machine with this GPU, CUDA and these packages."""

    def make(sm=(9, 0), cuda="12.9", packages=("triton",), deep_gemm=None, hip=None, te=None, compiler=(True, "nvcc 12.9")):
        monkeypatch.setattr(capability, "check_nvcc", lambda version: compiler)
        monkeypatch.setattr(capability, "installed_version", lambda name: te)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: sm is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: sm)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *a: "a GPU")
        monkeypatch.setattr(torch.version, "cuda", cuda)
        there = {*packages, *({"deep_gemm"} if deep_gemm is not None else ())}
        spec = types.SimpleNamespace(origin=None)
        monkeypatch.setattr(capability.importlib.util, "find_spec", lambda name: spec if name in there else None)
        original = capability.importlib.import_module
        load = lambda name: deep_gemm() if name == "deep_gemm" else original(name)  # noqa: E731
        monkeypatch.setattr(capability.importlib, "import_module", load)

    return make


def working():
    return types.SimpleNamespace(fp8_gemm_nt=lambda *a, **k: None)


def empty():
    return types.SimpleNamespace()


def broken():
    raise RuntimeError("no JIT headers")


@pytest.mark.parametrize(
    ("setup", "chosen"),
    [
        ({"deep_gemm": working}, "deep_gemm"),
        ({}, "triton"),
        ({"deep_gemm": empty}, "triton"),
        ({"deep_gemm": broken}, "triton"),
        ({"deep_gemm": working, "compiler": (False, "no nvcc")}, "triton"),
        ({"packages": ()}, "torch"),
        ({"sm": (8, 0), "deep_gemm": working}, "torch"),
        ({"sm": (8, 9)}, "torch"),
        ({"sm": (10, 0), "deep_gemm": working}, "torch"),
        ({"sm": None}, "torch"),
        ({"hip": "6.2"}, "torch"),
    ],
)
def test_auto_takes_the_best_that_serves(machine, setup, chosen):
    machine(**setup)
    assert choose_backend("auto", "cuda") == chosen


@pytest.mark.parametrize("sm", [(8, 0), (8, 9), (10, 0)])
def test_a_gpu_without_a_fast_backend_is_told_once(machine, sm, caplog):
    machine(sm=sm)
    backends._say_slow.cache_clear()
    assert choose_backend("auto", "cuda") == choose_backend("auto", "cuda") == "torch"
    (record,) = [r for r in caplog.records if r.name == backends.__name__]
    assert f"this device has {sm[0]}.{sm[1]}" in record.getMessage() and "slow FP64" in record.getMessage()
    caplog.clear()
    machine()
    assert choose_backend("auto", "cuda") == "triton" and not caplog.records


@pytest.mark.parametrize(
    ("name", "setup", "match"),
    [
        ("triton", {"sm": (8, 0)}, "needs compute capability 9.0 .Hopper., and this device has 8.0"),
        ("triton", {"sm": None}, "sees no CUDA device"),
        ("triton", {"hip": "6.2"}, "built for ROCm 6.2"),
        ("triton", {"packages": ()}, "found triton is not installed"),
        ("deep_gemm", {"sm": (8, 9), "deep_gemm": working}, "this device has 8.9"),
        ("deep_gemm", {}, "deep_gemm is not installed, vllm.third_party.deep_gemm is not installed"),
        ("deep_gemm", {"deep_gemm": empty}, "deep_gemm has no fp8_gemm_nt"),
        ("deep_gemm", {"deep_gemm": broken}, "cannot be imported .RuntimeError: no JIT headers"),
        ("deep_gemm", {"deep_gemm": working, "compiler": (False, "no nvcc")}, "found no nvcc"),
        ("cublaslt", {"cuda": "12.8"}, "need CUDA 12.9 or newer, and this torch was built with CUDA 12.8"),
        ("cublaslt", {"cuda": None}, "need CUDA 12.9 or newer"),
        ("cublaslt", {"sm": (10, 0)}, "this device has 10.0"),
        ("te", {}, "transformer_engine is not installed"),
        ("te", {"te": "2.2.0"}, "needs transformer_engine 2.3 or newer, and 2.2.0 is installed"),
        ("te", {"te": "2.20.2", "cuda": "12.8"}, "need CUDA 12.9 or newer"),
        ("native", {}, "required a CPU, found device type 'cuda'"),
        ("cutlass", {}, "Choose one of auto, native, torch, deep_gemm, triton, cublaslt, te"),
    ],
)
def test_a_name_that_cannot_serve(machine, name, setup, match):
    machine(**setup)
    with pytest.raises(ConfigError, match=match):
        choose_backend(name, "cuda")


def test_names_that_serve(machine):
    machine(cuda="13.0", deep_gemm=working, te="2.3.0+cu13")
    for name in ("triton", "deep_gemm", "cublaslt", "torch", "te"):
        assert choose_backend(name, "cuda") == name


@pytest.mark.parametrize("name", ["triton", "deep_gemm", "cublaslt", "te"])
def test_gpu_backends_are_refused_on_a_cpu(machine, name):
    machine(deep_gemm=working)
    with pytest.raises(ConfigError, match="required a CUDA device, found device type 'cpu'"):
        choose_backend(name, "cpu")


def test_get_backend(monkeypatch):
    with pytest.raises(ConfigError, match=r"no GEMM backend is called 'auto'\. Choose one of native, torch, triton"):
        get_backend("auto")
    monkeypatch.setattr(backends, "_LOADED", {})
    assert get_backend("triton") is get_backend("triton") and get_backend("triton").name == "triton"
    with pytest.raises(ConfigError, match='backend="deep_gemm" cannot run here: deep_gemm is not installed'):
        get_backend("deep_gemm")


def test_a_backend_of_the_gpu_needs_no_triton_to_be_imported(monkeypatch):
    original = builtins.__import__
    block = lambda name, *a, **k: (_ for _ in ()).throw(ImportError(name)) if name == "triton" else original(name, *a, **k)  # noqa: E731
    monkeypatch.setattr(builtins, "__import__", block)
    monkeypatch.setattr(backends, "_LOADED", {})
    assert get_backend("triton").fingerprint(torch.ones(1, 1)) is None


def by_rows(w):
    """A rollout weight whose rows share no scales."""
    return Quantized(w.q, w.s_rows, "rows", w.scale_format)


def oracle(a, sa, b, sb_rows, out_dtype):
    return quantize.fprop(a.contiguous(), sa.contiguous(), b.contiguous(), sb_rows.contiguous(), out_dtype)


@pytest.fixture(params=["deep_gemm", "cublaslt"])
def library(request, monkeypatch):
    if request.param == "deep_gemm":
        monkeypatch.setattr("jetrl_patch.backends.deep_gemm.find_deep_gemm", lambda: (DeepGemm(), "deep_gemm"))
        return DeepGemmBackend()
    monkeypatch.setattr(F, "scaled_mm", scaled_mm_double.scaled_mm)
    return CublasLtBackend()


@pytest.mark.parametrize("shape", [(1, 128, 128), (33, 320, 1008), (130, 256, 512)])
@pytest.mark.parametrize("scale_format", FORMATS)
def test_what_the_libraries_are_handed(library, shape, scale_format):
    M, N, K = shape
    gen = torch.Generator().manual_seed(0)
    x, g = (torch.randn(M, width, generator=gen).to(torch.bfloat16) for width in (K, N))
    w = torch.randn(N, K, generator=gen).to(torch.bfloat16)
    torch_backend = get_backend("torch")
    wq = library.quantize_weight(w, scale_format)
    for dtype in (torch.bfloat16, torch.float32):
        for held in (wq, by_rows(wq)):
            assert torch.equal(library.fprop(x, held, dtype), torch_backend.fprop(x, held, dtype))
        dx = library.dgrad(g, wq, dtype)
        assert dx.dtype == dtype and sqnr(dx, torch_backend.dgrad(g, wq, torch.float32)) > SQNR_GEMM
        xq = library.quantize_activation(x, scale_format)
        dw = library.wgrad(g, xq, dtype)
        assert dw.dtype == dtype and dw.shape == (N, K)
        assert sqnr(dw, torch_backend.wgrad(g, xq, torch.float32)) > SQNR_GEMM


def test_triton_leaves_gradients_to_cublaslt(monkeypatch):
    """In BF16, and if its widths are multiples of 16; otherwise to its own kernels."""
    gemm_backward = pytest.importorskip("jetrl_patch.kernels.gemm_backward")
    monkeypatch.setattr("jetrl_patch.backends.gpu.check_cublaslt", lambda: (True, "CUDA 12.9"))
    monkeypatch.setattr(TritonBackend, "quantizers", lambda self, x: None)
    monkeypatch.setattr(F, "scaled_mm", scaled_mm_double.scaled_mm)
    own = []
    for name in ("dgrad", "wgrad"):
        monkeypatch.setattr(gemm_backward, name, lambda *a, name=name, **k: own.append(name) or torch.zeros(1))
    ours, theirs = TritonBackend(), get_backend("torch")
    for M, N, K in ((1, 128, 128), (33, 320, 1008), (130, 256, 512)):
        gen = torch.Generator().manual_seed(0)
        x, g = (torch.randn(M, width, generator=gen).to(torch.bfloat16) for width in (K, N))
        xq, w = theirs.quantize_activation(x, "pow2"), theirs.quantize_weight(torch.randn(N, K, generator=gen), "pow2")
        found, expected = (b.gradients(g, xq, w, (torch.bfloat16,) * 2) for b in (ours, theirs))
        assert all(a.dtype == torch.bfloat16 and sqnr(a, b) > SQNR_GEMM for a, b in zip(found, expected, strict=True))
    assert not own
    ours.gradients(g, xq, w, (torch.float32,) * 2)
    ours.gradients(g, xq, w, (torch.bfloat16,) * 2, torch.zeros(N, K))
    none, zeros = ours.gradients(g[:0], xq.rows(slice(0)), w, (torch.bfloat16,) * 2)
    assert none.shape == (0, K) and zeros.shape == (N, K) and not zeros.any()
    w = theirs.quantize_weight(torch.ones(72, 512), "pow2")
    ours.gradients(g[:, :72].contiguous(), xq, w, (torch.bfloat16,) * 2)
    assert own == ["dgrad", "wgrad", "wgrad", "dgrad", "wgrad"]


@pytest.mark.parametrize("splits", [2, 4, 8])
def test_the_libraries_add_partial_sums_in_the_order_of_the_ranks(library, splits):
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(5, 1024, generator=gen).to(torch.bfloat16)
    w = by_rows(quantize.quantize_weight(torch.randn(64, 1024, generator=gen), "fp32"))
    found, expected = (b.fprop(x, w, torch.float32, splits=splits) for b in (library, get_backend("torch")))
    assert torch.equal(found, expected)  # in FP32: rounded to BF16, another order may look the same
    with pytest.raises(ValueError, match="without cutting a block"):
        library.fprop(x, w, splits=16)


def test_no_rows(library):
    w, x = quantize.quantize_weight(torch.ones(64, 256), "pow2"), torch.zeros(0, 256, dtype=torch.bfloat16)
    assert library.fprop(x, w).shape == library.fprop(x, by_rows(w)).shape == (0, 64)
    for dtype in (torch.bfloat16, torch.float32):
        dx, dw = library.gradients(x.new_zeros(0, 64), library.quantize_activation(x, "pow2"), w, (dtype, dtype))
        assert dx.shape == (0, 256) and torch.equal(dw, torch.zeros(64, 256, dtype=dtype))


def test_block_scales_of_rows():
    s = torch.rand(3, 2)
    for N in (256 + 17, 384, 384 - 64):
        assert torch.equal(block_scales(quantize.expand_weight_scale(s, N)), s[: -(-N // BLOCK)])
    assert torch.equal(block_scales(quantize.expand_weight_scale(s[:1], 40)), s[:1])
    cut = block_scales(quantize.expand_weight_scale(s, 384)[64:])  # starts inside a block: NaN, not a wrong number
    assert cut[:2].isnan().all() and torch.equal(cut[2], s[2])


def test_widths_that_the_libraries_cannot_read(library):
    x = torch.ones(8, 264).bfloat16()
    w = quantize.quantize_weight(torch.ones(64, 264), "pow2")
    for held in (w, by_rows(w)):
        with pytest.raises(ModelError, match=f"'{library.name}': required widths .* of 16, found 264"):
            library.fprop(x, held)
    g = torch.ones(8, 72).bfloat16()
    with pytest.raises(ModelError, match="of 16, found 72"):
        library.dgrad(g, quantize.quantize_weight(torch.ones(72, 256), "pow2"), torch.bfloat16)
    with pytest.raises(ModelError, match="of 16, found 264"):
        library.wgrad(g[:, :64], quantize.quantize_activation(x, "pow2"), torch.bfloat16)


def test_a_compiled_graph_holds_one_opaque_operator(library, monkeypatch):
    monkeypatch.setitem(backends._LOADED, library.name, library)
    w, found = by_rows(quantize.quantize_weight(torch.randn(64, 256), "pow2")), []

    def look(graph, inputs):
        found.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    def layer(x):
        return library.fprop(x, w) + 1

    for M in (3, 5):
        x = torch.randn(M, 256).to(torch.bfloat16)
        assert torch.equal(torch.compile(layer, backend=look, fullgraph=True)(x), layer(x))
    assert any("fp8_fprop" in name for name in found) and not any("float8" in name for name in found)


class Shifty(type(get_backend("torch"))):
    """A library that rounds differently if there are few rows, or if K is split."""

    name = "shifty"

    def __init__(self, few=0, split=False):
        self.few, self.split = few, split

    def gemm(self, x, w, out_dtype, splits=1):
        y = super().gemm(x, w, torch.float32, 1 if self.split else splits)
        return (y * (1 + 2**-20) if len(x.q) <= self.few else y).to(out_dtype)


def test_row_comparison():
    compare = lambda b: row_equality.compare_rows(b, (64, 512), "cpu", trained=300)  # noqa: E731
    for name in ("torch", "native"):
        assert compare(get_backend(name)).ok
    assert compare(Shifty()) == (True, "rows at M = 1, 7, 32, 64, 256 equal those at M = 300")
    few = compare(Shifty(few=64))
    assert not few.ok and "differ from those at M = 300" in few.found
    split = compare(Shifty(split=True))
    assert not split.ok and "the sum of two ranks" in split.found


def test_a_rollout_is_refused_by_name_and_asked_once(monkeypatch):
    device = torch.device("meta")  # in place of a GPU: only a CPU is exempt
    asked = []

    def verdict(ok):
        def compare(*args):
            asked.append(args[1])
            return row_equality.Verdict(ok, "3 of 64 values differ")

        return compare

    monkeypatch.setattr(row_equality, "_PROVEN", set())
    monkeypatch.setattr(row_equality, "compare_rows", verdict(False))
    row_equality.require_row_equality(Shifty(), (64, 512), torch.device("cpu"))
    assert not asked
    with pytest.raises(ModelError, match=r"'shifty' in a rollout.*\[64, 512\].*3 of 64 values differ"):
        row_equality.require_row_equality(Shifty(), (64, 512), device)
    monkeypatch.setattr(row_equality, "compare_rows", verdict(True))
    for _ in range(3):
        row_equality.require_row_equality(Shifty(), (64, 512), device)
    row_equality.require_row_equality(Shifty(), (128, 512), device)
    assert asked == [(64, 512), (64, 512), (128, 512)]


def test_find_spec_of_a_missing_parent():
    assert capability._missing("torch") is None
    assert capability._missing("no_such_package.child") == "no_such_package.child is not installed"
