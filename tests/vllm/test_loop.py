"""``jetrl_patch.loop``: a Hugging Face model and an engine in one process, without an adapter of a training framework."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import torch

import jetrl_patch
from jetrl_patch import loop
from jetrl_patch.adapters.vllm.sample import generate
from jetrl_patch.errors import AuditError, ConfigError, NotPatchedError, SyncError
from jetrl_patch.measure.parity import Draw, Job
from tests.trl import CHECKPOINT, LIMIT
from tests.trl.serving import serving

from .test_exact import prompts_of
from .test_expert_sync import step
from .test_weights import worker_of

pytestmark = pytest.mark.e2e


def load(path: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)


def padded(samples: list[Any], left: bool) -> tuple[torch.Tensor, ...]:
    """Token ids and masks [B, T], and the responses' log-probs and mask [B, T - 1] in the columns of ``loop.log_probs``."""
    width = max(len(s.prompt) + len(s.response) for s in samples)
    ids, seen = torch.zeros(len(samples), width, dtype=torch.long), torch.zeros(len(samples), width, dtype=torch.long)
    sampled, mask = torch.zeros(len(samples), width - 1), torch.zeros(len(samples), width - 1, dtype=torch.bool)
    for row, s in enumerate(samples):
        tokens = [*s.prompt, *s.response]
        begin = width - len(tokens) if left else 0
        ids[row, begin : begin + len(tokens)], seen[row, begin : begin + len(tokens)] = torch.tensor(tokens), 1
        answer = slice(begin + len(s.prompt) - 1, begin + len(tokens) - 1)
        sampled[row, answer], mask[row, answer] = torch.tensor(s.log_probs), True
    return ids, seen, sampled, mask


@pytest.mark.parametrize("variant", ["qwen3", "qwen3_moe"])
def test_every_token_is_equal_after_updates(checkpoint: Callable[..., str], engine: Callable[..., Any], variant: str) -> None:
    jetrl_patch.enable(precision="fp8-unified")
    path = checkpoint(variant)
    llm, model = engine(Job(model=path, config=jetrl_patch.status().config)), load(path)
    policy = loop.convert(model)
    for turn in range(2):
        figures = loop.send(policy, model.state_dict(), llm)
        assert 0 < figures["jetrl/sync_bytes"] < 0.6 * figures["jetrl/sync_bytes_bf16"]
        samples = generate(llm, prompts_of(8, (1, 30), seed=turn), 10, 0.7)
        for left in (False, True):
            ids, seen, sampled, mask = padded(samples, left)
            found = loop.log_probs(model, ids, seen, 0.7)
            assert found.dtype == torch.float32 and found.shape == mask.shape and int(mask.sum()) == 80
            assert torch.equal(found[mask], sampled[mask])
            assert torch.equal(loop.log_probs(model, ids, seen, 0.7, last=10), found[:, -10:])
            compared = loop.compare(found, sampled, mask)
            assert compared["jetrl/bit_equal_fraction"] == 1.0 and compared["jetrl/tokens"] == 80
        (found * mask).sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        model.zero_grad()
        step(model)
    stale = loop.log_probs(model, ids, seen, 0.7)  # of other weights than the engine's
    with pytest.raises(AuditError, match="log-prob of response token 0 of sample 0: required the rollout's"):
        loop.compare(stale, sampled, mask)


def test_an_engine_that_leaves_out_tokens(checkpoint: Callable[..., str], engine: Callable[..., Any]) -> None:
    jetrl_patch.enable(precision="fp8-unified")
    path = checkpoint("qwen3")
    llm, model = engine(Job(model=path, config=jetrl_patch.status().config)), load(path)
    loop.send(loop.convert(model), model.state_dict(), llm)
    samples = generate(llm, prompts_of(8, (1, 30)), 10, [Draw(temperature=0.7, top_p=0.9)])
    ids, seen, sampled, mask = padded(samples, left=True)
    supports = [sample.support for sample in samples if sample.support is not None]
    found = loop.log_probs(model, ids, seen, 0.7, last=10, supports=supports)
    assert torch.equal(found[mask[:, -10:]], sampled[mask])
    assert not torch.equal(found, loop.log_probs(model, ids, seen, 0.7, last=10))


def test_what_a_worker_of_another_process_would_do(checkpoint: Callable[..., str], engine: Callable[..., Any]) -> None:
    jetrl_patch.enable(precision="fp8-unified")
    path = checkpoint("qwen3", seed=1)
    llm, model = engine(Job(model=checkpoint("qwen3"), config=jetrl_patch.status().config)), load(path)
    pairs = list(loop.messages(loop.convert(model), dict(model.named_parameters())))
    worker = worker_of(llm)
    with pytest.raises(SyncError, match="ended before the commit"):
        loop.receive(worker, pairs[:-1])
    loop.receive(worker, pairs)
    ids, seen, sampled, mask = padded(generate(llm, prompts_of(3, (1, 9)), 4, 1.0), left=False)
    assert torch.equal(loop.log_probs(model, ids, seen)[mask], sampled[mask])


def test_the_other_modes_are_measured(checkpoint: Callable[..., str], engine: Callable[..., Any]) -> None:
    jetrl_patch.enable(precision="fp8-rollout")
    path = checkpoint("qwen3")
    llm, model = engine(Job(model=path, config=jetrl_patch.status().config)), load(path)
    loop.send(loop.convert(model), model.state_dict(), llm)
    ids, seen, sampled, mask = padded(generate(llm, prompts_of(8, (1, 30)), 10, 1.0), left=False)
    figures = loop.compare(loop.log_probs(model, ids, seen), sampled, mask)
    assert 0 < figures["jetrl/logp_abs_diff_mean"] < 0.3 and figures["jetrl/bit_equal_fraction"] < 1.0


@pytest.mark.parametrize(("ranks", "found"), [(1, "one in a process of its own"), (2, "one with 2 ranks")])
def test_an_engine_elsewhere_is_refused(checkpoint: Callable[..., str], ranks: int, found: str) -> None:
    model = load(checkpoint("qwen3"))
    with pytest.raises(NotPatchedError, match="enable"):
        loop.convert(model)
    jetrl_patch.enable(precision="fp8-unified")
    parallel = SimpleNamespace(parallel_config=SimpleNamespace(world_size=ranks))
    engine = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=parallel, engine_core=object()))
    with pytest.raises(ConfigError, match=rf"loop\.send\(\): required an engine with one rank in this process, found {found}"):
        loop.send(loop.convert(model), model.state_dict(), engine)


def test_a_server(tmp_path: Path) -> None:
    """One sync after another into ``vllm serve``, whose completions come by HTTP."""
    jetrl_patch.enable(precision="fp8-unified")
    model, random = load(str(CHECKPOINT)), Random(0)
    policy, optimizer = loop.convert(model), torch.optim.AdamW(model.parameters(), lr=1e-3)
    prompts = [[random.randrange(model.config.vocab_size) for _ in range(random.randint(1, 30))] for _ in range(8)]
    body = {"prompt": prompts, "max_tokens": 20, "ignore_eos": True, "logprobs": 1, "temperature": 0.7, "return_token_ids": True}
    with serving(tmp_path, JETRL_PRECISION="fp8-unified") as (place, _):
        url, port = place["vllm_server_base_url"], place["vllm_group_port"]
        with pytest.raises(ConfigError, match=r"rollout_tp with the vLLM server at .*: required 1, as it has, found 2\."):
            loop.Server(url, port, rollout_tp=2, device="cpu")
        server = loop.Server(url, port, device="cpu")
        for _ in range(2):
            loop.send(policy, model.state_dict(), server)
            reply = requests.post(f"{url}/v1/completions", json=body, timeout=LIMIT).json()
            samples = [
                SimpleNamespace(prompt=prompt, response=answer["token_ids"], log_probs=answer["logprobs"]["token_logprobs"])
                for prompt, answer in zip(prompts, reply["choices"], strict=True)
            ]
            ids, seen, sampled, mask = padded(samples, left=True)
            found = loop.log_probs(model, ids, seen, 0.7)
            compared = loop.compare(found, sampled, mask)
            assert compared["jetrl/bit_equal_fraction"] == 1.0 and compared["jetrl/tokens"] == 160
            optimizer.zero_grad()
            (found * mask).sum().backward()
            optimizer.step()
