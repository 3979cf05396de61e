"""``optimizer_states`` in the frameworks' settings: what is written and what is refused."""

from __future__ import annotations

import pytest
import torch

from jetrl_patch import session
from jetrl_patch._versions import EXTRAS
from jetrl_patch.adapters.openrlhf import settings as openrlhf
from jetrl_patch.adapters.verl import settings as verl
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, ConflictError
from jetrl_patch.trainer import rules as module
from tests.openrlhf.test_settings import arguments
from tests.verl.conftest import base  # noqa: F401

ACTOR, CRITIC = "actor_rollout_ref.actor", "critic"
STATES = Config(precision="bf16", optimizer_states="8bit")


@pytest.mark.parametrize(("states", "name"), [("8bit", "AdamW8bit"), ("fp8", "AdamWFp8")])
def test_verl_imports_the_class_that_its_own_setting_names(base, states, name):  # noqa: F811
    from verl.workers.config import FSDPOptimizerConfig
    from verl.workers.config.optimizer import build_optimizer

    verl_config, config = base(), Config(precision="bf16", optimizer_states=states)
    verl.prepare(verl_config, config)
    for section in (verl_config.actor_rollout_ref.actor, verl_config.critic):
        assert (section.optim.optimizer_impl, section.optim.optimizer) == ("jetrl_patch.trainer.optimizer", name)
    verl.prepare(verl_config, config)  # the trainer loop checks what the driver wrote
    own = verl_config.actor_rollout_ref.actor.optim
    chosen = FSDPOptimizerConfig(lr=0.25, optimizer=own.optimizer, optimizer_impl=own.optimizer_impl, weight_decay=0.5)
    built = build_optimizer([torch.nn.Parameter(torch.ones(3))], chosen)
    assert type(built).__name__ == name and built.param_groups[0]["lr"] == 0.25
    assert (built.param_groups[0]["weight_decay"], tuple(built.param_groups[0]["betas"])) == (0.5, (0.9, 0.999))


def test_fp32_states_change_nothing(base):  # noqa: F811
    verl_config = base(f"{ACTOR}.optim.optimizer=SGD")
    assert not any("optim" in change for change in verl.complete(verl_config, Config(precision="bf16")))
    assert verl_config.actor_rollout_ref.actor.optim.optimizer == "SGD"


@pytest.mark.parametrize(
    ("override", "error", "says"),
    [
        (f"{ACTOR}.optim.optimizer=SGD", ConflictError, "torch.optim.SGD"),
        (f"{CRITIC}.optim.optimizer_impl=bitsandbytes.optim", ConflictError, "critic.optim .*bitsandbytes.optim.AdamW"),
        (f"{ACTOR}.strategy=veomni", ConfigError, "strategy with optimizer_states='8bit'"),
        (f"+{ACTOR}.optim.override_optimizer_config.fused=True", ConfigError, "found fused"),
    ],
)
def test_what_verl_cannot_do_is_refused(base, override, error, says):  # noqa: F811
    with pytest.raises(error, match=says):
        verl.check(base(override), STATES)
    verl.check(base(override), Config(precision="bf16"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"actor__optim": "muon"}, "--actor.optim"),
        ({"critic__optim": "muon"}, "--critic.optim"),
        ({"ds__adam_offload": True}, "--ds.adam_offload"),
        ({"ds__use_universal_ckpt": True}, "--ds.use_universal_ckpt"),
        ({"ds__zero_stage": 0}, "--ds.zero_stage .*required 1, 2 or 3"),
    ],
)
def test_what_deepspeed_cannot_do_is_refused(changes, says):
    with pytest.raises(ConfigError, match=says):
        openrlhf.check(arguments(**changes), STATES)
    openrlhf.check(arguments(**changes), Config(precision="bf16"))
    openrlhf.check(arguments(actor__optim="adam", ds__zero_stage=3), STATES)


def test_deepspeed_gets_an_optimizer_for_the_name_of_one(monkeypatch):
    active = STATES
    monkeypatch.setattr(session, "active_config", lambda: active)
    initialize = openrlhf.initialize(lambda model=None, optimizer=None, config=None: (optimizer, config))
    options = {"lr": 1e-3, "betas": [0.8, 0.9], "eps": 1e-7, "weight_decay": 0.1}
    adamw = {"type": "AdamW", "params": {**options, "torch_adam": True}}
    make, config = initialize(config={"optimizer": adamw, "steps": 1})
    assert config == {"steps": 1, "zero_allow_untested_optimizer": True}
    made = make([torch.nn.Parameter(torch.ones(8))])
    assert type(made).__name__ == "AdamW8bit" and {name: made.defaults[name] for name in options} == options
    for others in ({"steps": 1}, {"optimizer": {**adamw, "type": "Muon"}}):
        assert initialize(config=others) == (None, others)
    assert initialize(optimizer=made, config={"optimizer": adamw}) == (made, {"optimizer": adamw})
    active = Config()
    assert initialize(config={"optimizer": adamw}) == (None, {"optimizer": adamw})


def test_without_torchao_there_is_one_clear_error(base, monkeypatch):  # noqa: F811
    monkeypatch.setattr(module, "is_installed", lambda name: False)
    says = rf"optimizer_states='8bit': required {EXTRAS['optim'][0]}, found no installed torchao\. Install it with .*torchao>="
    with pytest.raises(ConfigError, match=says):
        verl.check(base(), STATES)
    with pytest.raises(ConfigError, match=says):
        openrlhf.check(arguments(), STATES)
    verl.check(base(), Config(precision="bf16"))
