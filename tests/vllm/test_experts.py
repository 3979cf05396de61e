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
from jetrl_patch.families import FAMILIES
from jetrl_patch.fp8.expert_layers import per_expert
from jetrl_patch.fp8.experts import Experts, Operands, experts_forward, run_experts
from jetrl_patch.fp8.quantize import expand_weight_scale
from jetrl_patch.sync.digest import Pieces, digest
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
    ranks = {"tp_size": 1, "dp_size": 1, "ep_size": 1, "enable_eplb": False}
    settings = {
        "moe_config": SimpleNamespace(moe_parallel_config=SimpleNamespace(**{k: changes.pop(k, v) for k, v in ranks.items()})),
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
    }
    for key, value in {**settings, **changes}.items():
        setattr(layer, key, value)
    return layer


def method_of(layer: Any) -> Any:
    from jetrl_patch.adapters.vllm.experts import QuantizedExpertsMethod

    method = QuantizedExpertsMethod(SimpleNamespace(config=jetrl_patch.status().config), layer, NAME)  # type: ignore[arg-type]
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


@pytest.mark.parametrize("quantized", [False, True], ids=["a BF16 checkpoint", "the trainer's bytes"])
def test_the_rollout_computes_the_trainers_bits(quantized: bool) -> None:
    layer = empty_layer()
    method, own = method_of(layer), Experts(E, "pow2", "native")
    states = dict(own.matrices())
    for name, weight in per_matrix().items():
        if quantized:
            made = states[name.removeprefix(f"{NAME}.").removesuffix(".weight")].fp8.quantized(weight)
            load(layer, name, made.q)
            load(layer, f"{name}_scale_inv", made.s_blocks)
        else:
            load(layer, name, weight)
    assert method.missing() == [] and method.is_monolithic
    method.process_weights_after_loading(layer)
    g = torch.Generator().manual_seed(1)
    x, logits = torch.randn(150, H, generator=g).to(torch.bfloat16), torch.randn(150, E, generator=g).to(torch.bfloat16)
    chosen, ids = ops.route(logits, K, True)
    expected = experts_forward(x, *weights().values(), chosen, ids, own)
    assert torch.equal(method.apply_monolithic(layer, x, logits), expected)
    assert torch.equal(method.apply(layer, x, chosen, ids.int(), None, None), expected)
    assert torch.equal(method.apply_monolithic(layer, x[7:8], logits[7:8]), expected[7:8])


def test_on_a_gpu_all_experts_are_handed_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are tested elsewhere: here the loop multiplies the matrices that they would get."""
    from jetrl_patch.adapters.vllm import experts
    from jetrl_patch.fp8.backends.native import NativeBackend
    from jetrl_patch.kernels import grouped

    layer = empty_layer()
    method, own = method_of(layer), Experts(E, "pow2", "native")
    for name, weight in per_matrix().items():
        load(layer, name, weight)
    g = torch.Generator().manual_seed(1)
    x, logits = torch.randn(50, H, generator=g).to(torch.bfloat16), torch.randn(50, E, generator=g)
    expected = experts_forward(x, *weights().values(), *ops.route(logits, K, True), own)
    storages = {t.data.untyped_storage().data_ptr() for t in layer.parameters()}

    def run(kernels: Any, quantized: Any, chosen: Any, ids: Any, stacks: Any, scale_format: Any) -> tuple[torch.Tensor, None]:
        assert kernels is grouped
        assert {t.untyped_storage().data_ptr() for pair in stacks for t in pair} == storages  # views, renewed by every sync

        def operands(expert: int) -> Operands:
            places = ((stacks.gate_up, 2 * expert), (stacks.gate_up, 2 * expert + 1), (stacks.down, expert))
            return Operands(*((q[i], expand_weight_scale(s[i], q.shape[1])) for (q, s), i in places))

        return run_experts(quantized, chosen, ids, operands, (E, H), own.backend, scale_format), None

    monkeypatch.setattr(NativeBackend, "grouped", lambda self, x: grouped)
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
    method, pieces, own = method_of(layer), Pieces(), Experts(E, "pow2", "native")
    for name, weight in per_matrix().items():
        load(layer, name, weight)
    from jetrl_patch.adapters.vllm.install import _add_weight

    for piece in method.pieces(layer):
        _add_weight(pieces, piece.shard, piece.weight)
        method.format.scales.add_to(pieces, piece.shard, piece.scale)
    found: dict[str, int] = {}
    for rect in pieces.read():
        found[rect.name] = (found.get(rect.name, 0) + rect.digest) % 2**64
    states = dict(own.matrices())
    for name, weight in per_matrix().items():
        made = states[name.removeprefix(f"{NAME}.").removesuffix(".weight")].fp8.quantized(weight)
        assert found[name] == digest(made.q) and found[f"{name}_scale_inv"] == digest(made.s_blocks)
    assert len(found) == 2 * 3 * E


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
        ({"tp_size": 2}, "split over ranks"),
        ({"ep_size": 2}, "split over ranks"),
        ({"enable_eplb": True}, "redundant experts"),
    ],
)
def test_what_the_trainer_does_not_share_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=f"required SiLU, and a router.*found .*{says}"):
        method_of(empty_layer(**changes))


@pytest.mark.parametrize(
    ("parallel", "keys", "says"),
    [
        ({"tensor_parallel_size": 2}, {}, "tensor_parallel_size=2"),
        ({"data_parallel_size": 2}, {}, "data_parallel_size=2"),
        ({"enable_expert_parallel": True}, {}, "enable_expert_parallel"),
        ({"enable_eplb": True}, {}, "enable_eplb"),
        ({}, {"mlp_only_layers": [1]}, r"dense blocks \(mlp_only_layers\)"),
        ({}, {"decoder_sparse_step": 2}, r"dense blocks \(decoder_sparse_step\)"),
    ],
)
def test_an_engine_that_splits_experts_is_refused(parallel: dict[str, Any], keys: dict[str, Any], says: str) -> None:
    from jetrl_patch.adapters.vllm.engine import _check_experts

    one = {"tensor_parallel_size": 1, "data_parallel_size": 1, "enable_expert_parallel": False, "enable_eplb": False}
    fine: Any = SimpleNamespace(parallel_config=SimpleNamespace(**one))
    _check_experts(fine, config_of("qwen3_moe"), FAMILIES["qwen3_moe"])
    split: Any = SimpleNamespace(parallel_config=SimpleNamespace(**{**one, **parallel}))
    with pytest.raises(ModelError, match=f"experts in FP8 in vLLM: required one rank.*found {says}"):
        _check_experts(split, config_of("qwen3_moe", **keys), FAMILIES["qwen3_moe"])
