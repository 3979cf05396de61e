"""top-k, top-p and min-p in exact mode: the rollout returns what it drew from, and the trainer's log-probs have the same bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import jetrl_patch
from jetrl_patch.exact.support import Support
from jetrl_patch.measure.parity import Draw, Full, Job, Sample

from .. import models
from .test_exact import apart, assert_equal, prompts_of, run

pytestmark = pytest.mark.e2e

#: requests take these in turn, so that every batch mixes them
MIXED = (
    Draw(top_k=20), Draw(top_p=0.95), Draw(), Draw(top_p=0.7, temperature=1.3), Draw(min_p=0.05),
    Draw(temperature=0.0, top_p=0.5), Draw(top_k=50, top_p=0.9, min_p=0.02, temperature=0.7), Draw(top_k=1),
    Draw(temperature=0.7),
)  # fmt: skip


def job_of(model: str, draws: tuple[Draw, ...] = MIXED, **engine: Any) -> Job:
    jetrl_patch.enable(precision="fp8-unified")
    return Job(model=model, config=jetrl_patch.status().config, draws=draws, engine=tuple(engine.items()))


@pytest.mark.pins
@pytest.mark.parametrize("variant", ["qwen3", "qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_requests_that_limit_tokens_in_several_ways(checkpoint: Callable[..., str], engine: Any, variant: str) -> None:
    job = job_of(checkpoint(variant))
    samples = run(engine, job, [(1, 2), (7, 1), (32, 1)], 12)
    assert_equal(job, samples, tokens=480)
    for sample in samples:
        assert (sample.support is not None) is sample.draw.limited
        if sample.support is not None and sample.draw in (Draw(top_k=20), Draw(top_k=1)):  # more where logits are equal
            assert int(sample.support.counts.min()) == sample.draw.top_k
    sizes = torch.cat([sample.support.counts for sample in samples if sample.support is not None])
    assert int(sizes.min()) == 1 < int(sizes.max())


def test_a_release_without_sampling_masks_carries_them_beside_log_probs(
    checkpoint: Callable[..., str], engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come and go, and some ask for more log-probs than their token's."""
    from vllm import SamplingParams

    from jetrl_patch.adapters.vllm import compat

    monkeypatch.setattr(compat, "returns_masks", lambda: False)
    job = job_of(checkpoint("qwen3"))
    llm = engine(job)
    assert_equal(job, run(lambda _: llm, job, [(1, 2), (32, 1)], 12), tokens=300)
    fixed = {"ignore_eos": True, "detokenize": False, "top_k": 5}
    params = [SamplingParams(**fixed, max_tokens=4 + i, logprobs=asked) for i, asked in enumerate((0, 2, None))]
    asked = [{"prompt_token_ids": ids} for ids in prompts_of(3, (3, 9))]
    few, more, none = (output.outputs[0] for output in llm.generate(asked, params, use_tqdm=False))
    for done in (few, more):
        rows = done.sampling_mask.token_ids
        assert len(rows) == len(done.token_ids) and all(token in row for token, row in zip(done.token_ids, rows))
        assert min(map(len, rows)) == 5
    assert {len(entry) for entry in more.logprobs} <= {2, 3} and none.logprobs is none.sampling_mask is None


@pytest.mark.pins
@pytest.mark.parametrize("batch", [1, 32])
def test_requests_that_ban_tokens(checkpoint: Callable[..., str], engine: Any, batch: int) -> None:
    """Few or many allowed tokens, no end before some tokens, the same with top-p, and requests without a ban."""
    from vllm import SamplingParams

    job = job_of(checkpoint("qwen3"), (Draw(),))
    llm, prompts = engine(job), prompts_of(32, (1, 40))
    stops = list(range(200, 380))
    bans: list[dict[str, Any]] = [
        {"allowed_token_ids": list(range(5, 380, 7))}, {"allowed_token_ids": list(range(9, 384))}, {},
        {"min_tokens": 6, "stop_token_ids": stops}, {"min_tokens": 9, "stop_token_ids": stops, "top_p": 0.9},
    ]  # fmt: skip
    fixed = {"max_tokens": 12, "logprobs": 0, "ignore_eos": True, "detokenize": False}
    params = [SamplingParams(**bans[i % len(bans)], **fixed) for i in range(len(prompts))]
    outputs = []
    for first in range(0, len(prompts), batch):
        part = slice(first, first + batch)
        outputs += llm.generate([{"prompt_token_ids": ids} for ids in prompts[part]], params[part], use_tqdm=False)
    samples = []
    for i, output in enumerate(outputs):
        done, given = output.outputs[0], bans[i % len(bans)]
        # before vLLM 0.28 a request that draws from all tokens has a record only beside others
        rows = [[]] * len(done.token_ids) if (masks := getattr(done, "sampling_mask", None)) is None else masks.token_ids
        support = Support.of(rows).require(torch.tensor(done.token_ids), "a response")
        log_probs = [entry[token].logprob for entry, token in zip(done.logprobs, done.token_ids, strict=True)]
        samples.append(Sample(list(output.prompt_token_ids), list(done.token_ids), log_probs, support=support))
        if least := given.get("min_tokens"):
            assert len(done.token_ids) > least and not set(done.token_ids[:least]) & set(stops)
        assert support.counts.any() == bool(given)
    assert_equal(job, samples, tokens=200)
    assert apart(job, [replace(sample, support=None) for sample in samples]).bit_equal_fraction < 0.9


@pytest.mark.parametrize("cached", [True, False])
def test_with_cached_and_chunked_prompts(checkpoint: Callable[..., str], engine: Any, cached: bool) -> None:
    """A request whose prompt is not finished is in the batch, and draws nothing yet."""
    settings = {"enable_prefix_caching": cached, "enable_chunked_prefill": True, "max_num_batched_tokens": 32, "max_num_seqs": 32}
    job = job_of(checkpoint("qwen3"), **settings)
    assert_equal(job, run(engine, job, [(7, 2), (32, 1)], 12), tokens=480)


def test_one_token_more_or_less_is_seen(checkpoint: Callable[..., str], engine: Any) -> None:
    job = job_of(checkpoint("qwen3"), (Draw(top_k=20),))
    samples = run(engine, job, [(8, 1)], 12)
    assert_equal(job, samples, tokens=96)
    for change in (lambda row, token: [t for t in row if t != token] or row, lambda row, token: [*row, token]):
        changed = []
        for sample in samples:
            assert sample.support is not None
            rows = [row.tolist() for row in sample.support.ids.split(sample.support.counts.tolist())]
            kept = [next(t for t in range(384) if (t in row) is (change(row, t) != [*row, t]) and t != drawn)
                    for row, drawn in zip(rows, sample.response, strict=True)]  # fmt: skip
            off = Support.of([change(row, token) for row, token in zip(rows, kept, strict=True)])
            changed.append(replace(sample, support=off))
        assert apart(job, changed).bit_equal_fraction < 0.5


def test_equal_logits_at_the_border(checkpoint: Callable[..., str], engine: Any) -> None:
    """vLLM keeps all tokens whose logit is that of the last one: a support can be larger than top-k."""
    from jetrl_patch.adapters.vllm.sample import generate

    job = job_of(checkpoint("qwen3"), (Draw(top_k=3),))
    llm = engine(job)
    head = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model.lm_head.weight
    head.data[1::2] = head.data[::2]  # pairs of tokens with equal logits
    samples = generate(llm, prompts_of(4, (3, 9)), 8, job.draws)
    sizes = torch.cat([sample.support.counts for sample in samples if sample.support is not None])
    assert len(sizes) == 32 and int(sizes.min()) == 4 and not (sizes % 2).any()


@pytest.mark.parametrize("settings", [{"precision": "bf16"}, {"precision": "fp8-unified", "align": "linear"}])
def test_other_modes_are_as_close_as_without_limits(checkpoint: Callable[..., str], engine: Any, settings: Any) -> None:
    """With log-probs over the whole vocabulary they would be far apart, whatever the precision."""
    jetrl_patch.enable(**settings)
    job = Job(model=checkpoint("qwen3"), config=jetrl_patch.status().config, draws=(Draw(top_k=20),))
    samples = run(engine, job, [(16, 1)], 12)
    whole = [replace(sample, support=None) for sample in samples]
    assert 0 < apart(job, samples).logp_abs_diff_mean < 0.2 < 0.5 < apart(job, whole).logp_abs_diff_mean


def whole(job: Job, make: Any, requests: int = 7) -> Full:
    """The comparison over the vocabulary."""
    from jetrl_patch.adapters.vllm.sample import generate
    from jetrl_patch.cli.parity.score import score

    samples = generate(make(job), prompts_of(requests, (1, 40)), 12, job.draws, full=True)
    found = score(job, samples).full
    assert found is not None
    return found


@pytest.mark.parametrize("draws", [(Draw(),), MIXED])
def test_the_whole_vocabulary_is_equal_and_so_is_every_batch(checkpoint: Callable[..., str], engine: Any, draws: Any) -> None:
    job = replace(job_of(checkpoint("qwen3"), draws), full=True)
    found = whole(job, engine)
    assert found.equal == found.alone_equal == 1.0 and found.apart == found.alone_apart == 0.0
    assert found.values == 7 * 12 * 384 if draws == (Draw(),) else 84 < found.values < 7 * 12 * 384


def test_the_whole_vocabulary_shows_a_difference(checkpoint: Callable[..., str], engine: Any) -> None:
    jetrl_patch.enable(precision="bf16")
    found = whole(Job(model=checkpoint("qwen3"), config=jetrl_patch.status().config, full=True), engine, requests=32)
    assert found.equal < 0.1 and 0 < found.apart < 1 and found.alone_equal < 1 and found.alone_apart > 0


@pytest.mark.slow
@pytest.mark.parametrize("variant", [name for name in models.VARIANTS if name != "tp4"])
def test_the_whole_vocabulary_of_every_family(checkpoint: Callable[..., str], engine: Any, variant: str) -> None:
    found = whole(replace(job_of(checkpoint(variant), (Draw(), Draw(top_p=0.9))), full=True), engine, requests=16)
    assert found.equal == found.alone_equal == 1.0 and found.values > 16 * 12


def test_an_engine_that_does_not_say_is_an_error(checkpoint: Callable[..., str], engine: Any) -> None:
    job = job_of(checkpoint("qwen3"), (Draw(top_k=20),), logprobs_mode="raw_logprobs")
    with pytest.raises(jetrl_patch.ConfigError, match=r"top_k, top_p and min_p.*found no sampling_mask\. Set logprobs_mode="):
        run(engine, job, [(2, 1)], 4)
