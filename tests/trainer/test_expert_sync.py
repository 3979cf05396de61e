"""What a trainer sends of a mixture: each matrix by its checkpoint's name, quantized once, half the bytes of BF16."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import jetrl_patch
from jetrl_patch.errors import ModelError, SyncError
from jetrl_patch.fp8.convert import gather_in_fp8
from jetrl_patch.sync.digest import digest
from jetrl_patch.sync.protocol import COMMIT, MANIFEST, Manifest, decode_json
from jetrl_patch.sync.send import SyncStats
from jetrl_patch.trainer.source import Source, convert
from tests.models import build


def trainer(**settings: Any) -> tuple[Any, Source]:
    jetrl_patch.enable(**{"precision": "fp8-unified", **settings})
    model = build("qwen3_moe")
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return model, convert(model, jetrl_patch.status().config, shapes, rollout_tp=1, device_type="cpu")


def weights(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, p.detach()) for name, p in model.named_parameters()]


def test_names_bytes_and_digests() -> None:
    model, source = trainer()
    assert len(source.layers) == 3 * (4 + 8 * 3) and set(source.modules) == set(source.layers)
    stats = SyncStats()
    sent = dict(source.stream(weights(model), stats))
    manifest = Manifest.decode(sent[MANIFEST])
    assert set(manifest.layers) == set(source.layers)
    assert set(sent) - {MANIFEST, COMMIT} == set(manifest.expected())
    assert not any(name.endswith(("experts.gate_up_proj", "experts.down_proj")) for name in sent)
    assert sent["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16  # a router stays in BF16
    name = "model.layers.1.mlp.experts.5.up_proj"
    own = source.modules[name].fp8.quantized(model.model.layers[1].mlp.experts.gate_up_proj[5, 128:])
    assert torch.equal(sent[f"{name}.weight"].view(torch.uint8), own.q.view(torch.uint8))
    assert torch.equal(sent[f"{name}.weight_scale_inv"], own.s_blocks)
    assert decode_json(sent[COMMIT], COMMIT)["digests"][f"{name}.weight"] == digest(own.q)
    assert stats.layers == len(source.layers) and stats.quantized <= 0.52 * stats.quantized_as_bf16


def test_a_framework_that_sends_experts_one_by_one_sends_the_same() -> None:
    from jetrl_patch.fp8.convert import per_expert

    model, source = trainer()
    apart = [pair for name, weight in weights(model) for pair in per_expert(name, weight)]
    first, second = (dict(source.stream(items, SyncStats())) for items in (weights(model), apart))
    assert list(first) == list(second)
    assert all(torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8)) for name in first)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(("part", "row"), [("gate_proj", 3), ("up_proj", 131), ("down_proj", 3)])
@pytest.mark.parametrize(
    "settings",
    [{}, {"exclude": ("layers.2.mlp.experts",)}, {"precision": "fp8-rollout"}, {"sync": "delta"}, {"guard_sqnr": 5.0}],
    ids=["fp8", "left in BF16", "quantized in the rollout", "delta", "guard"],
)
def test_a_value_that_is_not_finite_names_the_expert(settings: dict[str, Any], part: str, row: int, value: str) -> None:
    model, source = trainer(**settings)
    experts = model.model.layers[2].mlp.experts
    with torch.no_grad():
        (experts.down_proj if part == "down_proj" else experts.gate_up_proj)[7, row, 4] = float(value)
    says = rf"^model\.layers\.2\.mlp\.experts\.7\.{part}\.weight holds NaN or Inf, so the sync was stopped"
    source.begin_sync(lambda: weights(model))
    with pytest.raises(SyncError, match=says):
        list(source.stream(weights(model), SyncStats()))


def test_experts_are_not_gathered_in_fp8() -> None:
    model, source = trainer()
    with pytest.raises(ModelError, match=r"experts\.0\.gate_proj\. Set fp8_all_gather=False"):
        gather_in_fp8(model, source.layers, 2)
