"""Exact mode's log-probs, through the functions that verl's engine calls, against vLLM's own sampler."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from jetrl_patch import runtime
from jetrl_patch.adapters.verl import adapter, compat, logprob
from jetrl_patch.config import Config


@pytest.fixture
def mode(monkeypatch):
    def set_mode(config):
        monkeypatch.setattr(runtime, "is_active", lambda: config is not None)
        monkeypatch.setattr(runtime, "active_config", lambda: config)

    return set_mode


def _original(*args, **kwargs):
    return "verl's own"


LOGITS = torch.randn(6, 384, generator=torch.Generator().manual_seed(0)).mul(4).to(torch.bfloat16)
LABELS = torch.arange(6) * 7


def _vllm(logits, temperature):
    """Compute log-probs as vLLM's sampler does: FP32, in-place division, log-softmax (vllm/v1/sample/sampler.py)."""
    return torch.log_softmax(logits.to(torch.float32).div_(temperature), dim=-1, dtype=torch.float32)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
@pytest.mark.parametrize("unit_known", [False, True])
def test_equals_the_samplers_formula(mode, temperature, unit_known):
    mode(Config())
    t = torch.full((6, 1), temperature)
    scaled = logprob.scale_logits(_original)(LOGITS, t, is_unit_temperature=unit_known and temperature == 1.0)
    ours = logprob.logprobs_from_logits(_original)(scaled, LABELS)
    theirs = _vllm(LOGITS, t).gather(-1, LABELS[:, None])[:, 0]
    assert ours.dtype is torch.float32
    assert torch.equal(ours, theirs)


def test_verls_own_helper_is_neither(mode):
    from verl.utils.torch_functional import logprobs_from_logits

    theirs = _vllm(LOGITS, 1.0).gather(-1, LABELS[:, None])[:, 0]
    assert not torch.equal(logprobs_from_logits(LOGITS, LABELS).float(), theirs)


@pytest.mark.parametrize(
    "config", [None, Config(precision="bf16"), Config(align="linear"), Config(precision="fp8-rollout")]
)
def test_other_modes_keep_verls_own(mode, config):
    mode(config)
    assert logprob.scale_logits(_original)(LOGITS, 1.0, is_unit_temperature=True) == "verl's own"
    assert logprob.logprobs_from_logits(_original)(LOGITS, LABELS) == "verl's own"


def test_banned_tokens_leave_the_distribution_as_in_the_rollout(mode):
    mode(Config())
    vllm_logits = LOGITS.clone()
    vllm_logits[..., 300:] = float("-inf")  # monkey_patch_compute_logits
    vllm_logits[..., [5, 9]] = float("-inf")
    ours = logprob.ban(LOGITS, 300, [5, 9])
    labels = torch.arange(6) + 20
    got = logprob.logprobs_from_logits(_original)(ours, labels)
    assert torch.equal(got, _vllm(vllm_logits, 1.0).gather(-1, labels[:, None])[:, 0])
    probabilities = torch.softmax(ours.float(), -1)
    entropy = torch.logsumexp(ours.float(), -1) - (probabilities * ours.float()).sum(-1)
    assert torch.isfinite(entropy).all()


def test_nothing_to_ban_costs_nothing():
    assert logprob.ban(LOGITS, 384, []) is LOGITS
    assert logprob.ban(LOGITS, None, []) is LOGITS
    assert logprob.ban(LOGITS, 1000, []) is LOGITS


def test_gradients_flow_to_what_is_not_banned(mode):
    mode(Config())
    logits = LOGITS.float().requires_grad_()
    labels = torch.full((6,), 20)
    logprob.logprobs_from_logits(_original)(logprob.ban(logits, 300, []), labels).sum().backward()
    assert (logits.grad[:, 300:] == 0).all() and (logits.grad[:, 20] != 0).all()


@pytest.mark.parametrize(("installed", "rounds"), [("0.9.0", True), ("0.9.1", False)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_verl_that_divides_in_line_gets_fp32_logits(mode, monkeypatch, installed, rounds, temperature):
    """verl 0.9.0 divides inside ``prepare_model_outputs``; 0.9.1 calls a function, which is patched."""
    monkeypatch.setattr(compat, "installed_version", lambda name: installed)
    mode(Config())
    output = SimpleNamespace(logits=LOGITS)
    compat.wants_float_logits.cache_clear()

    def in_line(self, output, output_args, micro_batch, logits_processor_func):
        return output.logits / output_args["temperature_rmpad"].clamp(min=1e-8).unsqueeze(-1).to(output.logits.dtype)

    try:
        found = logprob.prepare_model_outputs(in_line)(
            None, output, {"temperature_rmpad": torch.full((6,), temperature)}, {}, None
        )
        assert any(patch is adapter.TEMPERATURE for patch in adapter.ADAPTER.patches(Config())) is not rounds
    finally:
        compat.wants_float_logits.cache_clear()
    got = logprob.logprobs_from_logits(_original)(found, LABELS)
    theirs = _vllm(LOGITS, temperature).gather(-1, LABELS[:, None])[:, 0]
    assert torch.equal(got, theirs) is (rounds or temperature == 1.0)
    assert output.logits is LOGITS or (rounds and temperature != 1.0)
