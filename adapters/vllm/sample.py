"""This adapter's ``jetrl_patch.registry.Rollout``, and sampling with vLLM for ``jetrl parity``."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from jetrl_patch.adapters.vllm.arguments import argument_problems, check_kv_cache
from jetrl_patch.adapters.vllm.compat import routes_error
from jetrl_patch.adapters.vllm.orders import join
from jetrl_patch.adapters.vllm.parameters import parameter_problems
from jetrl_patch.errors import ConfigError, ModelError, explain
from jetrl_patch.exact.support import Support
from jetrl_patch.measure.parity import STOCK, Draw, Sample, Sampled
from jetrl_patch.measure.pictures import MOST_PICTURES, Picture, noise, place_pictures
from jetrl_patch.measure.prompts import make_prompts
from jetrl_patch.models.structure import expert_sizes, is_vision_language, placeholders
from jetrl_patch.progress import SILENT
from jetrl_patch.trainer.rules import LEAST_TEMPERATURE, REQUIRED_TEMPERATURE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from jetrl_patch.measure.parity import Job
    from jetrl_patch.progress import Progress

__all__ = [
    "argument_problems", "build_engine", "check_kv_cache", "generate", "install", "join", "parameter_problems",
    "routes_error", "sample",
]  # fmt: skip

#: the engine's share of a GPU's memory; the rest is for the trainer's weights and gradients, in the same process
SHARE = 0.4

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


def sample(job: Job, progress: Progress = SILENT) -> Sampled:
    """Build an engine in this process, sample batches until there are enough tokens, and shut it down.

    If the cost is measured, the clock starts after one discarded batch, which compiles and warms caches.
    """
    progress.stage("loading the engine")
    for draw in job.draws:
        check_draw(draw, job)
    hf_config = _config(job.model)
    text = hf_config.get_text_config()
    pictures = make_pictures(job.model) if is_vision_language(hf_config) else []
    room = MOST_PICTURES * max((picture.tokens + 2 for picture in pictures), default=0)
    longest = min(job.prompt_tokens, text.max_position_embeddings - job.length - room)
    if longest < 1:
        positions = text.max_position_embeddings
        raise ConfigError(f"--length {job.length} leaves no room for a prompt: the model has {positions} positions")
    prompts = make_prompts(
        job.prompts,
        _tokenizer(job.model),
        count=max(-(-job.tokens // job.length), job.batch),
        vocabulary=text.vocab_size,
        longest=longest,
        seed=job.seed,
    )
    limit = max(map(len, prompts)) + job.length + room
    shown: Sequence[Sequence[Picture]] = [()] * len(prompts)
    if pictures:
        if {*placeholders(hf_config)} & {token for ids in prompts for token in ids}:
            raise ConfigError("--prompts: images are added to the prompts. Remove the tokens that stand for images and videos.")
        prompts, shown = place_pictures(prompts, pictures, around(hf_config))
    engine = build_engine(job, limit)
    try:
        samples: list[Sample] = []
        if job.cost:
            progress.stage("warming up the engine")
            generate(engine, prompts[: job.batch], job.length, job.draws, shown)
        progress.stage("sampling", total := -(-job.tokens // (job.batch * job.length)), "batches")
        begin, count = time.perf_counter(), 0
        while count < job.tokens:
            batch = [(len(samples) + i) % len(prompts) for i in range(job.batch)]
            asked, seen = [prompts[i] for i in batch], [shown[i] for i in batch]
            turn = len(samples) % len(job.draws)
            samples += generate(engine, asked, job.length, (*job.draws[turn:], *job.draws[:turn]), seen, job.full)
            progress.done(min(len(samples) // job.batch, total))  # responses that end early take more
            count = sum(len(s.response) for s in samples)
        return Sampled(samples, count / (time.perf_counter() - begin) if job.cost else None, execution(engine))
    finally:
        engine.llm_engine.engine_core.shutdown()


def install(engine: Any, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Install the messages of a weight sync into a ``vllm.LLM`` with one rank in this process, and drop its cached prefixes."""
    from vllm.v1.engine.core_client import InprocClient

    from jetrl_patch.loop import receive

    ranks = engine.llm_engine.vllm_config.parallel_config.world_size
    if not isinstance(engine.llm_engine.engine_core, InprocClient) or ranks > 1:
        found = f"one with {ranks} ranks" if ranks > 1 else "one in a process of its own"
        fix = "set VLLM_ENABLE_V1_MULTIPROCESSING=0 before the engine is built, or use loop.messages and loop.receive"
        raise ConfigError(explain("loop.send()", required="an engine with one rank in this process", found=found, fix=fix))
    engine.collective_rpc(receive, args=(pairs,))
    engine.reset_prefix_cache()


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
        **({"max_logprobs": -1} if job.full else {}),
    }
    hf_config = _config(job.model)
    if is_vision_language(hf_config):
        image = {"count": MOST_PICTURES, "width": max(_SIDES), "height": max(_SIDES)}  # vLLM tries images of this size
        settings |= {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": image, "video": 0}}
    settings |= {"kv_cache_memory_bytes": 1 << 29} if current_platform.is_cpu() else {"gpu_memory_utilization": SHARE}
    stock = STOCK[job.stock].engine if job.stock else ()
    if not stock and expert_sizes(hf_config) is not None and routes_error() is None:
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


def check_draw(draw: Draw, job: Job) -> None:
    """Raise ConfigError for numbers that vLLM refuses, and for a stock engine that leaves out tokens."""
    limits = {
        "--temperature": (draw.temperature, draw.temperature >= LEAST_TEMPERATURE, REQUIRED_TEMPERATURE),
        "--top-k": (draw.top_k, draw.top_k >= 0, "0 (all tokens) or more"),
        "--top-p": (draw.top_p, 0 < draw.top_p <= 1, "more than 0 and at most 1"),
        "--min-p": (draw.min_p, 0 <= draw.min_p <= 1, "0 to 1"),
    }
    for name, (found, good, required) in limits.items():
        if not good:
            raise ConfigError(explain(name, required=required, found=found, fix="choose another one"))
    if draw.limited and job.stock is not None:
        required, fix = "requests that may draw all tokens", "drop --top-k, --top-p and --min-p"
        raise ConfigError(explain("--stock", required=required, found="others", fix=fix))


def generate(
    engine: Any, prompts: list[list[int]], length: int, draws: float | Sequence[Draw],
    pictures: Sequence[Sequence[Picture]] = (), full: bool = False,
) -> list[Sample]:  # fmt: skip
    """Generate responses of ``length`` tokens for all prompts at once.

    The prompts take the ``draws`` in turn; a number is a temperature. ``pictures`` are those of each prompt, see ``Sample``. A
    response ends early with a token that stands for an image or a video, because the trainer would look for its pixels. ``full``
    also returns the log-probs of the whole vocabulary.
    """
    from vllm import SamplingParams

    stops = placeholders(engine.model_config.hf_config)
    fixed: dict[str, Any] = {"max_tokens": length, "logprobs": 0, "ignore_eos": True, "detokenize": False}
    fixed |= {"logprobs": -1, "flat_logprobs": True} if full else {}
    draws = [Draw(temperature=draws)] if isinstance(draws, float) else draws
    taken = [draws[i % len(draws)] for i in range(len(prompts))]
    params = [SamplingParams(**asdict(draw), **fixed, stop_token_ids=stops) for draw in taken]
    pictures = pictures or [()] * len(prompts)
    asked: list[dict[str, Any]] = [{"prompt_token_ids": ids} for ids in prompts]
    for request, seen in zip(asked, pictures):
        if seen:
            request["multi_modal_data"] = {"image": [picture.image for picture in seen]}
    samples = []
    for output, seen, draw in zip(engine.generate(asked, params, use_tqdm=False), pictures, taken):
        prompt = list(output.prompt_token_ids)  # with all tokens of each image
        response = list(output.outputs[0].token_ids)
        every = every_of(output.outputs[0], engine.model_config.get_vocab_size()) if full else None
        if every is None:
            log_probs = [entry[token].logprob for entry, token in zip(output.outputs[0].logprobs, response)]
        else:
            log_probs = [row[token].item() for row, token in zip(every, response, strict=True)]
        routes = _routes(output.outputs[0], len(prompt) + len(response) - 1)
        samples.append(Sample(prompt, response, log_probs, routes, seen, draw, support_of(output.outputs[0], draw), every))
    return samples


def every_of(output: Any, vocabulary: int) -> torch.Tensor:
    """The log-probs of all tokens at each position, FP32 [response, V], of one ``CompletionOutput`` with flat log-probs."""
    flat = output.logprobs
    every = torch.full((len(output.token_ids), vocabulary), -float("inf"))
    for row, start, end in zip(every, flat.start_indices, flat.end_indices, strict=True):
        row[torch.tensor(flat.token_ids[start:end])] = torch.tensor(flat.logprobs[start:end], dtype=torch.float32)
    return every


def support_of(output: Any, draw: Draw) -> Support | None:
    """The tokens that those of one ``CompletionOutput`` were drawn from; None if from all.

    Raises ConfigError if the engine did not return them, AuditError if it returned those of other tokens.
    """
    if not draw.limited:
        return None
    masks = getattr(output, "sampling_mask", None)
    if masks is None:
        what, required = "top_k, top_p and min_p in a rollout", "an engine that returns the tokens that it draws from"
        fix = "set logprobs_mode='processed_logprobs'"
        raise ConfigError(explain(what, required=required, found="no sampling_mask", fix=fix))
    return Support.of(masks.token_ids).require(torch.tensor(output.token_ids), "vLLM's responses")


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

    return get_config(model, trust_remote_code=False)


# ---- Images --------------------------------------------------------------------------------------

#: number of images, fewer than prompts, so that prompts share some
_PICTURES = 11
#: their sides in pixels
_SIDES = (64, 96, 128)


def make_pictures(model: str) -> list[Picture]:
    """Random images, processed by the model's own processor. Raises ModelError if it does not load."""
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(model).image_processor
    except Exception as error:  # each library below transformers raises its own
        found, fix = f"{type(error).__name__}: {error}", "copy its files from the original model"
        raise ModelError(explain(f"--model {model}", required="the model's processor", found=found, fix=fix)) from error
    made = []
    for number in range(_PICTURES):
        image = noise(number, _SIDES[number % 3], _SIDES[number // 3 % 3])
        given = processor(images=[image], return_tensors="pt")
        grid = given["image_grid_thw"]
        made.append(Picture(image, given["pixel_values"], grid, int(grid.prod()) // processor.merge_size**2))
    return made


def around(hf_config: Any) -> list[int]:
    """The tokens before, in place of and after an image."""
    kind = "vision" if hasattr(hf_config, "vision_start_token_id") else "image"
    before, after = (getattr(hf_config, f"{kind}_{end}_token_id") for end in ("start", "end"))
    return [before, hf_config.image_token_id, after]


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
