"""The experts method of the rollout on a layer without an engine: loading, what is missing, digests, and the trainer's bits."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import jetrl_patch
from jetrl_patch.errors import ModelError, SyncError
from jetrl_patch.exact import ops
from jetrl_patch.fp8.convert import per_expert
from jetrl_patch.fp8.experts import Experts, experts_forward, run_experts
from jetrl_patch.fp8.mixture import added
from jetrl_patch.models.families import FAMILIES
from jetrl_patch.session import active_config
from jetrl_patch.sync.digest import Pieces, digest
from tests.fp8.mixture import matrices_of
from tests.models import config_of

NAME = "model.layers.0.mlp.experts"
E, H, I, K = 5, 320, 200, 2
SHARD = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@pytest.fixture(autouse=True)
def enabled() -> None:
    jetrl_patch.enable(precision="fp8-unified")


def empty_layer(**changes: Any) -> Any:
    from jetrl_patch.adapters.vllm.experts import MoEActivation

    layer = torch.nn.Module()
    sizes = {f"{kind}_{what}": value for kind in ("tp", "dp", "pcp", "ep") for what, value in (("size", 1), ("rank", 0))}
    ranks = {**sizes, "enable_eplb": False}
    parallel = SimpleNamespace(**{k: changes.pop(k, v) for k, v in ranks.items()})
    settings = {
        "moe_config": SimpleNamespace(moe_parallel_config=parallel, num_experts=changes.pop("num_experts", E)),
        "layer_name": NAME,
        "activation": MoEActivation.SILU,
        "apply_router_weight_on_input": False,
        "scoring_func": "softmax",
        "use_grouped_topk": False,
        "e_score_correction_bias": None,
        "custom_routing_function": None,
        "routed_scaling_factor": 1.0,
        "top_k": K,
        "renormalize": True,
        "local_num_experts": E,
        "expert_placement_strategy": "linear",
    }
    for key, value in {**settings, **changes}.items():
        setattr(layer, key, value)
    return layer


def method_of(layer: Any, quantized: bool = True) -> Any:
    from jetrl_patch.adapters.vllm.experts import QuantizedExpertsMethod

    method = QuantizedExpertsMethod(active_config(), layer, NAME, quantized)
    method.create_weights(layer, E, H, I, torch.bfloat16)
    return method


def weights() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        f"{NAME}.gate_up_proj": (torch.randn(E, 2 * I, H, generator=g) * 0.05).to(torch.bfloat16),
        f"{NAME}.down_proj": (torch.randn(E, H, I, generator=g) * 0.07).to(torch.bfloat16),
    }


def load(layer: Any, name: str, tensor: torch.Tensor) -> None:
    expert, part, kind = name.removeprefix(f"{NAME}.").split(".")
    parameter = getattr(layer, f"{'w2' if part == 'down_proj' else 'w13'}_{kind}")
    assert parameter.weight_loader(
        param=parameter, loaded_weight=tensor, weight_name=name, shard_id=SHARD[part], expert_id=int(expert), return_success=True
    )


def per_matrix() -> dict[str, torch.Tensor]:
    return dict(itertools.chain.from_iterable(per_expert(*item) for item in weights().items()))


def load_all(layer: Any) -> None:
    for name, weight in per_matrix().items():
        load(layer, name, weight)


def made_by(own: Experts, matrices: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the trainer sends of every matrix in FP8."""
    made = {f"{NAME}.{name}.weight": matrix.fp8 for name, matrix in own.matrices()}
    sent = {name: state.quantized(matrices[name]) for name, state in made.items()}
    return {name: q.q for name, q in sent.items()} | {f"{name}_scale_inv": q.s_blocks for name, q in sent.items()}


def tokens(count: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and the router's logits."""
    g = torch.Generator().manual_seed(1)
    return torch.randn(count, H, generator=g).to(torch.bfloat16), torch.randn(count, E, generator=g).to(dtype)


def digests(method: Any, layer: Any) -> dict[str, int]:
    from jetrl_patch.adapters.vllm.install import _add_weight

    pieces, found = Pieces(), dict[str, int]()
    for piece in method.pieces(layer):
        _add_weight(pieces, piece.shard, piece.weight)
        if piece.scale is not None:
            method.format.scales.add_to(pieces, piece.shard, piece.scale)
    for rect in pieces.read():
        found[rect.name] = (found.get(rect.name, 0) + rect.digest) % 2**64
    return found


@pytest.mark.parametrize("quantized", [False, True], ids=["a BF16 checkpoint", "the trainer's bytes"])
def test_the_rollout_computes_the_trainers_bits(quantized: bool) -> None:
    layer = empty_layer()
    method, own = method_of(layer), Experts(E, "pow2", "native")
    for name, tensor in (made_by(own, per_matrix()) if quantized else per_matrix()).items():
        load(layer, name, tensor)
    assert method.missing() == [] and method.is_monolithic
    method.process_weights_after_loading(layer)
    x, logits = tokens(150)
    chosen, ids = ops.route(logits, K, True)
    expected = experts_forward(x, *weights().values(), chosen, ids, own)
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
    x, logits = tokens(150)
    expected = experts_forward(x, *weights().values(), *ops.route(logits, K, True), own)
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
    x, logits = tokens(50, torch.float32)
    expected = experts_forward(x, *weights().values(), *ops.route(logits, K, True), own)
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
    with pytest.raises(ModelError, match=r"required 30 tensors, found 2 tensors less: .*experts\.3\.up_proj\.weight"):
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


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"scoring_func": "sigmoid"}, "scores by sigmoid"),
        ({"use_grouped_topk": True}, "by groups"),
        ({"e_score_correction_bias": torch.ones(E)}, "a bias that corrects scores"),
        ({"routed_scaling_factor": 2.5}, "scaled by 2.5"),
        ({"apply_router_weight_on_input": True}, "routing weights on the input"),
        ({"dp_size": 2}, "experts shared between engines"),
        ({"pcp_size": 2}, "experts shared between engines"),
        ({"enable_eplb": True}, "redundant experts"),
        ({"expert_placement_strategy": "round_robin"}, "placed by round_robin"),
    ],
)
def test_what_the_trainer_does_not_share_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=f"required SiLU, a router.*found .*{says}"):
        method_of(empty_layer(**changes))


@pytest.mark.parametrize(
    ("parallel", "keys", "says"),
    [
        ({"data_parallel_size": 2}, {}, "data_parallel_size=2"),
        ({"enable_eplb": True}, {}, "enable_eplb"),
        ({"expert_placement_strategy": "round_robin"}, {}, "expert_placement_strategy='round_robin'"),
        ({}, {"mlp_only_layers": [1]}, r"dense blocks \(mlp_only_layers\)"),
        ({}, {"decoder_sparse_step": 2}, r"dense blocks \(decoder_sparse_step\)"),
    ],
)
def test_an_engine_that_shares_or_moves_experts_is_refused(parallel: dict[str, Any], keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=f"experts in FP8 in vLLM: required experts in order.*found {says}"):
        check_engine(parallel, "qwen3_moe", keys)


def check_engine(parallel: dict[str, Any], family: str, keys: dict[str, Any]) -> None:
    from jetrl_patch.adapters.vllm.engine import _check_experts

    settings = {
        "tensor_parallel_size": 1,
        "data_parallel_size": 1,
        "enable_expert_parallel": False,
        "enable_eplb": False,
        "expert_placement_strategy": "linear",
        **parallel,
    }
    hf_config = config_of(family, **keys)
    model = SimpleNamespace(hf_config=hf_config, hf_text_config=hf_config)
    vllm_config: Any = SimpleNamespace(parallel_config=SimpleNamespace(**settings), model_config=model)
    _check_experts(vllm_config, FAMILIES[family])


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "qwen2_moe", "mixtral", "glm4_moe"])
def test_an_engine_whose_ranks_cut_a_block_or_an_expert_is_refused(family: str) -> None:
    key = "intermediate_size" if family in ("olmoe", "mixtral") else "moe_intermediate_size"
    by_experts = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    check_engine({}, family, {key: 200})
    check_engine(by_experts, family, {key: 200})
    check_engine({"tensor_parallel_size": 2}, family, {key: 256})
    with pytest.raises(ModelError, match=r"each of 2 tensor parallel ranks holds whole blocks of 128, found 384\. Use expert"):
        check_engine({"tensor_parallel_size": 2}, family, {key: 384})
    with pytest.raises(ModelError, match=r"required a number that 3 expert parallel ranks divide, found 8 experts"):
        check_engine({**by_experts, "tensor_parallel_size": 3}, family, {})


#: arguments of each of two ranks, the experts it holds, and the width of its part
RANKS = {
    "tp": [({"tp_size": 2, "tp_rank": rank}, range(E), 128) for rank in range(2)],
    "ep": [
        ({"ep_size": 2, "ep_rank": rank, "num_experts": 6, "local_num_experts": 3}, range(3 * rank, 3 * rank + 3), 256)
        for rank in range(2)
    ],
}


@pytest.mark.parametrize("fp8", [True, False], ids=["FP8", "BF16"])
@pytest.mark.parametrize("kind", ["tp", "ep"])
def test_ranks_load_route_and_add_as_the_trainer(kind: str, fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks without an engine: their rectangles tile what the trainer sends, their sums added are the trainer's bits."""
    from jetrl_patch.adapters.vllm import experts as module
    from jetrl_patch.adapters.vllm.install import _add_weight
    from jetrl_patch.fp8.mixture import ExpertSplit, added
    from jetrl_patch.sync.receive import check_tiling

    count, width = (E, 256) if kind == "tp" else (6, 256)
    own = Experts(count, "pow2", "native", ExpertSplit.of(2, 2 if kind == "ep" else 1))
    g = torch.Generator().manual_seed(0)
    stacked = {
        f"{NAME}.gate_up_proj": (torch.randn(count, 2 * width, H, generator=g) * 0.05).to(torch.bfloat16),
        f"{NAME}.down_proj": (torch.randn(count, H, width, generator=g) * 0.07).to(torch.bfloat16),
    }
    matrices = dict(itertools.chain.from_iterable(per_expert(*item) for item in stacked.items()))
    if not fp8:
        own.to_bf16(exact=True)
    sent = made_by(own, matrices) if fp8 else matrices
    x, logits = torch.randn(70, H, generator=g).to(torch.bfloat16), torch.randn(70, count, generator=g).to(torch.bfloat16)
    sums, rects = [], []
    monkeypatch.setattr(module, "sum_over_ranks", lambda mine: sums.append(mine) or mine)
    for quantized, (changes, held, part) in itertools.product((True, False), RANKS[kind]):
        layer = empty_layer(**changes)
        method = module.QuantizedExpertsMethod(active_config(), layer, NAME, fp8)
        method.create_weights(layer, len(held), H, part, torch.bfloat16)
        pieces = Pieces()
        for name, tensor in (sent if quantized else matrices).items():
            expert, leaf, tensor_kind = name.removeprefix(f"{NAME}.").split(".")
            parameter = getattr(layer, f"{'w2' if leaf == 'down_proj' else 'w13'}_{tensor_kind}")
            arguments = {"shard_id": SHARD[leaf], "expert_id": int(expert), "return_success": True}
            assert parameter.weight_loader(parameter, tensor, name, **arguments) == (int(expert) in held)
        assert method.missing() == [] and len(method.layers()) == 3 * count
        method.process_weights_after_loading(layer)
        for piece in method.pieces(layer):
            _add_weight(pieces, piece.shard, piece.weight)
            if piece.scale is not None:
                method.format.scales.add_to(pieces, piece.shard, piece.scale)
        rects += pieces.read()
        method.apply_monolithic(layer, x, logits)
    for name, tensor in sent.items():
        shape = (tensor.shape[0], tensor.shape[1])
        check_tiling(name, shape, digest(tensor), [rect for rect in rects if rect.name == name])
    expected = experts_forward(x, *stacked.values(), *ops.route(logits, K, True), own)
    for mine in (sums[:2], sums[2:]):
        assert torch.equal(added(torch.stack(mine)), expected)


@pytest.mark.pins
@pytest.mark.parametrize("ranks", [1, 2])
def test_sums_over_ranks_never_run_on_two_streams(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU vLLM computes shared experts beside the routed ones. In exact mode both add over the ranks."""
    from vllm.model_executor.layers.fused_moe.runner import shared_experts
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    from jetrl_patch.adapters.vllm.experts import QuantizedExpertsMethod, finish

    monkeypatch.delenv("VLLM_DISABLE_SHARED_EXPERTS_STREAM", raising=False)  # which vLLM sets on a CPU
    monkeypatch.setattr(shared_experts, "aux_stream", lambda: "a stream")
    monkeypatch.setattr(torch.cuda, "Event", SimpleNamespace)
    is_cuda = SimpleNamespace(is_cuda=lambda: True, is_cuda_alike=lambda: True)
    monkeypatch.setattr(shared_experts, "current_platform", is_cuda)
    layer = empty_layer(tp_size=ranks)
    layer.moe_config.moe_parallel_config.use_fi_nvl_two_sided_kernels = False
    layer.quant_method = QuantizedExpertsMethod(active_config(), layer, NAME)
    runner = MoERunner.__new__(MoERunner)
    torch.nn.Module.__init__(runner)
    runner.routed_experts = layer
    shared = shared_experts.SharedExperts(
        torch.nn.Module(), moe_config=layer.moe_config, enable_dbo=False, mk_can_overlap_shared_experts=lambda: False
    )
    runner._shared_experts = shared
    decoded, order = torch.zeros(1, H), shared_experts.SharedExpertsOrder
    assert shared._determine_shared_experts_order(decoded) == order.MULTI_STREAM_OVERLAPPED
    for _ in range(2):
        finish(runner)
        found = shared._determine_shared_experts_order(decoded)
        assert found == (order.MULTI_STREAM_OVERLAPPED if ranks == 1 else order.NO_OVERLAP)


@pytest.mark.pins
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_routers_of_newer_mixtures_have_the_trainers_logits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.31 and later build them as ``GateLinear``, with an FP32 weight where a sigmoid scores the experts."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    from jetrl_patch.adapters.vllm.ranks import ExactGateLinear
    from jetrl_patch.exact.modules import ExactRouter, ExactSigmoidRouter

    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(rank_in_group=0, world_size=1))
    with set_current_vllm_config(VllmConfig()):
        gate = ExactGateLinear(200, 8, bias=False, params_dtype=dtype, out_dtype=dtype, prefix="gate")
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 200, generator=generator).bfloat16() for n in (8, 37))
    gate.weight.data.copy_(weight)
    router: Any = SimpleNamespace(weight=weight, top_k=3, norm_topk_prob=True)
    router.e_score_correction_bias, router.num_group, router.topk_group, router.routed_scaling_factor = torch.zeros(8), 2, 1, 1.7
    trainers = ExactRouter if dtype == torch.bfloat16 else ExactSigmoidRouter
    expected, *_ = trainers.forward(router, x)
    for rows in (slice(None), slice(0, 1), slice(5, 12)):
        logits, bias = gate(x[rows])
        assert logits.dtype == dtype and torch.equal(logits, expected[rows]) and bias is None
