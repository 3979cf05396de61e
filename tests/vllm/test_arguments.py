"""The table of engine arguments, its models, and the layers that a weight sync cannot update."""

from __future__ import annotations

import dataclasses
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from jetrl_patch import ConfigError, ConflictError, ModelError, session
from jetrl_patch.adapters.vllm.arguments import _VALUES, FREE, KERNELS, argument_problems
from jetrl_patch.adapters.vllm.sample import sample
from jetrl_patch.config import Config
from jetrl_patch.measure.parity import Draw, Job
from jetrl_patch.models.structure import EXPERTS
from jetrl_patch.trainer.rules import LEAST_TEMPERATURE
from tests.models import config_of


def test_every_name_in_the_table_is_vllms_and_stands_once() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import FrontendArgs

    known = {field.name for made in (AsyncEngineArgs, FrontendArgs) for field in dataclasses.fields(made)}
    names = [*" ".join([*FREE.values(), *KERNELS.values()]).split(), *_VALUES]
    assert sorted(set(names) - known) == []
    assert len(names) == len(set(names))
    assert len(set(names)) < len(known) / 2  # the table is a choice, not vLLM's list


def test_openrlhf_hands_on_what_the_table_knows() -> None:
    """OpenRLHF has no free engine arguments: all are in ``create_vllm_engines``."""
    engine = pytest.importorskip("openrlhf.trainer.ray.vllm_engine")
    source = inspect.getsource(engine.create_vllm_engines)
    body = source.partition("actor_kwargs = {")[2].partition("}")[0]
    given = {line.split('"')[1] for line in body.splitlines() if line.strip().startswith('"')}
    ours = {"bundle_indices", "num_gpus", "full_determinism"}  # taken by the actor, not by vLLM
    chosen = {"model", "worker_extension_cls", "trust_remote_code", "distributed_executor_backend"}  # OpenRLHF's, always the same
    assert {"tensor_parallel_size", "dtype"} < given - ours - chosen
    values = {"tensor_parallel_size": 2, "dtype": "bfloat16"}
    arguments = {name: values.get(name, 1) for name in given - ours - chosen}
    for config in (Config(), Config(align="linear")):
        assert list(argument_problems(arguments, config, 2, str)) == []


def test_the_lowest_temperature_is_vllms() -> None:
    from vllm import SamplingParams

    asked = [LEAST_TEMPERATURE * factor for factor in (1.0, 1.01, 0.99, 0.01)]
    taken = [SamplingParams(temperature=temperature).temperature for temperature in asked]
    assert taken == [asked[0], asked[1], LEAST_TEMPERATURE, LEAST_TEMPERATURE]


@pytest.mark.parametrize("temperature", [0.0, 0.0099])
def test_parity_samples_at_no_other_temperature_than_it_scores(temperature: float) -> None:
    with pytest.raises(ConfigError, match=rf"--temperature: required at least 0.01.*found {temperature}\. Choose"):
        sample(Job(model="", config=Config(), draws=(Draw(temperature=temperature),)))


def test_vllm_looks_for_experts_under_the_same_keys() -> None:
    import vllm.config  # noqa: F401  # the next module cannot be imported first
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    for key in EXPERTS:
        config: Any = SimpleNamespace(**{key: 4})
        assert ModelArchConfigConvertorBase(config, config).get_num_experts() == 4


def resolved(hf_config: Any) -> Any:
    """What ``check_engine`` reads of a configuration that vLLM has resolved."""
    model = SimpleNamespace(hf_config=hf_config, hf_text_config=hf_config, dtype=torch.bfloat16, head_dtype=torch.bfloat16)
    return SimpleNamespace(model_config=model, parallel_config=SimpleNamespace(tensor_parallel_size=1))


def test_an_engine_is_refused_before_a_worker_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import envs

    from jetrl_patch.adapters.vllm.engine import check_engine
    from tests.trainer.test_structure import experts

    linear = Config(align="linear")
    check_engine(resolved(config_of("qwen3")), linear)
    for config in (Config(), linear, Config(precision="fp8-rollout")):
        with pytest.raises(ModelError, match="num_experts=4"):
            check_engine(resolved(experts()), config)
    check_engine(resolved(experts()), Config(precision="bf16"))
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    with pytest.raises(ConflictError, match="VLLM_BATCH_INVARIANT"):
        check_engine(resolved(config_of("qwen3")), linear)


@pytest.mark.parametrize("config", [Config(align="linear"), Config(precision="fp8-rollout"), Config(precision="int8-rollout")])
@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_angles_that_depend_on_the_longest_sequence(config: Config, kind: str) -> None:
    """Above the original length vLLM's do not, and transformers' do."""
    from transformers import LlamaConfig, Phi3Config

    from jetrl_patch.adapters.vllm.engine import check_engine

    factors = [1.0] * 16  # half a head of 32
    rope: dict[str, Any] = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    make, positions = LlamaConfig, 4096
    if kind == "longrope":
        rope = {"rope_type": kind, "short_factor": factors, "long_factor": factors, "rope_theta": 1e4}
        rope["original_max_position_embeddings"] = 4096
        make, positions = Phi3Config, 131072
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": positions, "pad_token_id": 0}
    found = resolved(make(rope_parameters=rope, **sizes))
    found.model_config.max_model_len = 4096
    check_engine(found, config)
    found.model_config.max_model_len = 4097
    with pytest.raises(ModelError, match=rf"{kind}.*max_model_len of at most 4096.*found 4097"):
        check_engine(found, config)


def bare(kind: type[nn.Module], **attributes: Any) -> nn.Module:
    """A module of this class that was never initialized."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    module.__dict__.update(attributes)
    return module


def test_layers_that_vllm_transforms_after_loading() -> None:
    from vllm.model_executor.layers.attention import Attention, MLAAttention
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from jetrl_patch.adapters.vllm.postload import check_layers

    plain = bare(Attention, impl=SimpleNamespace(sinks=None))
    live = bare(nn.Module, quant_method=UnquantizedLinearMethod.__new__(UnquantizedLinearMethod))
    check_layers(nn.ModuleDict({"attn": plain, "proj": live}))

    for module, says in (
        (bare(MLAAttention), r"found MLAAttention \(attn\)"),
        (bare(Attention, impl=SimpleNamespace(sinks=torch.zeros(1))), r"found Attention \(attn\)"),
        (bare(nn.Module, quant_method=UnquantizedFusedMoEMethod.__new__(UnquantizedFusedMoEMethod)), "UnquantizedFusedMoEMethod"),
    ):
        with pytest.raises(ModelError, match=says):
            check_layers(nn.ModuleDict({"attn": module}))

    class Finishing(nn.Module):
        def process_weights_after_loading(self) -> None: ...

    with pytest.raises(ModelError, match=r"Finishing \(the model\)"):
        check_layers(Finishing())


@pytest.mark.parametrize("config", [Config(align="linear"), Config(precision="bf16", upstream_fixes=True)])
def test_pixels_are_normalized_by_the_processor(tmp_path: Any, config: Config) -> None:
    """In the model it is done by buffers that dummy weights overwrite and that no sync sends, in BF16 too."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.vision import FusedInputNorm

    from jetrl_patch.adapters.vllm.fixes import normalize_in_processor

    session.enable(config)
    assert {"weight", "bias"} <= set(FusedInputNorm([0.5] * 3, [0.5] * 3, 1 / 255).state_dict())
    for settings in ({}, {"mm_device_do_normalize": None}, {"mm_device_do_normalize": True}):
        args = EngineArgs(model=str(tmp_path), load_format="dummy", **settings)
        assert normalize_in_processor(lambda args: args.mm_device_do_normalize)(args) is False
