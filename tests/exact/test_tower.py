"""The vision tower in exact mode: an image's features in any batch, and gradients against FP64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from jetrl_patch import ModelError
from jetrl_patch.exact import tower, trial
from jetrl_patch.models.families import FAMILIES, covering

from .. import vision_models
from ..fp8.thresholds import SQNR_EXPERTS_BF16, sqnr

COVERED = [family for family in covering("exact") if FAMILIES[family].tower]
#: the images' patches: time, height and width. The last is a film of two frames
GRIDS = ((1, 4, 4), (1, 6, 10), (1, 8, 8), (2, 4, 6))


def towers(family: str) -> tuple[Any, Any]:
    """transformers' tower, and the same in exact mode."""
    theirs = vision_models.build(family).model.visual
    ours = copy.deepcopy(theirs)
    tower.check(ours, "visual")
    tower.make_exact(ours)
    return theirs, ours


def pixels(family: str) -> list[torch.Tensor]:
    config = vision_models.config_of(family).vision_config
    width = config.in_channels * config.temporal_patch_size * config.patch_size**2
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(t * h * w, width, generator=generator) for t, h, w in GRIDS]


def features(model: Any, seen: list[torch.Tensor], grids: Any) -> torch.Tensor:
    found = model(torch.cat(seen), grid_thw=torch.tensor(grids))
    return torch.cat([found.pooler_output, *(getattr(found, "deepstack_features", None) or ())], 1)


def as_fsdp(module: Any, given: Any, named: Any) -> Any:
    """FSDP casts the inputs of its units to BF16."""
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda t: t.to(torch.bfloat16) if t.is_floating_point() else t, (given, named)
    )


@pytest.mark.parametrize("family", COVERED)
def test_an_image_has_the_same_features_in_any_batch(family: str) -> None:
    theirs, ours = towers(family)
    seen = pixels(family)
    with torch.no_grad():
        whole = features(ours, seen, GRIDS)
        alone = torch.cat([features(ours, [image], [grid]) for image, grid in zip(seen, GRIDS, strict=True)])
        order = [2, 0, 3, 1]
        other = features(ours, [seen[i] for i in order], [GRIDS[i] for i in order])
        threads = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            again = features(ours, seen, GRIDS)
        finally:
            torch.set_num_threads(threads)
        stock = features(theirs.float(), seen, GRIDS)
        for block in ours.blocks:
            block.register_forward_pre_hook(as_fsdp, with_kwargs=True)
        sharded = features(ours, seen, GRIDS)
    assert torch.equal(whole, alone) and torch.equal(whole, again) and torch.equal(whole, sharded)
    parts = whole.split([len(image) // 4 for image in seen])
    assert torch.equal(other, torch.cat([parts[i] for i in order]))
    assert whole.dtype == torch.bfloat16
    assert sqnr(whole.float(), stock) > 30  # the tower in FP32


@pytest.mark.parametrize("family", COVERED)
def test_gradients_of_the_tower(family: str) -> None:
    theirs, ours = towers(family)
    theirs, seen = theirs.double(), pixels(family)
    weights = torch.randn(features(ours, seen, GRIDS).shape, generator=torch.Generator().manual_seed(1))
    (features(ours, seen, GRIDS) * weights).sum().backward()
    (features(theirs, [image.double() for image in seen], GRIDS) * weights).sum().backward()
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert parameter.grad.dtype == parameter.dtype
        if ".qkv.bias" in name:  # a bias of the keys changes no weight: its gradient is noise
            continue
        assert sqnr(parameter.grad.float(), expected[name].grad.float()) > 20, name


@pytest.mark.parametrize("width", [64, 72, 80, 128])
def test_attention_and_its_gradients(width: int) -> None:
    """Windows of one patch, of one tile and of parts of tiles; the last is empty, as at the edge of an image."""
    ends, generator = [0, 1, 65, 129, 200], torch.Generator().manual_seed(width)
    q, k, v, dy = (torch.randn(200, 3, width, generator=generator).to(torch.bfloat16) for _ in range(4))
    given = [t.clone().requires_grad_() for t in (q, k, v)]
    out = tower.whole_attention(*given, torch.tensor([*ends, 200], dtype=torch.int32), width**-0.5)
    out.backward(dy)
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    parts = zip(*(t.transpose(0, 1).split(torch.tensor(ends).diff().tolist(), 1) for t in exact), strict=True)
    expected = torch.cat([F.scaled_dot_product_attention(*part) for part in parts], 1).transpose(0, 1)
    expected.backward(dy.double())
    assert sqnr(out.float(), expected.float()) > SQNR_EXPERTS_BF16
    for ours, theirs in zip(given, exact, strict=True):
        assert sqnr(ours.grad.float(), theirs.grad.float()) > SQNR_EXPERTS_BF16


@pytest.mark.parametrize("kind", [torch.nn.GELU(), torch.nn.GELU(approximate="tanh")])
def test_norms_and_activations_round_once(kind: Any) -> None:
    x, w, b = torch.randn(33, 96).to(torch.bfloat16), torch.randn(96), torch.randn(96)
    given = [t.clone().requires_grad_() for t in (x, w, b)]
    y = tower.rounded_once(lambda *t: kind(F.layer_norm(t[0], (96,), *t[1:])), *given)
    exact = [t.to(torch.bfloat16).double().requires_grad_() for t in (x, w, b)]
    expected = kind(F.layer_norm(exact[0], (96,), *exact[1:]))
    assert torch.equal(y, expected.to(torch.bfloat16))
    dy = torch.randn(33, 96).to(torch.bfloat16)
    y.backward(dy)
    expected.backward(dy.double())
    for ours, theirs in zip(given, exact, strict=True):
        assert ours.grad.dtype == ours.dtype and sqnr(ours.grad.float(), theirs.grad.float()) > SQNR_EXPERTS_BF16


def test_a_part_without_a_counterpart_is_refused_by_name() -> None:
    model = vision_models.build("qwen2_5_vl").model.visual
    model.blocks[1].norm2 = torch.nn.GroupNorm(2, 128)
    with pytest.raises(ModelError, match=r"align=\"exact\" of visual\.blocks\.1\.norm2.*found GroupNorm"):
        tower.check(model, "visual")
    model = vision_models.build("qwen3_vl").model.visual
    model.blocks[0].mlp.act_fn = torch.nn.Tanh()
    with pytest.raises(ModelError, match=r"visual\.blocks\.0\.mlp.*found"):
        tower.check(model, "visual")


def test_the_trial_before_an_engine_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU. Here on the CPU, as if the device had another name; once with an attention that depends on the batch."""
    run = trial._Trial(trial.Sizes(144, 0, 0, 0, 0, 0), "cpu", (1, 33, 130, 70))
    assert run.tower(2) == "equal bits in batches of 1 to 234 rows"
    whole = tower.whole_attention
    monkeypatch.setattr(tower, "whole_attention", lambda q, *rest: whole(q, *rest) * (1 + (len(q) > 200) * 0.01))
    verdict = trial._tried(lambda: run.tower(2))
    assert not verdict.ok and "an image of 1 patches alone and in a batch" in verdict.found
