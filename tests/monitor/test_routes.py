"""Routes of a real mixture: what a forward pass chooses, and the share that differs from given ones."""

from __future__ import annotations

import torch

from jetrl_patch.measure.routes import Recorder, Routes, compare
from tests import models


def test_a_forward_pass_is_recorded_and_compared() -> None:
    model = models.build("qwen3_moe")
    recorder, ids = Recorder(model), torch.arange(2, 26).view(2, 12)
    with torch.no_grad():
        model(input_ids=ids)
        with recorder.recording() as chosen:
            routers = model(input_ids=ids, output_router_logits=True).router_logits
        model(input_ids=ids.flip(1))
    assert sorted(chosen) == [0, 1, 2]
    for layer, logits in enumerate(routers):
        assert torch.equal(chosen[layer].sort(-1).values, logits.topk(3, -1).indices.sort(-1).values)
    rollout = torch.stack([chosen[layer] for layer in range(3)], dim=1)
    rows = torch.arange(24)
    assert compare(rollout.flip(-1), chosen, rows) == Routes(72, 0)  # the order of a token's experts does not count
    other = rollout.clone()
    other[5, 1, 0] = (set(range(8)) - set(other[5, 1].tolist())).pop()
    assert compare(other, chosen, rows) == Routes(72, 1)
    assert compare(other[6:], chosen, rows[6:]) == Routes(54, 0)
    assert (Routes(72, 1) + Routes(28, 4)).mismatch == 0.05 and Routes().mismatch == 0.0


def test_dense_blocks_have_no_routes() -> None:
    model = models.build("glm4_moe")
    recorder = Recorder(model)
    with recorder.recording() as chosen, torch.no_grad():
        model(input_ids=torch.arange(2, 14).view(1, 12))
    dense = model.config.first_k_dense_replace
    assert dense > 0 and sorted(chosen) == list(range(dense, 3))
