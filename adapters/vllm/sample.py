"""This adapter's ``jetrl_patch.registry.Rollout``, and sampling with vLLM for ``jetrl parity``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from jetrl_patch.adapters.vllm.arguments import argument_problems, kv_cache_error
from jetrl_patch.adapters.vllm.compat import routes_error
from jetrl_patch.errors import ConfigError, ModelError, explain
from jetrl_patch.measure.parity import STOCK, Sample, Sampled, make_prompts
from jetrl_patch.models.structure import expert_sizes
from jetrl_patch.progress import SILENT
from jetrl_patch.trainer.rules import LEAST_TEMPERATURE, REQUIRED_TEMPERATURE

if TYPE_CHECKING:
    from jetrl_patch.measure.parity import Job
    from jetrl_patch.progress import Progress

__all__ = ["argument_problems", "build_engine", "generate", "kv_cache_error", "routes_error", "sample"]

#: the engine's share of a GPU's memory; the rest is for the trainer's weights and gradients, in the same process
SHARE = 0.4

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


def sample(job: Job, progress: Progress = SILENT) -> Sampled:
    """Build an engine in this process, sample batches until there are enough tokens, and shut it down.

    If the cost is measured, the clock starts after one discarded batch, which compiles and warms caches.
    """
    progress.stage("loading the engine")
    if job.temperature < LEAST_TEMPERATURE:
        fix = "choose a higher one"
        raise ConfigError(explain("--temperature", required=REQUIRED_TEMPERATURE, found=job.temperature, fix=fix))
    hf_config = _config(job.model)
    longest = min(job.prompt_tokens, hf_config.max_position_embeddings - job.length)
    if longest < 1:
        positions = hf_config.max_position_embeddings
        raise ConfigError(f"--length {job.length} leaves no room for a prompt: the model has {positions} positions")
    prompts = make_prompts(
        job.prompts,
        _tokenizer(job.model),
        count=max(-(-job.tokens // job.length), job.batch),
        vocabulary=hf_config.vocab_size,
        longest=longest,
        seed=job.seed,
    )
    engine = build_engine(job, max(map(len, prompts)) + job.length)
    try:
        samples: list[Sample] = []
        if job.cost:
            progress.stage("warming up the engine")
            generate(engine, prompts[: job.batch], job.length, job.temperature)
        progress.stage("sampling", -(-job.tokens // (job.batch * job.length)), "batches")
        begin, count = time.perf_counter(), 0
        while count < job.tokens:
            batch = [prompts[(len(samples) + i) % len(prompts)] for i in range(job.batch)]
            samples += generate(engine, batch, job.length, job.temperature)
            progress.done(len(samples) // job.batch)
            count = sum(len(s.response) for s in samples)
        return Sampled(samples, count / (time.perf_counter() - begin) if job.cost else None, execution(engine))
    finally:
        engine.llm_engine.engine_core.shutdown()


def build_engine(job: Job, max_model_len: int) -> Any:
    """Build a ``vllm.LLM`` that takes and returns token ids."""
    from vllm import LLM
    from vllm.platforms import current_platform

    settings: dict[str, Any] = {
        "model": job.model,
        "skip_tokenizer_init": True,
        "dtype": job.config.compute_dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": max(job.batch, 2),
        "tensor_parallel_size": job.tp,
        # timed runs execute as in training: a stock engine compiles, and the plugin turns compilation off if a mode needs that
        "enforce_eager": job.stock is None and not job.cost,
        "seed": job.seed,
        # log-probs after temperature, which the trainer applies too
        "logprobs_mode": "processed_logprobs",
    }
    settings |= {"kv_cache_memory_bytes": 1 << 29} if current_platform.is_cpu() else {"gpu_memory_utilization": SHARE}
    stock = STOCK[job.stock].engine if job.stock else ()
    if not stock and expert_sizes(_config(job.model)) is not None and routes_error() is None:
        settings["enable_return_routed_experts"] = True
    settings.update(stock)
    settings.update(job.engine)
    return LLM(**settings)


def execution(engine: Any) -> str:
    """How an engine runs its model: "compiled", "graphs" (CUDA graphs without a compiler) or "eager"."""
    chosen = engine.llm_engine.vllm_config.compilation_config
    if chosen.mode:
        return "compiled"
    return "graphs" if chosen.cudagraph_mode else "eager"


def generate(engine: Any, prompts: list[list[int]], length: int, temperature: float) -> list[Sample]:
    """Generate responses of ``length`` tokens for all prompts at once."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=temperature, max_tokens=length, logprobs=0, ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    samples = []
    for prompt, output in zip(prompts, outputs):
        response = list(output.outputs[0].token_ids)
        log_probs = [entry[token].logprob for entry, token in zip(output.outputs[0].logprobs, response)]
        samples.append(Sample(prompt, response, log_probs, _routes(output.outputs[0], len(prompt) + len(response) - 1)))
    return samples


def _routes(output: Any, tokens: int) -> torch.Tensor | None:
    """Return the experts [tokens, layers, k] of one request; None if the engine was not asked for them."""
    found = output.routed_experts
    if found is None:
        return None
    if len(found) != tokens:
        fix = "pass --engine '{\"enable_return_routed_experts\": false}'"
        raise ModelError(explain("vLLM's routed experts", required=f"{tokens} tokens", found=str(len(found)), fix=fix))
    return torch.from_numpy(found.astype("int64"))


def _config(model: str) -> Any:
    from vllm.transformers_utils.config import get_config

    return get_config(model, trust_remote_code=False).get_text_config()


def _tokenizer(model: str) -> Any:
    """Return a function from text to token ids, or None if the directory has no tokenizer that loads."""
    from vllm.tokenizers import get_tokenizer

    if not any((Path(model) / file).is_file() for file in _TOKENIZER_FILES):
        return None  # transformers would create an empty one
    try:
        tokenizer = get_tokenizer(model)
    except Exception:  # each tokenizer library raises its own errors. Without a tokenizer, prompts are random
        return None
    return lambda text: list(tokenizer.encode(text))
