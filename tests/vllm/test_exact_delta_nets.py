"""Gated delta nets in exact mode: engines have the trainer's bits in any batch, chunk and cache, also after a weight sync."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import jetrl_patch
from jetrl_patch.adapters.vllm import worker as worker_code
from jetrl_patch.adapters.vllm.compat import delta_net_problems
from jetrl_patch.adapters.vllm.sample import generate
from jetrl_patch.measure.parity import Job
from jetrl_patch.sync.send import SyncStats
from tests.models import config_of
from tests.vllm.test_delta_nets import trainer
from tests.vllm.test_exact import assert_equal, of_one_prefix, prompts_of, run
from tests.vllm.test_weights import in_engine, push, worker_of

pytestmark = pytest.mark.e2e

NET = "model.layers.0.linear_attn"


@pytest.mark.pins
@pytest.mark.parametrize("variant", ["qwen3_next", "qwen3_next-odd"])
def test_batches(checkpoint: Callable[..., str], engine: Callable[..., Any], variant: str) -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    jetrl_patch.enable(precision="fp8-unified")
    job = Job(model=checkpoint(variant), config=jetrl_patch.status().config)
    llm = engine(job)
    assert_equal(job, run(lambda _: llm, job, [(1, 2), (7, 1), (32, 1)], 12), tokens=480)
    generate(llm, prompts_of(32, (20, 40)), 12, 1.0)  # leaves states behind in all slots
    assert_equal(job, generate(llm, prompts_of(12, (1, 1)), 12, 1.0), tokens=144)  # prompts that look like decoding steps
    for name, module in worker_of(llm).model_runner.get_model().named_modules():  # few tokens would not tell them apart
        inexact = type(module) is torch.nn.Linear or type(getattr(module, "quant_method", None)) is UnquantizedLinearMethod
        assert not inexact or name.endswith("conv1d"), name  # only its weight is read


@pytest.mark.parametrize(("cached", "chunked"), [(False, False), (False, True), (True, True)])
def test_prefix_caching_and_chunked_prefill(
    checkpoint: Callable[..., str], engine: Callable[..., Any], cached: bool, chunked: bool
) -> None:
    """Prompts share 400 tokens. vLLM caches a state at the end of each block of 144 or so, as many as a state's bytes fill."""
    jetrl_patch.enable(precision="fp8-unified")
    most = {"max_num_batched_tokens": 200 if chunked else 4096, "max_num_seqs": 8}
    settings = {"enable_prefix_caching": cached, "enable_chunked_prefill": chunked, **most}
    job = Job(model=checkpoint("qwen3_next"), config=jetrl_patch.status().config, engine=tuple(settings.items()))
    samples, held = of_one_prefix(engine(job, 512), shared=400)
    assert (held >= 100) is cached
    assert_equal(job, samples, tokens=96)


@pytest.mark.slow
@pytest.mark.parametrize("cached", [False, True])
def test_at_length(checkpoint: Callable[..., str], engine: Callable[..., Any], cached: bool) -> None:
    jetrl_patch.enable(precision="fp8-unified", kv_cache="fp8" if cached else "auto")
    settings = {"enable_prefix_caching": cached, "max_num_batched_tokens": 170, "enable_chunked_prefill": True}
    job = Job(model=checkpoint("qwen3_next"), config=jetrl_patch.status().config, engine=tuple(settings.items()))
    llm = engine(job, 512)
    assert_equal(job, generate(llm, prompts_of(32, (1, 300)), 130, 1.0), tokens=4000)


def test_a_sync_serves_the_trainers_bits(checkpoint: Callable[..., str], engine: Callable[..., Any]) -> None:
    jetrl_patch.enable(precision="fp8-unified")
    config = jetrl_patch.status().config
    first, second = (checkpoint("qwen3_next", seed) for seed in (0, 1))
    llm = engine(Job(model=first, config=config))
    model, source = trainer(second)
    stats = SyncStats()
    items = list(source.stream(model.state_dict().items(), stats))
    worker = worker_of(llm)
    assert push(worker, items)["layers"] == len(source.layers)
    quantized = {f"{layer}.{kind}" for layer in source.layers for kind in ("weight", "weight_scale_inv")}
    assert in_engine(llm) == {name: stats.digests[name] for name in quantized}
    job = Job(model=second, config=config)
    assert_equal(job, generate(llm, prompts_of(7, (1, 90)), 12, 1.0), tokens=84)

    net: Any = worker.model_runner.get_model().get_submodule(NET)
    for name in ("A_log", "dt_bias"):  # one number that is off by one step of BF16 is seen
        weight = getattr(net, name).data
        before = weight.clone()
        weight[0] = (weight[0].to(torch.bfloat16).view(torch.int16) + 1).view(torch.bfloat16)
        with pytest.raises(AssertionError):
            assert_equal(job, generate(llm, prompts_of(7, (20, 90)), 12, 1.0), tokens=84)
        weight.copy_(before)
    assert_equal(job, generate(llm, prompts_of(7, (20, 90)), 12, 1.0), tokens=84)


def test_a_state_in_bf16_is_refused(checkpoint: Callable[..., str], engine: Callable[..., Any]) -> None:
    jetrl_patch.enable(precision="fp8-unified")
    settings = (("mamba_ssm_cache_dtype", "bfloat16"),)
    job = Job(model=checkpoint("qwen3_next"), config=jetrl_patch.status().config, engine=settings)
    with pytest.raises(jetrl_patch.ModelError, match=r"exact' does not support mamba_ssm_cache_dtype='bfloat16'"):
        engine(job)


def test_other_caches_of_states_are_named() -> None:
    cache = {"mamba_cache_mode": "all", "mamba_ssm_cache_dtype": "float32", "mamba_cache_dtype": "float16", "use_replayssm": True}
    found = delta_net_problems(SimpleNamespace(cache_config=SimpleNamespace(**cache)))  # type: ignore[arg-type]
    assert found == ["mamba_cache_mode='all'", "mamba_cache_dtype='float16'", "use_replayssm"]
    cache |= {"mamba_cache_mode": "align", "mamba_cache_dtype": "auto", "use_replayssm": False}
    assert not delta_net_problems(SimpleNamespace(cache_config=SimpleNamespace(**cache)))  # type: ignore[arg-type]


@pytest.mark.slow
def test_two_ranks(tmp_path: Path, checkpoint: Callable[..., str], engine: Callable[..., Any]) -> None:
    jetrl_patch.enable(precision="fp8-unified")
    job = Job(model=checkpoint("qwen3_next-tp"), config=jetrl_patch.status().config, tp=2)
    assert_equal(job, run(engine, job, [(1, 2), (7, 1), (32, 1)], 12), tokens=480)


def test_attention_with_gates_keeps_the_exact_norms_and_rotary_embedding() -> None:
    """On a GPU vLLM would compute both in a kernel of its own."""
    from vllm.model_executor.models.qwen3_next import Qwen3NextAttention

    source = inspect.getsource(Qwen3NextAttention)
    assert source.count(f"self.{worker_code._OWN_KERNELS[0]}") == 2 and f"if self.{worker_code._OWN_KERNELS[0]}:" in source
    attention, other = (torch.nn.Module() for _ in range(2))
    setattr(attention, worker_code._OWN_KERNELS[0], True)
    model = torch.nn.ModuleList((attention, other))
    found = SimpleNamespace(hf_config=config_of("qwen3_next"), using_transformers_backend=lambda: False)
    runner = SimpleNamespace(get_model=lambda: model)
    worker_code.finish_model(SimpleNamespace(vllm_config=SimpleNamespace(model_config=found), model_runner=runner))
    assert not getattr(attention, worker_code._OWN_KERNELS[0]) and not hasattr(other, worker_code._OWN_KERNELS[0])
    sizes = SimpleNamespace(hf_text_config=found.hf_config), SimpleNamespace(tensor_parallel_size=2)
    assert worker_code.delta_net_sizes(SimpleNamespace(model_config=sizes[0], parallel_config=sizes[1])) == (1, 2, 64, 64)  # type: ignore[arg-type]
