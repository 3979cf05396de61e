"""The experts method of the rollout on a layer without an engine: loading, what is missing, digests, and the trainer's bits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import jetrl_patch
from jetrl_patch.errors import ModelError, SyncError
from jetrl_patch.exact import ops
from jetrl_patch.fp8.experts import Experts, experts_forward, run_experts
from jetrl_patch.fp8.mixture import added
from jetrl_patch.sync.digest import digest
from tests.fp8.mixture import matrices_of
from tests.vllm import expert_layer as given
from tests.vllm.expert_layer import (
    NAME,
    E,
    H,
    I,
    K,
    digests,
    empty_layer,
    load,
    load_all,
    made_by,
    method_of,
    per_matrix,
)


@pytest.fixture(autouse=True)
def enabled() -> None:
    jetrl_patch.enable(precision="fp8-unified")


@pytest.mark.parametrize("quantized", [False, True], ids=["a BF16 checkpoint", "the trainer's bytes"])
def test_the_rollout_computes_the_trainers_bits(quantized: bool) -> None:
    layer = empty_layer()
    method, own = method_of(layer), Experts(E, "pow2", "native")
    for name, tensor in (made_by(own, per_matrix()) if quantized else per_matrix()).items():
        load(layer, name, tensor)
    assert method.missing() == [] and method.is_monolithic
    method.process_weights_after_loading(layer)
    x, logits = given.tokens(150)
    chosen, ids = ops.route(logits, K, True)
    expected = experts_forward(x, *given.weights().values(), chosen, ids, own)
    assert torch.equal(method.apply_monolithic(layer, x, logits), expected)
    assert torch.equal(method.apply(layer, x, chosen, ids.int(), None, None), expected)
    assert torch.equal(method.apply_monolithic(layer, x[7:8], logits[7:8]), expected[7:8])


@pytest.mark.parametrize("guarded", [False, True], ids=["left in BF16", "moved by the guard"])
def test_experts_in_bf16_compute_the_trainers_bits(guarded: bool) -> None:
    layer = empty_layer()
    method, own = method_of(layer, quantized=guarded), Experts(E, "pow2", "native")
    own.to_bf16(exact=True)
    if guarded:
        method.to_bf16(layer, method.room_in_bf16(layer))
    assert {tensor.dtype for tensor in layer.parameters()} == {torch.bfloat16}
    held = {name for name, _ in layer.named_parameters()}
    assert held == set(method.parameters) == {"w13_weight", "w2_weight"} and len(method.missing()) == 3 * E
    load_all(layer)
    assert method.missing() == []
    method.process_weights_after_loading(layer)
    x, logits = given.tokens(150)
    expected = experts_forward(x, *given.weights().values(), *ops.route(logits, K, True), own)
    assert torch.equal(method.apply_monolithic(layer, x, logits), expected)
    assert torch.equal(method.apply_monolithic(layer, x[7:8], logits[7:8]), expected[7:8])
    assert digests(method, layer) == {name: digest(weight) for name, weight in per_matrix().items()}
    with pytest.raises(SyncError, match=r"experts\.4\.up_proj\.weight holds NaN or Inf"):
        load(layer, f"{NAME}.4.up_proj.weight", torch.full((I, H), float("inf")))


def every_expert_of_vllm_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe import fused_moe, modular_kernel

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("vLLM's experts ran")

    for name in ("fused_experts", "fused_experts_impl", "dispatch_fused_moe_kernel", "invoke_fused_moe_triton_kernel"):
        monkeypatch.setattr(fused_moe, name, never)
    kernels = (kind for kind in vars(modular_kernel).values() if isinstance(kind, type) and hasattr(kind, "apply"))
    for kind in (*kernels, modular_kernel.FusedMoEKernel):
        monkeypatch.setattr(kind, "__init__", never)


@pytest.mark.parametrize("excluded", [False, True], ids=["FP8", "excluded"])
@pytest.mark.parametrize("align", ["exact", "linear"])
def test_vllms_own_experts_are_never_run(monkeypatch: pytest.MonkeyPatch, align: str, excluded: bool) -> None:
    """They depend on the batch on an H100, without a warning (vllm#57016)."""
    from vllm.model_executor.layers import quantization
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    from jetrl_patch.adapters.vllm.experts import QuantizedExpertsMethod
    from jetrl_patch.adapters.vllm.quant import JetrlQuantConfig

    jetrl_patch.disable()
    jetrl_patch.enable(align=align, exclude=("experts",) if excluded else ())
    monkeypatch.setitem(quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG, "jetrl_fp8", JetrlQuantConfig)  # as ``fill`` does
    every_expert_of_vllm_raises(monkeypatch)
    layer = empty_layer()
    layer.__class__ = RoutedExperts  # as vLLM asks the quantization for the method of each
    method: Any = JetrlQuantConfig().get_quant_method(layer, NAME)
    assert type(method) is QuantizedExpertsMethod and (method.plain is not None) is excluded
    assert method.get_fused_moe_quant_config(layer) is None  # of which vLLM makes a kernel
    layer.__class__ = torch.nn.Module
    method.create_weights(layer, E, H, I, torch.bfloat16)
    load_all(layer)
    method.process_weights_after_loading(layer)
    x, logits = torch.randn(3, H).to(torch.bfloat16), torch.randn(3, E)
    chosen, ids = ops.route(logits, K, True)
    run = method.apply_monolithic(layer, x, logits) if method.is_monolithic else method.apply(layer, x, chosen, ids, None, None)
    assert run.shape == x.shape and method.is_monolithic is (align == "exact")
    assert method.moe_kernel is None


def test_experts_in_bf16_need_an_eager_engine_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from jetrl_patch.adapters.vllm import experts as module

    layer = empty_layer()
    method = method_of(layer, quantized=False)
    on_gpu = SimpleNamespace(w2_weight=SimpleNamespace(device=torch.device("cuda", 0)))
    module.check_eager(torch.nn.Module(), eager=False)
    monkeypatch.setattr(module, "expert_modules", lambda model: [(on_gpu, method)])
    module.check_eager(torch.nn.Module(), eager=True)
    with pytest.raises(ModelError, match=rf"{NAME} in BF16 on a GPU: required an eager engine, found captured graphs"):
        module.check_eager(torch.nn.Module(), eager=False)


def test_on_a_gpu_all_experts_are_passed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are tested elsewhere; here the loop multiplies the matrices that they would receive."""
    from jetrl_patch.adapters.vllm import experts
    from jetrl_patch.backends.cpu import NativeBackend
    from jetrl_patch.kernels import gemm_grouped

    layer = empty_layer()
    method, own = method_of(layer), Experts(E, "pow2", "native")
    load_all(layer)
    x, logits = given.tokens(50, torch.float32)
    expected = experts_forward(x, *given.weights().values(), *ops.route(logits, K, True), own)
    storages = {t.data.untyped_storage().data_ptr() for t in layer.parameters()}

    def run(kernels: Any, x: Any, chosen: Any, ids: Any, stacks: Any, part: Any) -> Any:
        assert kernels is gemm_grouped and part is None and all(stack.transposed is None for stack in stacks)
        assert {t.untyped_storage().data_ptr() for stack in stacks for t in stack} == storages  # views, renewed by every sync
        return added(run_experts(x, chosen, ids, matrices_of(stacks), (E, H), own.backend)), None

    monkeypatch.setattr(NativeBackend, "grouped", lambda self, x: gemm_grouped)
    monkeypatch.setattr(experts, "run_grouped", run)
    method.process_weights_after_loading(layer)
    assert torch.equal(method.apply_monolithic(layer, x, logits), expected)


def test_a_gpu_without_grouped_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop over experts waits for the host, which a CUDA graph cannot hold."""
    layer = empty_layer()
    method = method_of(layer)
    on_gpu = SimpleNamespace(w2_weight=SimpleNamespace(shape=(E, H, I), device=torch.device("cuda", 0)), top_k=K)
    monkeypatch.setattr(torch, "empty", lambda *size, device: None)
    backend: Any = SimpleNamespace(name="torch", grouped=lambda x: None)
    with pytest.raises(ModelError, match=r"experts of 200 x 320 with backend='torch': required grouped FP8.*Hopper.*found none"):
        method.check_grouped(on_gpu, backend)


def test_digests_are_those_of_what_the_trainer_sends() -> None:
    layer = empty_layer()
    method, sent = method_of(layer), made_by(Experts(E, "pow2", "native"), per_matrix())
    load_all(layer)
    assert digests(method, layer) == {name: digest(tensor) for name, tensor in sent.items()} and len(sent) == 2 * 3 * E


def test_a_matrix_that_did_not_arrive_is_named() -> None:
    layer = empty_layer()
    method = method_of(layer)
    assert len(method.missing()) == 2 * 3 * E
    method.process_weights_after_loading(layer)  # dummy weights
    tensors = per_matrix()
    left_out = tensors.pop(f"{NAME}.3.up_proj.weight")
    for name, weight in tensors.items():
        load(layer, name, weight)
    assert method.missing() == [f"{NAME}.3.up_proj.weight", f"{NAME}.3.up_proj.weight_scale_inv"]
    with pytest.raises(ModelError, match=r"required 30 tensors, found 28, without .*experts\.3\.up_proj\.weight"):
        method.process_weights_after_loading(layer)
    load(layer, f"{NAME}.3.up_proj.weight", left_out)
    assert method.missing() == []
    method.expect(layer)
    assert len(method.missing()) == 2 * 3 * E


def test_wrong_tensors_are_named() -> None:
    layer = empty_layer()
    method_of(layer)
    bad = torch.zeros(I, H, dtype=torch.bfloat16)
    bad[3, 4] = float("nan")
    with pytest.raises(SyncError, match=r"experts\.4\.gate_proj\.weight holds NaN or Inf"):
        load(layer, f"{NAME}.4.gate_proj.weight", bad)
    with pytest.raises(SyncError, match=r"experts\.4\.gate_proj\.weight: required shape \[200, 320\], found \[320, 200\]"):
        load(layer, f"{NAME}.4.gate_proj.weight", torch.zeros(H, I, dtype=torch.bfloat16))
    with pytest.raises(SyncError, match=r"experts\.4\.gate_proj\.weight_scale_inv: required 2 block rows"):
        load(layer, f"{NAME}.4.gate_proj.weight_scale_inv", torch.ones(3, 3))
