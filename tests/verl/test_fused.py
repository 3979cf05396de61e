"""verl's fused kernels in exact mode: its own fused forward, with the log-probs of the unfused path to the last bit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import jetrl_patch
from jetrl_patch.adapters.verl import logprob
from jetrl_patch.adapters.verl.settings import complete
from jetrl_patch.config import Config
from jetrl_patch.errors import ModelError
from tests.models import build, config_of

EXACT = Config(precision="fp8-unified")


@pytest.fixture
def model(monkeypatch):
    """A converted model behind verl's fused forward, which verl installs on the class, and its own forward."""
    jetrl_patch.enable(precision="fp8-unified")
    from verl.models.transformers.monkey_patch import patch_forward_with_backends

    from jetrl_patch.trainer.prepare import prepare_model

    found = build("qwen3")
    unfused = type(found).forward
    monkeypatch.setattr(type(found), "forward", unfused)
    patch_forward_with_backends(found, use_fused_kernels=True, fused_kernels_backend="torch")
    prepare_model(found, EXACT)
    engine = SimpleNamespace(model_config=SimpleNamespace(use_fused_kernels=True))
    logprob.attach(engine, found, SimpleNamespace(vocabulary=300, banned=[5, 9]))  # type: ignore[arg-type]
    return found, unfused


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_the_unfused_path(model, temperature):
    module, unfused = model
    ids = torch.randint(10, 300, (2, 29), generator=torch.Generator().manual_seed(0))
    labels = torch.roll(ids, -1, -1)
    output = module(input_ids=ids, temperature=temperature, return_dict=True, shift_labels=labels)
    logits = unfused(module, input_ids=ids).logits
    logits = logprob.ban(logits, logprob.banned_columns(logits, 300, [5, 9]))
    every = torch.log_softmax(logits.float() / temperature, -1)
    assert torch.equal(output.log_probs, every.gather(-1, labels[..., None])[..., 0])
    assert torch.equal(output.entropy, -(every.exp() * every).sum(-1))
    (output.log_probs.sum() + output.entropy.sum()).backward()
    assert module.lm_head.weight.grad[300:].count_nonzero() == 0 and module.lm_head.weight.grad[10].count_nonzero() > 0


def test_fp16_uses_the_plain_head_in_fp16():
    hidden, weight = torch.randn(4, 8), torch.randn(16, 8)
    logits = logprob.product_of(Config(precision="fp16"))(hidden, weight)
    assert torch.equal(logits, torch.nn.functional.linear(hidden.half(), weight.half()))


def test_an_unconverted_model_and_an_unpatched_process_keep_verls_own(model):
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    hidden, weight = torch.randn(4, 8), torch.randn(16, 8)
    ours = FusedLinearForPPO()(hidden, weight, torch.arange(4))
    jetrl_patch.disable()
    theirs = FusedLinearForPPO()(hidden, weight, torch.arange(4))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_the_driver_selects_the_replaced_class_and_says_so():
    from omegaconf import OmegaConf

    for options in ({"impl_backend": "triton"}, None):
        model = {"use_fused_kernels": True, "fused_kernel_options": options}
        found = OmegaConf.create({"actor_rollout_ref": {"model": model, "rollout": {}}})
        changes = complete(found, EXACT)
        assert found.actor_rollout_ref.model.fused_kernel_options.impl_backend == "torch"
        assert sum("in chunks, instead of verl's fused kernels" in change for change in changes) == 1
        linear = OmegaConf.create({"actor_rollout_ref": {"model": model, "rollout": {}}})
        assert not any("fused" in change for change in complete(linear, Config(align="linear")))


@pytest.mark.parametrize("family", ["granite"])
def test_a_model_that_scales_its_logits_is_refused(family, model):
    found = config_of(family)
    with pytest.raises(ModelError, match=r"use_fused_kernels.*logits_scaling=1\.2.*Set it to false"):
        logprob.check_model(found)
    logprob.check_model(config_of("qwen3"))
