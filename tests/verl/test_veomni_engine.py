"""verl's VeOmni engine around VeOmni's real model under torchrun, and what of the engine is checked before it is built."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from jetrl_patch.adapters.verl import model
from jetrl_patch.errors import ModelError
from jetrl_patch.models.families import covering
from tests import forks, models, vision_models
from tests.veomni import environ, needs_veomni

SCRIPT = Path(__file__).with_name("veomni_engine_script.py")
SLOW = pytest.mark.slow


@needs_veomni
@pytest.mark.e2e
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("qwen3", "fp8"),
        pytest.param("qwen3", "fused", marks=SLOW),
        pytest.param("qwen3", "shared", marks=SLOW),
        pytest.param("qwen3_vl", "shared", marks=SLOW),
        pytest.param("qwen3_vl", "fused", marks=SLOW),
        pytest.param("qwen3_vl", "fp8-shared", marks=SLOW),
        *(
            pytest.param(family, mode, marks=SLOW)
            for family in sorted(covering("veomni"))
            for mode in ("plain", "fp8")
            if (family, mode) != ("qwen3", "fp8")
        ),
    ],
)
def test_computes_as_transformers_and_sends_what_it_trains_with(family, mode, tmp_path):
    save = vision_models.save if family in vision_models.FAMILIES else models.save
    path = save(tmp_path / "model", family)
    done = forks.run(SCRIPT, family, path, mode, ranks=2, environ=environ(), timeout=390)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    print(next(line for line in done.stdout.splitlines() if line.startswith("WORST")))


def test_other_numbers_of_placeholders_than_verls_are_refused(monkeypatch):
    table = {"qwen3_vl": {"IMAGE_INPUT_INDEX": 151655, "VIDEO_INPUT_INDEX": 151656}}
    utils = SimpleNamespace(VL_TYPE2INDEX=table)
    monkeypatch.setitem(sys.modules, "verl.workers.engine.veomni.utils", utils)
    monkeypatch.setitem(sys.modules, "verl.workers.engine.veomni", SimpleNamespace(utils=utils))
    right = SimpleNamespace(model_type="qwen3_vl", image_token_id=151655, video_token_id=151656)
    model._check_places(right)
    model._check_places(SimpleNamespace(model_type="qwen3"))
    with pytest.raises(ModelError, match="required image_token_id=151655, found image_token_id=7"):
        model._check_places(SimpleNamespace(**{**vars(right), "image_token_id": 7}))


def test_a_model_of_transformers_itself_is_refused():
    with pytest.raises(ModelError, match=r"required VeOmni's own class, found torch\.nn.*\.Linear.*MODELING_BACKEND"):
        model._check_modelling(nn.Linear(2, 2))


def test_experts_keep_the_name_by_which_they_are_recognized():
    class Qwen3VLMoeTextExperts(nn.Module):
        def forward(self, *_):
            raise AssertionError("VeOmni's kernels")

    made = Qwen3VLMoeTextExperts()
    model._use_fp8_experts({"experts": made})
    assert type(made).__name__ == "Qwen3VLMoeTextExperts" and isinstance(made, Qwen3VLMoeTextExperts)
    assert type(made).forward is model.Fp8Experts.forward
    with pytest.raises(AttributeError):  # its weights, not VeOmni's kernels
        made(torch.zeros(1, 2), torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1))
