"""Reward models and teachers: the plugin changes only the policy's engine."""

from __future__ import annotations

import os
import pickle

import pytest

import jetrl_patch
from jetrl_patch.adapters.verl import rollout


@pytest.fixture
def replica(monkeypatch):
    """verl's replica class without the checks of its configuration."""
    from verl.workers.rollout.replica import RolloutReplica

    jetrl_patch.enable(precision="fp8-unified")
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

    def base_init(self, rank, config, model, gpus, is_reward_model, is_teacher_model, name_suffix):
        self.is_reward_model, self.is_teacher_model = is_reward_model, is_teacher_model

    monkeypatch.setattr(RolloutReplica, "__init__", base_init)
    return lambda **role: vLLMReplica(0, None, None, **role)


@pytest.mark.parametrize(
    ("role", "name"),
    [
        ({}, "vLLMHttpServer"),
        ({"is_reward_model": True}, "UnpatchedHttpServer"),
        ({"is_teacher_model": True}, "UnpatchedHttpServer"),
    ],
)
def test_which_server_is_unpatched(replica, role, name):
    found = replica(**role).server_class.__ray_metadata__.class_name
    assert found.rpartition(".")[2] == name


def test_an_unpatched_server_travels_by_value_and_passes_its_settings_on(replica, monkeypatch):
    import ray.cloudpickle
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    seen = {}

    def server_init(self, **kwargs):
        seen.update(kwargs, precision=jetrl_patch.status().config.precision, variable=os.environ["JETRL_PRECISION"])

    found = pickle.loads(ray.cloudpickle.dumps(rollout.unpatched_server()))
    monkeypatch.setattr(vLLMHttpServer, "__init__", server_init)
    found(replica_rank=3)
    assert seen == {"replica_rank": 3, "precision": "bf16", "variable": "bf16"}


def test_the_engine_of_an_unpatched_server_is_left_as_it_is(tmp_path):
    """The policy's engine arguments are changed, those of an engine in such a process are not."""
    from vllm.engine.arg_utils import EngineArgs

    from tests.models import save

    jetrl_patch.enable(precision="fp8-unified")
    rollout.only_measure()
    args = EngineArgs(model=save(tmp_path / "model", "qwen3", steps=0), enforce_eager=False, skip_tokenizer_init=True)
    config = args.create_engine_config()
    assert args.quantization is None and config.quant_config is None and args.enforce_eager is False
    rollout.only_measure()
    assert jetrl_patch.status().config.precision == "bf16"


def test_an_unpatched_process_stays_unpatched():
    rollout.only_measure()
    assert not jetrl_patch.status().enabled
