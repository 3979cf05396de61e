"""Exact sampling under load: 64 requests at once, a KV cache that is too small for them, aborts, and new weights in between."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

import jetrl_patch
from jetrl_patch.measure.parity import Job, Sample

from .test_delta import Trainer
from .test_exact import assert_equal, prompts_of
from .test_weights import push, worker_of

pytestmark = pytest.mark.e2e

REQUESTS, LENGTH, ABORTED = 64, 24, 8


def under_load(llm: Any, version: int) -> list[Sample]:
    """Send all requests at once, abort some while they run, and return every token that came back."""
    from vllm import SamplingParams

    draw, engine = random.Random(version), llm.llm_engine
    start = prompts_of(1, (40, 40))[0]
    prompts = {f"{version}-{i}": start + more for i, more in enumerate(prompts_of(REQUESTS, (1, 40), seed=version))}
    for name, ids in prompts.items():
        drawn = SamplingParams(temperature=1.0, max_tokens=LENGTH, logprobs=0, ignore_eos=True, detokenize=False)
        engine.add_request(name, {"prompt_token_ids": ids}, drawn)
    found: dict[str, Sample] = {}
    aborted: set[str] = set()
    while engine.has_unfinished_requests():
        for output in engine.step():
            made = output.outputs[0]
            log_probs = [entry[token].logprob for entry, token in zip(made.logprobs, made.token_ids, strict=True)]
            found[output.request_id] = Sample(prompts[output.request_id], list(made.token_ids), log_probs)
        running = sorted(name for name, one in found.items() if 2 < len(one.response) < LENGTH - 2 and name not in aborted)
        if len(aborted) < ABORTED and running and draw.random() < 0.5:
            aborted.add(name := draw.choice(running))
            engine.abort_request([name])
    assert len(found) == REQUESTS and len(aborted) == ABORTED
    assert all(len(one.response) == LENGTH for name, one in found.items() if name not in aborted)
    return list(found.values())


@pytest.mark.parametrize("variant", ["qwen3", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_every_token_is_its_versions(
    checkpoint: Callable[..., str], engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted, original = [], Scheduler._preempt_request

    def counted(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        original(self, request, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "_preempt_request", counted)
    jetrl_patch.enable(precision="fp8-unified")
    config = jetrl_patch.status().config
    blocks = {"block_size": 32, "num_gpu_blocks_override": 40, "enable_prefix_caching": True, "max_num_batched_tokens": 128}
    models = [checkpoint(variant, seed) for seed in range(3)]
    jobs = [Job(model=model, config=config, batch=REQUESTS, engine=tuple(blocks.items())) for model in models]
    llm = engine(jobs[0])
    worker, cached = worker_of(llm), llm.llm_engine.vllm_config.cache_config
    assert cached.num_gpu_blocks == blocks["num_gpu_blocks_override"] and cached.enable_prefix_caching
    for version, job in enumerate(jobs):
        if version:
            push(worker, Trainer(job.model, worker.jetrl_receiver.terms).stream(None))
            assert llm.reset_prefix_cache()
        assert_equal(job, under_load(llm, version), tokens=REQUESTS * LENGTH // 2)
        assert len(preempted) > 5
        preempted.clear()
