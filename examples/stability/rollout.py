"""The rollout: a real vLLM engine in this process, fed by the plugin's weight sync."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jetrl_patch import loop


@dataclass(frozen=True)
class Sample:
    """Prompt and response as token ids, and the rollout log-probs of the response."""

    prompt: list[int]
    response: list[int]
    log_probs: list[float]


class Rollout:
    """A vLLM engine for one checkpoint.

    Args:
        model: path of the checkpoint.
        seed: the engine's seed.
        length: the most tokens of a prompt and its answer.
    """

    def __init__(self, model: str, seed: int, length: int = 128) -> None:
        from vllm import LLM

        self.engine = LLM(
            model=model, seed=seed, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=length, max_num_seqs=256,
            enforce_eager=True, enable_prefix_caching=False, kv_cache_memory_bytes=1 << 28,
            logprobs_mode="processed_logprobs",
        )  # fmt: skip

    def sync(self, source: loop.Source, weights: dict[str, Tensor], bits: int | None = None) -> None:
        """Send the trainer's weights, rounded to ``bits`` bits if given. Raises SyncError if the sync is incomplete."""
        loop.send(source, {name: _rounded(name, weight, bits) for name, weight in weights.items()}, self.engine)

    def sample(
        self, prompts: Sequence[list[int]], n: int, tokens: int, stop: int, temperature: float, seed: int
    ) -> list[Sample]:
        """``n`` responses to each prompt, adjacent to one another; greedy at temperature 0."""
        from vllm import SamplingParams

        wanted = SamplingParams(
            n=n,
            temperature=temperature,
            max_tokens=tokens,
            stop_token_ids=[stop],
            logprobs=0,
            seed=seed,
            detokenize=False,
        )
        found = self.engine.generate([{"prompt_token_ids": ids} for ids in prompts], wanted, use_tqdm=False)
        return [
            Sample(ids, list(o.token_ids), [e[t].logprob for e, t in zip(o.logprobs, o.token_ids, strict=True)])
            for ids, answer in zip(prompts, found, strict=True)
            for o in answer.outputs
        ]


def _rounded(name: str, weight: Tensor, bits: int | None) -> Tensor:
    """Round a linear of the blocks to ``bits`` bits with one scale per row, back in BF16; other weights stay as they are."""
    if bits is None or ".layers." not in name or not name.endswith("_proj.weight"):
        return weight
    top = 2 ** (bits - 1) - 1
    scale = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-10) / top
    return ((weight.float() / scale).round().clamp(-top, top) * scale).to(torch.bfloat16)
