"""The promise itself: vLLM's and the trainer's log-probs have the same bits, in any batch.

Two engines in small here; all families and the larger counts are marked slow.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import jetrl_patch
from jetrl_patch.measure.mismatch import Mismatch, mismatch
from jetrl_patch.measure.parity import Draw, Job, Sample
from jetrl_patch.measure.routes import Routes

from .. import models

pytestmark = pytest.mark.e2e


def prompts_of(count: int, lengths: tuple[int, int], seed: int = 0) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(2, 384) for _ in range(generator.randint(*lengths))] for _ in range(count)]


def scored_apart(job: Job, samples: Sequence[Sample]) -> tuple[Mismatch, Routes | None]:
    from jetrl_patch.cli.parity.score import score

    rollout, scored = torch.tensor([value for s in samples for value in s.log_probs]), score(job, samples)
    return mismatch(scored.log_probs, rollout, torch.ones_like(rollout)), scored.routes


def apart(job: Job, samples: Sequence[Sample]) -> Mismatch:
    return scored_apart(job, samples)[0]


def assert_equal(job: Job, samples: Sequence[Sample], tokens: int) -> None:
    found, routes = scored_apart(job, samples)
    if any(s.routes is not None for s in samples):  # a mixture of experts
        assert routes is not None and routes.compared > tokens and routes.differ == 0
    assert found.tokens >= tokens
    assert found.logp_abs_diff_max == 0.0
    assert found.bit_equal_fraction == 1.0
    spread = torch.tensor([value for s in samples for value in s.log_probs]).std()
    assert spread > 0.5  # flat logits would prove nothing


def run(make: Callable[..., Any], job: Job, batches: Sequence[tuple[int, int]], length: int) -> list[Sample]:
    """Sample ``(size, how often)`` batches one after the other in one engine."""
    from jetrl_patch.adapters.vllm.sample import generate

    llm = make(job)
    samples: list[Sample] = []
    for size, times in batches:
        for turn in range(times):
            samples += generate(llm, prompts_of(size, (1, 40), seed=100 * size + turn), length, job.draws)
    return samples


@pytest.mark.pins
@pytest.mark.parametrize("variant", ["qwen2-odd", "qwen3", "phi3-window", "yarn"])
def test_small_batches(checkpoint: Callable[..., str], engine: Callable[..., Any], variant: str) -> None:
    jetrl_patch.enable(precision="fp8-unified")
    job = Job(model=checkpoint(variant), config=jetrl_patch.status().config)
    assert_equal(job, run(engine, job, [(1, 2), (7, 1), (32, 1)], 12), tokens=480)


def assert_equal_in_its_format(job: Job, make: Callable[..., Any], most: float) -> None:
    """The job's samples equal its trainer's values, and differ from the default format by less than ``most`` on average."""
    samples = run(make, job, [(1, 2), (7, 1), (32, 1)], 12)
    assert_equal(job, samples, tokens=480)
    jetrl_patch.disable()
    jetrl_patch.enable(precision="fp8-unified")
    found = apart(replace(job, config=jetrl_patch.status().config), samples)
    assert 1e-3 < found.logp_abs_diff_mean < most


@pytest.mark.parametrize(("scale_format", "most"), [("mxfp8", 0.2), ("nvfp4", 1.0)])
@pytest.mark.parametrize("variant", ["qwen2-odd", "qwen3"])
def test_other_blocks(
    checkpoint: Callable[..., str], engine: Callable[..., Any], variant: str, scale_format: str, most: float
) -> None:
    """The values differ from those of 128-blocks."""
    jetrl_patch.enable(precision="fp8-unified", scale_format=scale_format)
    job = Job(model=checkpoint(variant), config=jetrl_patch.status().config)
    assert_equal_in_its_format(job, engine, most)


@pytest.mark.pins
@pytest.mark.parametrize("variant", ["qwen2-odd", "qwen3", "llama", "qwen3_moe"])
def test_an_fp8_kv_cache(checkpoint: Callable[..., str], engine: Callable[..., Any], variant: str) -> None:
    """With prompts in chunks and cached by prefix. The values differ from those of a BF16 cache."""
    jetrl_patch.enable(precision="fp8-unified", kv_cache="fp8")
    job = split_prompts(checkpoint(variant), cached=True, chunked=True)
    assert_equal_in_its_format(job, engine, most=0.1)


@pytest.mark.pins
@pytest.mark.parametrize("variant", models.ONE_RECORD)
def test_families_of_one_record(checkpoint: Callable[..., str], engine: Callable[..., Any], variant: str) -> None:
    jetrl_patch.enable(precision="fp8-unified")
    job = Job(model=checkpoint(variant), config=jetrl_patch.status().config)
    assert_equal(job, run(engine, job, [(1, 1), (7, 1)], 12), tokens=96)


@pytest.mark.parametrize("variant", ["qwen3_moe", "qwen3_moe-odd"])
def test_mixtures_of_experts(checkpoint: Callable[..., str], engine: Callable[..., Any], variant: str) -> None:
    jetrl_patch.enable(precision="fp8-unified")
    job = Job(model=checkpoint(variant), config=jetrl_patch.status().config)
    samples = run(engine, job, [(1, 2), (7, 1), (32, 1)], 12)
    assert_equal(job, samples, tokens=480)
    k = samples[0].routes.shape[-1]
    assert {tuple(s.routes.shape) for s in samples} == {(len(s.prompt) + 11, 3, k) for s in samples}
    _, routes = scored_apart(job, [*samples[1:], replace(samples[0], routes=samples[0].routes.flip(0))])
    assert routes is not None and 0 < routes.mismatch < 0.1  # one of 41 samples


@pytest.mark.pins
@pytest.mark.parametrize("variant", ["olmoe-odd", "qwen2_moe-odd", "mixtral-odd", "glm4_moe"])
def test_families_with_experts(checkpoint: Callable[..., str], engine: Callable[..., Any], variant: str) -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from .test_weights import worker_of

    jetrl_patch.enable(precision="fp8-unified")
    job = Job(model=checkpoint(variant), config=jetrl_patch.status().config)
    llm = engine(job)
    assert_equal(job, run(lambda _: llm, job, [(1, 1), (7, 1)], 12), tokens=96)
    for name, module in worker_of(llm).model_runner.get_model().named_modules():  # few tokens would not tell them apart
        inexact = type(module) is torch.nn.Linear or type(getattr(module, "quant_method", None)) is UnquantizedLinearMethod
        assert not inexact, name


def test_latent_attention(checkpoint: Callable[..., str], engine: Callable[..., Any]) -> None:
    """Without compressed queries and without YaRN. vLLM has none on a CPU before 0.28."""
    jetrl_patch.enable(precision="fp8-unified")
    job = Job(model=checkpoint("deepseek_v3-plain"), config=jetrl_patch.status().config)
    assert_equal(job, run(engine, job, [(1, 2), (7, 1), (32, 1)], 12), tokens=480)


def split_prompts(model: str, cached: bool, chunked: bool) -> Job:
    """An engine with small blocks, whose prompts may be cached by prefix and computed in chunks."""
    settings = {
        "block_size": 32,
        "enable_prefix_caching": cached,
        "enable_chunked_prefill": chunked,
        "max_num_batched_tokens": 48 if chunked else 512,
    }
    return Job(model=model, config=jetrl_patch.status().config, engine=tuple(settings.items()))


@pytest.mark.slow
@pytest.mark.parametrize(("cached", "chunked"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize(
    "variant", ["qwen3_moe", "olmoe", "qwen2_moe", "mixtral", "glm4_moe", "deepseek_v3", "deepseek_v3-plain"]
)
def test_mixtures_at_length(
    checkpoint: Callable[..., str], engine: Callable[..., Any], variant: str, cached: bool, chunked: bool
) -> None:
    """4,000 tokens of each family, in batches of 1, 7 and 32, whose prompts have a beginning in common."""
    from jetrl_patch.adapters.vllm.sample import generate

    jetrl_patch.enable(precision="fp8-unified")
    job = split_prompts(checkpoint(variant), cached, chunked)
    llm, start = engine(job), prompts_of(1, (70, 70))[0]
    samples: list[Sample] = []
    for size, times in ((1, 3), (7, 1), (32, 1)):
        for turn in range(times):
            prompts = [start + prompt for prompt in prompts_of(size, (1, 30), seed=10 * size + turn)]
            samples += generate(llm, prompts, 24, 1.0)
    assert_equal(job, samples, tokens=1000)


def of_one_prefix(llm: Any, shared: int) -> tuple[list[Sample], int]:
    """Sample twice from prompts that begin with the same ``shared`` tokens. Also how many tokens the engine then has cached."""
    from vllm import SamplingParams

    from jetrl_patch.adapters.vllm.sample import generate

    start = prompts_of(1, (shared, shared))[0]
    prompts = [start + prompt for prompt in prompts_of(6, (1, 30))]
    samples = generate(llm, prompts, 8, 1.0) + generate(llm, prompts, 8, 1.0)
    params = SamplingParams(max_tokens=1, detokenize=False)
    (last,) = llm.generate([{"prompt_token_ids": prompts[0]}], params, use_tqdm=False)
    return samples, last.num_cached_tokens


@pytest.mark.parametrize(
    ("variant", "cached", "chunked"),
    [*(("qwen3", cached, chunked) for cached in (False, True) for chunked in (False, True)),
        ("qwen3_moe", True, True), ("deepseek_v3", True, True),
    ],
)
def test_prefix_caching_and_chunked_prefill(
    checkpoint: Callable[..., str], engine: Callable[..., Any], variant: str, cached: bool, chunked: bool
) -> None:
    jetrl_patch.enable(precision="fp8-unified")
    job = split_prompts(checkpoint(variant), cached, chunked)
    samples, held = of_one_prefix(engine(job), shared=100)
    # without AMX vLLM caches no prefixes of latent attention
    assert (held >= 96) is (cached and (variant != "deepseek_v3" or torch.cpu._is_amx_tile_supported()))
    assert_equal(job, samples, tokens=96)


def test_an_engine_of_another_mode_in_the_process_changes_nothing(
    checkpoint: Callable[..., str], engine: Callable[..., Any]
) -> None:
    """vLLM remembers the attention that it chose for an earlier engine of the process."""
    from .test_weights import worker_of

    for settings in ({"precision": "fp8-rollout"}, {"precision": "fp8-unified"}):
        jetrl_patch.enable(**settings)
        job = Job(model=checkpoint("qwen3"), config=jetrl_patch.status().config)
        llm = engine(job)
        layers = worker_of(llm).vllm_config.compilation_config.static_forward_context.values()
        assert {getattr(layer.impl, "jetrl_exact", False) for layer in layers} == {job.config.exact}
        if job.config.exact:
            assert_equal(job, run(lambda _, llm=llm: llm, job, [(32, 1)], 12), tokens=384)
        jetrl_patch.disable()


def test_linear_alignment_is_close_and_not_equal(checkpoint: Callable[..., str], engine: Callable[..., Any]) -> None:
    """The other modes differ, so the comparison can tell a difference."""
    jetrl_patch.enable(precision="fp8-unified", align="linear")
    job = Job(model=checkpoint("qwen3"), config=jetrl_patch.status().config)
    found = apart(job, run(engine, job, [(16, 1)], 12))
    assert 0 < found.logp_abs_diff_mean < 0.2


@pytest.mark.parametrize(
    ("raw", "temperature"), [(True, 0.7), (False, 0.7)], ids=["raw log-probs", "processed log-probs"]
)
def test_temperature(checkpoint: Callable[..., str], engine: Callable[..., Any], raw: bool, temperature: float) -> None:
    """Processed log-probs are those of the divided logits, raw ones those at temperature 1."""
    jetrl_patch.enable(precision="fp8-unified")
    mode = (("logprobs_mode", "raw_logprobs"),) if raw else ()
    draws = (Draw(temperature=temperature),)
    job = Job(model=checkpoint("llama"), config=jetrl_patch.status().config, draws=draws, engine=mode)
    samples = run(engine, job, [(16, 1)], 12)
    assert_equal(job, [replace(sample, draw=Draw()) for sample in samples] if raw else samples, tokens=192)


def test_excluded_layers_are_exact_too(checkpoint: Callable[..., str], engine: Callable[..., Any]) -> None:
    jetrl_patch.enable(precision="fp8-unified", exclude=("layers.0", "mlp.down_proj"), scale_format="fp32")
    job = Job(model=checkpoint("llama-odd"), config=jetrl_patch.status().config)
    assert_equal(job, run(engine, job, [(1, 1), (16, 1)], 12), tokens=192)


def test_fused_parts_that_disagree_are_an_error(checkpoint: Callable[..., str], engine: Callable[..., Any]) -> None:
    jetrl_patch.enable(precision="fp8-unified", exclude=("q_proj",))
    with pytest.raises(jetrl_patch.ModelError, match=r"q_proj.*k_proj.*one layer.*qkv_proj"):
        engine(Job(model=checkpoint("qwen3"), config=jetrl_patch.status().config))


@pytest.mark.slow
@pytest.mark.parametrize("variant", [name for name in models.VARIANTS if name != "tp4"])
def test_every_family(checkpoint: Callable[..., str], engine: Callable[..., Any], variant: str) -> None:
    jetrl_patch.enable(precision="fp8-unified")
    job = Job(model=checkpoint(variant), config=jetrl_patch.status().config)
    assert_equal(job, run(engine, job, [(1, 10), (7, 3), (32, 1)], 40), tokens=2400)


@pytest.mark.slow
def test_the_torch_backend(checkpoint: Callable[..., str], engine: Callable[..., Any]) -> None:
    jetrl_patch.enable(precision="fp8-unified", backend="torch")
    job = Job(model=checkpoint("qwen3"), config=jetrl_patch.status().config)
    assert_equal(job, run(engine, job, [(1, 1), (7, 1)], 8), tokens=64)
