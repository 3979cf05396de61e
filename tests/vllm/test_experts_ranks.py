"""The experts method on several ranks: what each loads, holds and adds, and the routers and streams of vLLM."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import jetrl_patch
from jetrl_patch.exact import ops
from jetrl_patch.fp8.convert import per_expert
from jetrl_patch.fp8.experts import Experts, experts_forward
from jetrl_patch.fp8.mixture import added
from jetrl_patch.session import active_config
from jetrl_patch.sync.digest import Pieces, digest
from tests.vllm.expert_layer import NAME, SHARD, E, H, K, empty_layer, made_by


@pytest.fixture(autouse=True)
def enabled() -> None:
    jetrl_patch.enable(precision="fp8-unified")


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
    from jetrl_patch.fp8.mixture import ExpertSplit
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

    from jetrl_patch.adapters.vllm.experts import QuantizedExpertsMethod, set_runners

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
        set_runners(runner)
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
