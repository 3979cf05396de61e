"""vLLM's V2 model runner in exact mode: real engines on a CPU, whose runner and sampler are Triton kernels in the interpreter.

``test_v2_runner.py`` runs this in its own process, because vLLM must be imported with Triton. Without a GPU it would turn Triton
off, so a module with another answer stands in for the one that decides. Nothing else of vLLM is replaced.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

import jetrl_patch
from jetrl_patch.adapters.vllm.sample import generate
from jetrl_patch.exact.logprob import token_log_probs
from jetrl_patch.measure.parity import Draw, Job, Sample

from .. import vision_models
from . import test_speculation as speculation
from .test_exact import apart, assert_equal, of_one_prefix, prompts_of, scored_apart, split_prompts
from .test_support import MIXED
from .test_weights import push, stream, worker_of

assert triton.knobs.runtime.interpret and "vllm.triton_utils" not in sys.modules
decides = ModuleType("vllm.triton_utils.importing")
decides.__dict__.update(HAS_TRITON=True, TritonPlaceholder=None, TritonLanguagePlaceholder=None)
sys.modules[decides.__name__] = decides
libdevice.log1p = lambda x: tl.log(1 + x)  # the interpreter has none; only the sampler's noise needs it

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def on_v2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")


def exact(**settings: Any) -> Any:
    jetrl_patch.enable(precision="fp8-unified", **settings)
    return jetrl_patch.status().config


def on_v2_runner(llm: Any) -> Any:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    assert isinstance(worker_of(llm).model_runner, GPUModelRunner)
    return llm


#: tokens of a sample: enough for one step of each kind, and for a block of the cache that fills while decoding
SHORT, LONG = 5, 14


def sampled(llm: Any, temperature: float, batches: Any = ((1, 2), (7, 1), (32, 1)), length: int = SHORT) -> list[Sample]:
    start, samples = prompts_of(1, (40, 40))[0], []
    for size, times in batches:
        for turn in range(times):
            prompts = [start + prompt for prompt in prompts_of(size, (1, 40), seed=100 * size + turn)]
            samples += generate(llm, prompts, length, temperature)
    return samples


@pytest.mark.parametrize(
    ("cached", "chunked", "length"),
    [(True, True, SHORT), slow(True, True, LONG), slow(False, False, LONG), slow(False, True, LONG), slow(True, False, LONG)],
)
def test_every_log_prob_is_the_trainers(checkpoint: Any, engine: Any, cached: bool, chunked: bool, length: int) -> None:
    """In the four long engines 4,592 tokens, in batches of 1, 7 and 32 whose prompts have a beginning in common."""
    exact()
    job = split_prompts(checkpoint("qwen3"), cached, chunked)
    llm = on_v2_runner(engine(job))
    for temperature in (1.0, 0.7):
        samples = sampled(llm, temperature, length=length)
        assert_equal(job, samples, tokens=41 * length)


def test_neither_kernel_runs(checkpoint: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temperatures in one batch, one of them greedy; experts, whose choices V2 returns; a cache in FP8."""
    from vllm import SamplingParams
    from vllm.v1.worker.gpu.sample import gumbel, logprob

    config = exact(kv_cache="fp8")
    job = Job(model=checkpoint("qwen3_moe"), config=config)
    llm = on_v2_runner(engine(job))
    for module, kernel in ((logprob, "_topk_log_softmax_kernel"), (gumbel, "_temperature_kernel")):
        monkeypatch.setattr(module, kernel, None)
    temperatures, prompts = (0.0, 0.7, 1.0, 1.3), prompts_of(4, (5, 30))
    params = [SamplingParams(temperature=t, max_tokens=5, logprobs=2, ignore_eos=True, detokenize=False) for t in temperatures]
    for prompt, t, output in zip(
        prompts, temperatures, llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False), strict=True
    ):
        (found,) = output.outputs
        chosen = [entry[token].logprob for entry, token in zip(found.logprobs, found.token_ids, strict=True)]
        routes = torch.from_numpy(found.routed_experts.astype("int64"))
        sample = Sample(prompt, list(found.token_ids), chosen, routes, draw=Draw(temperature=t))
        difference, experts = scored_apart(job, [sample])
        assert difference.tokens == 5 and difference.bit_equal_fraction == 1.0
        assert experts is not None and experts.compared > 5 and experts.differ == 0


def test_without_the_patch_they_differ(checkpoint: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu.sample import logprob

    job = Job(model=checkpoint("qwen3"), config=exact())
    llm = on_v2_runner(engine(job))
    assert apart(job, sampled(llm, 1.0, [(7, 1)])).logp_abs_diff_max == 0
    with monkeypatch.context() as unpatched:
        unpatched.setattr(logprob, "compute_token_logprobs", logprob.compute_token_logprobs.__wrapped__)
        samples = sampled(llm, 1.0, [(7, 1)])
    found = apart(job, samples)
    assert 0 < found.logp_abs_diff_max < 1e-5


def test_a_sync_is_served(checkpoint: Any, engine: Any) -> None:
    path, other = checkpoint("qwen3"), checkpoint("qwen3", seed=1)
    config = exact()
    llm = on_v2_runner(engine(Job(model=path, config=config)))
    worker = worker_of(llm)
    sampled(llm, 1.0, [(7, 1)], length=4)
    items = stream(other, config, worker.jetrl_receiver.terms)
    with pytest.raises(jetrl_patch.SyncError):
        push(worker, items[:-1])
    with pytest.raises(jetrl_patch.SyncError, match="does not generate"):
        worker.execute_model(None)
    push(worker, items)
    assert llm.reset_prefix_cache()
    job = Job(model=other, config=config)
    assert apart(job, sampled(llm, 1.0, [(7, 1)], length=4)).logp_abs_diff_max == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("vocabulary", [1, 5, 1000, 1027, 32003])
def test_the_formulas_are_v1s_and_the_trainers(vocabulary: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu.sample import logprob, states

    exact()
    monkeypatch.setattr("jetrl_patch.exact.logprob.BLOCK_BYTES", 16 * 4 * vocabulary)  # blocks of 16 rows
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(37, vocabulary, generator=generator) * 5).to(dtype)
    tokens = torch.randint(0, vocabulary, (37, 3), generator=generator)
    slots = torch.randperm(40, generator=generator)[:37]
    temperatures = torch.tensor([0.0, 1.0, 0.7, 1.3, 0.01, 100.0, 0.3, 3.0]).repeat(5)
    divided = logits.float().clone()
    states.apply_temperature(divided, slots, temperatures)
    assert torch.equal(divided, Sampler.apply_temperature(logits.float().clone(), temperatures[slots], all_random=False))
    divisors = torch.where(temperatures == 0, 1.0, temperatures)[slots].unsqueeze(1)
    for processed, divisor in ((divided, divisors), (logits, 1.0)):
        found = logprob.compute_token_logprobs(processed, tokens)
        assert torch.equal(found, Sampler.compute_logprobs(processed.float()).gather(1, tokens))
        assert torch.equal(found[:, 0], token_log_probs(logits, tokens[:, 0], divisor))


@pytest.mark.parametrize(("variant", "length"), [("deepseek_v3-plain", SHORT), slow("deepseek_v3", LONG)])
def test_latent_attention(checkpoint: Any, engine: Any, variant: str, length: int) -> None:
    exact()
    job = split_prompts(checkpoint(variant), cached=True, chunked=True)
    assert_equal(job, sampled(on_v2_runner(engine(job)), 1.0, length=length), tokens=41 * length)


@pytest.mark.parametrize(("cached", "chunked"), [slow(False, False), (True, True)])
def test_gated_delta_nets(checkpoint: Any, engine: Any, cached: bool, chunked: bool) -> None:
    """Prompts share 400 tokens, more than two blocks of states."""
    most = {"max_num_batched_tokens": 200 if chunked else 4096, "max_num_seqs": 8}
    settings = {"enable_prefix_caching": cached, "enable_chunked_prefill": chunked, **most}
    job = Job(model=checkpoint("qwen3_next"), config=exact(), engine=tuple(settings.items()))
    samples, held = of_one_prefix(on_v2_runner(engine(job, 512)), shared=400)
    assert (held >= 100) is cached
    assert_equal(job, samples, tokens=96)


@pytest.mark.parametrize("length", [SHORT, slow(LONG)])
def test_requests_that_leave_out_tokens(checkpoint: Any, engine: Any, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some requests of a batch do, and vLLM's record keeps their tokens alone.

    The interpreter cannot run two kernels. vLLM's function in PyTorch stands for the one that selects tokens, and a few lines for
    the one that lists them.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
    from vllm.v1.worker.gpu.sample import sampler
    from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors

    def from_logits(logits: torch.Tensor, num_sampled: torch.Tensor, most: int) -> SamplingMaskTensors:
        kept = logits.isfinite() & (num_sampled > 0).unsqueeze(1)
        ids = kept.int().sort(dim=1, descending=True, stable=True).indices[:, :most].int()
        bits = torch.from_numpy(numpy.packbits(kept.numpy(), axis=1, bitorder="little"))  # read where equal logits are more
        return SamplingMaskTensors(ids, bits, kept.sum(1).int(), logits.shape[1])

    monkeypatch.setattr(sampler, "apply_top_k_top_p", apply_top_k_top_p_pytorch)
    monkeypatch.setattr(SamplingMaskTensors, "from_logits", staticmethod(from_logits))
    exact()
    job = Job(model=checkpoint("qwen3"), config=jetrl_patch.status().config)
    llm, samples = on_v2_runner(engine(job)), []
    batches = (1, 7, *[32] * (9 if length == LONG else 1))
    for turn, size in enumerate(batches):
        samples += generate(llm, prompts_of(size, (1, 40), seed=size + 100 * turn), length, MIXED)
    assert_equal(job, samples, tokens=4000 if length == LONG else 200)
    sizes = [0 if sample.support is None else int(sample.support.counts.max()) for sample in samples]
    assert 0 in sizes and max(sizes) > 20


@vision_models.needs_images
@pytest.mark.parametrize("family", ["qwen2_5_vl", slow("qwen3_vl"), slow("qwen3_vl_moe")])
def test_images(tmp_path: Path, engine: Any, family: str) -> None:
    exact()
    job = split_prompts(vision_models.save(tmp_path / "m", family), cached=True, chunked=True)
    llm, samples = on_v2_runner(engine(job, 256)), []
    for size in (1, 7, 32):
        prompts, pictures = vision_models.prompts(llm, size)
        samples += generate(llm, prompts, SHORT, 1.0, pictures)
    assert_equal(job, samples, tokens=170)


# ---- The V1 model runner, whose rejection sampler has Triton kernels too ---------------------------

def test_drafts_are_verified_by_vllms_own_kernels(checkpoint: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of n-grams, for which vLLM has V1 only. In the other tests of them functions stand in for the kernels."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    job = speculation.job_of(checkpoint("qwen3"))
    llm = engine(job)
    samples = speculation.generated(llm, job, batches=(6,), length=16)
    drafted, accepted = speculation.counted(llm)
    assert 0 < accepted < drafted
    assert_equal(job, samples, tokens=96)
