"""Exact mode's log-probs, through the functions that verl's engine calls, against vLLM's own sampler."""

from __future__ import annotations

import inspect
import re
from types import SimpleNamespace

import pytest
import torch
from verl.utils import tensordict_utils as tu

from jetrl_patch import session
from jetrl_patch.adapters.verl import compat, logprob, patches
from jetrl_patch.config import Config

from ..patches import applied
from ..waits import NothingIsReadBack


@pytest.fixture
def mode(monkeypatch):
    def set_mode(config):
        monkeypatch.setattr(session, "is_active", lambda: config is not None)
        monkeypatch.setattr(session, "active_config", lambda: config)

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
    listed = (patches.TEMPERATURE, *patches.PATCHES)
    scaled = applied(logprob.scale_logits, listed, _original)
    assert scaled(LOGITS, 1.0, is_unit_temperature=True) == "verl's own"
    assert applied(logprob.logprobs_from_logits, listed, _original)(LOGITS, LABELS) == "verl's own"


def test_banned_tokens_leave_the_distribution_as_in_the_rollout(mode):
    mode(Config())
    vllm_logits = LOGITS.clone()
    vllm_logits[..., 300:] = float("-inf")  # monkey_patch_compute_logits
    vllm_logits[..., [5, 9]] = float("-inf")
    ours = logprob.ban(LOGITS, logprob.banned_columns(LOGITS, 300, [5, 9]))
    labels = torch.arange(6) + 20
    got = logprob.logprobs_from_logits(_original)(ours, labels)
    assert torch.equal(got, _vllm(vllm_logits, 1.0).gather(-1, labels[:, None])[:, 0])
    probabilities = torch.softmax(ours.float(), -1)
    entropy = torch.logsumexp(ours.float(), -1) - (probabilities * ours.float()).sum(-1)
    assert torch.isfinite(entropy).all()


def test_nothing_to_ban_costs_nothing():
    assert logprob.ban(LOGITS, None) is LOGITS
    assert logprob.banned_columns(LOGITS, 384, []) is None
    assert logprob.banned_columns(LOGITS, None, []) is None
    assert logprob.banned_columns(LOGITS, 1000, []) is None


def test_gradients_flow_to_what_is_not_banned(mode):
    mode(Config())
    logits = LOGITS.float().requires_grad_()
    labels = torch.full((6,), 20)
    logprob.logprobs_from_logits(_original)(logprob.ban(logits, logprob.banned_columns(logits, 300, [])), labels).sum().backward()
    assert (logits.grad[:, 300:] == 0).all() and (logits.grad[:, 20] != 0).all()


class Engine:
    """What ``FSDPEngineWithLMHead.prepare_model_outputs`` does with logits in one packed row."""

    def __init__(self, vocabulary, banned):
        self._jetrl = SimpleNamespace(vocabulary=vocabulary, banned=banned)
        self.kept = None

    def prepare_model_outputs(self, output, output_args, micro_batch, logits_processor_func=None):
        scale, score = logprob.scale_logits(_original), logprob.logprobs_from_logits(_original)
        logits = scale(
            output.logits.squeeze(0),
            output_args["temperature_rmpad"].unsqueeze(-1),
            is_unit_temperature=output_args["temperature_is_one"],
        )
        self.kept = logits
        entropy = tu.get_non_tensor_data(micro_batch, "calculate_entropy", False)
        return score(logits=logits, labels=LABELS, inplace_backward=not entropy)


def _run(engine, micro_batch, temperature):
    """Log-probs and the gradient of the logits."""
    logits = LOGITS.clone().requires_grad_()
    output = SimpleNamespace(logits=(logits * 1).unsqueeze(0))
    arguments = {"temperature_rmpad": torch.full((6,), temperature), "temperature_is_one": temperature == 1.0}
    found = logprob.prepare_model_outputs(Engine.prepare_model_outputs)(engine, output, arguments, micro_batch)
    found.backward(torch.linspace(-1, 1, 6))
    return found.detach(), logits.grad


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("banned", [(300, [5, 9]), (None, [])])
def test_logits_read_for_log_probs_alone_are_not_copied(mode, temperature, banned):
    """The bits are those of the copies that are made where verl reads the logits for something else too."""
    mode(Config())
    engine, other = Engine(*banned), Engine(*banned)
    alone = tu.get_tensordict({}, non_tensor_dict={"use_remove_padding": True})
    both = tu.get_tensordict({}, non_tensor_dict={"use_remove_padding": True, "calculate_entropy": True})
    ours, gradient = _run(engine, alone, temperature)
    expected, wanted = _run(other, both, temperature)
    assert torch.equal(ours, expected) and torch.equal(gradient, wanted)
    kept = engine.kept.values
    assert kept.dtype is torch.bfloat16 and torch.equal(kept, wanted)  # the gradient reuses their memory
    changed = banned[0] is not None or temperature != 1.0
    assert (other.kept.dtype is torch.float32) == (temperature != 1.0) and torch.equal(other.kept, LOGITS) != changed


@pytest.mark.parametrize(
    "setting", ["calculate_entropy", "calculate_sum_pi_squared", "distillation_use_topk", "use_fused_kernels"]
)
def test_who_else_reads_the_logits(setting):
    packed = {"use_remove_padding": True}
    assert logprob.log_probs_alone(tu.get_tensordict({}, non_tensor_dict=packed), LOGITS)
    assert not logprob.log_probs_alone(tu.get_tensordict({}, non_tensor_dict=packed | {setting: True}), LOGITS)
    assert not logprob.log_probs_alone(tu.get_tensordict({}, non_tensor_dict={"use_remove_padding": False}), LOGITS)


def test_verl_has_no_other_reader():
    """Every setting that ``prepare_model_outputs`` asks for is known here."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    asked = set(re.findall(r'key="(\w+)"', inspect.getsource(FSDPEngineWithLMHead.prepare_model_outputs)))
    assert asked - {"use_remove_padding", "pad_mode", "use_fused_kernels", "distillation_only"} == set(logprob._OTHER_READERS)


def test_no_host_waits(mode):
    mode(Config())
    alone = tu.get_tensordict({}, non_tensor_dict={"use_remove_padding": True})
    _run(Engine(300, [5]), alone, 0.7)  # the mask of banned tokens is copied to the device once
    with NothingIsReadBack():
        _run(Engine(300, [5]), alone, 0.7)


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
        assert any(patch is patches.TEMPERATURE for patch in patches.patches(Config())) is not rounds
    finally:
        compat.wants_float_logits.cache_clear()
    got = logprob.logprobs_from_logits(_original)(found, LABELS)
    theirs = _vllm(LOGITS, temperature).gather(-1, LABELS[:, None])[:, 0]
    assert torch.equal(got, theirs) is (rounds or temperature == 1.0)
    assert output.logits is LOGITS or (rounds and temperature != 1.0)
