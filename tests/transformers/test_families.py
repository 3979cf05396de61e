"""Families that differ by their record alone: a token's bits do not depend on its batch."""

from __future__ import annotations

import pytest
import torch

import jetrl_patch
from jetrl_patch.config import Config
from jetrl_patch.errors import ModelError
from jetrl_patch.trainer.prepare import prepare_model

from ..models import ONE_RECORD, VARIANTS, build
from .test_prepare import padded, sequences

pytestmark = pytest.mark.pins

@pytest.mark.parametrize("name", ONE_RECORD)
def test_a_token_has_the_same_logits_in_every_company(name):
    jetrl_patch.enable(precision="fp8-unified")
    family, options = VARIANTS[name]
    model = build(family, **options)
    prepare_model(model, Config(precision="fp8-unified").resolved())
    ids = sequences(model)
    batch, mask, positions = padded(ids, "both", 12)
    with torch.no_grad():
        out = model(input_ids=batch, attention_mask=mask, position_ids=positions, use_cache=False).logits
        for row, t in enumerate(ids):
            assert torch.equal(out[row][mask[row].bool()], model(input_ids=t[None], use_cache=False).logits[0])


def test_a_module_that_the_record_does_not_know_is_refused_by_name():
    jetrl_patch.enable(precision="fp8-unified")
    model = build("granite")
    model.model.layers[1].input_layernorm = torch.nn.LayerNorm(256).to(torch.bfloat16)
    with pytest.raises(ModelError, match=r"layers\.1\.input_layernorm: required.*GraniteRMSNorm.*found LayerNorm.*linear"):
        prepare_model(model, Config(precision="fp8-unified").resolved())
