"""A whole model in exact mode on a GPU's code path, in the interpreter: the host waits for nothing in a step."""

from __future__ import annotations

import pytest
import torch
import triton

import jetrl_patch
from jetrl_patch.config import Config
from jetrl_patch.exact import dispatch, ops, sequences
from jetrl_patch.trainer import prepare

from ..models import build
from ..waits import NothingIsReadBack

assert triton.knobs.runtime.interpret
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

LENGTHS = (5, 1, 9)
IDS = torch.arange(2, 2 + sum(LENGTHS))[None]


#: a block of each kind, as small as the interpreter needs it; delta nets and latent attention with few small heads
SMALL = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
MODELS = {
    "qwen3": {**SMALL, "num_hidden_layers": 1},
    "qwen3_next": {
        **SMALL, "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"], "num_experts": 2, "num_experts_per_tok": 1,
        "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
    "deepseek_v3": {**SMALL, "num_hidden_layers": 1, "kv_lora_rank": 64},
}  # fmt: skip


@pytest.fixture(params=MODELS)
def model(request, monkeypatch):
    jetrl_patch.enable(precision="fp8-unified")
    monkeypatch.setattr(prepare, "choose_backend", lambda *asked: "triton")
    monkeypatch.setattr(dispatch, "configure", lambda *args: "triton")
    monkeypatch.setattr(dispatch, "_chosen", {"cpu": "triton", "cuda": "triton"})
    monkeypatch.setattr(dispatch, "attentions", {})
    made = build(request.param, **MODELS[request.param]).train()
    prepare.prepare_model(made, Config(precision="fp8-unified").resolved(), device_type="cuda")
    return made


def positions_of(at_most):
    found = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    if at_most is not None:
        sequences.mark(found, at_most)
    return found


def step(model, positions):
    """Log-probs of a packed row and the gradients."""
    model.zero_grad()
    logits = model(input_ids=IDS, position_ids=positions, use_cache=False).logits[0]
    found = ops.token_log_probs(logits, IDS[0].roll(-1), torch.full((IDS.shape[1], 1), 0.7))
    found.sum().backward()
    return [found.detach(), *(p.grad for p in model.parameters())]


def test_a_step_reads_nothing_back(model):
    expected = step(model, positions_of(None))  # the host counts the sequences, and makes the tables
    positions = positions_of(4)
    with NothingIsReadBack():
        found = step(model, positions)
    assert len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected))
    with pytest.raises(AssertionError, match="waits for the device"), NothingIsReadBack():
        step(model, positions_of(None))
