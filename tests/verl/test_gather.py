"""The FP8 all-gather in verl's settings and engines: FSDP2 only, with activations on the device."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from jetrl_patch.adapters.verl import lora
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError
from jetrl_patch.fp8.convert import swap_linears
from jetrl_patch.fp8.gather import Fp8Shard

ON = Config(fp8_all_gather=True)
STRATEGY = "actor_rollout_ref.{}.strategy"
OFFLOAD = "actor_rollout_ref.model.enable_activation_offload"


@pytest.mark.parametrize("strategies", [("fsdp2", "fsdp"), ("fsdp", "fsdp2"), ("megatron", "megatron")])
def test_other_strategies_are_refused_with_their_path(strategies):
    found = dict(zip((STRATEGY.format("actor"), STRATEGY.format("ref")), strategies))
    errors = list(lora.gather_problems(found.get, ON))
    wrong = [path for path, strategy in found.items() if strategy != "fsdp2"]
    assert len(errors) == len(wrong)
    for error, path in zip(errors, wrong):
        assert isinstance(error, ConfigError) and path in str(error) and "fsdp2 for fp8_all_gather" in str(error)
    assert not list(lora.gather_problems(found.get, Config()))
    assert not list(lora.gather_problems(dict.fromkeys(found, "fsdp2").get, ON))


def test_offloaded_activations_are_refused():
    found = {**{STRATEGY.format(role): "fsdp2" for role in ("actor", "ref")}, OFFLOAD: True}
    (error,) = lora.gather_problems(found.get, ON)
    assert isinstance(error, ConfigError) and OFFLOAD in str(error)
    assert not list(lora.gather_problems(found.get, Config()))


def test_layers_are_marked_for_the_shards_of_the_last_dimension():
    model = nn.ModuleDict(
        {"layers": nn.ModuleList([nn.ModuleDict({"a": nn.Linear(128, 256), "b": nn.Linear(128, 128)})])}
    )
    names = swap_linears(model, backend="native")
    before = copy.deepcopy(model.state_dict())
    engine = SimpleNamespace(device_mesh=SimpleNamespace(size=lambda dim: (4, 2)[dim]))
    lora.mark_layers(engine, model, names, Config())
    assert not any(isinstance(p, Fp8Shard) for p in model.parameters())
    lora.mark_layers(engine, model, names, ON)
    assert [isinstance(model.get_submodule(n).weight, Fp8Shard) for n in names] == [True, False]
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[k] + 0, v) for k, v in before.items())
