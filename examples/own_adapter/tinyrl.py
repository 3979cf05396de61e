"""A training framework in place of yours: policy gradients in one process. It knows nothing of jetrl_patch.

``VLLM_ENABLE_V1_MULTIPROCESSING=0 python -m tinyrl MODEL STEPS``
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

PROMPTS, SAMPLES, PROMPT_LENGTH, LENGTH, TEMPERATURE = 8, 4, 12, 32, 0.8


class Trainer:
    """Learns to prefer small token ids."""

    def __init__(self, path: str) -> None:
        self.model = self.load_model(path)
        self.engine = LLM(
            path, dtype="bfloat16", enforce_eager=True, skip_tokenizer_init=True, logprobs_mode="processed_logprobs",
            kv_cache_memory_bytes=1 << 28, max_model_len=64, max_num_seqs=PROMPTS * SAMPLES,
        )  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def load_model(self, path: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)

    def sync(self) -> None:
        """Send the weights to the engine."""
        weights = list(self.model.state_dict().items())
        self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        self.engine.reset_prefix_cache()

    def sample(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids of prompts and responses [B, T], and the engine's log-probs of the responses [B, LENGTH]."""
        draw, vocabulary = random.Random(seed), self.model.config.vocab_size
        prompts = [[draw.randrange(vocabulary) for _ in range(PROMPT_LENGTH)] for _ in range(PROMPTS)]
        params = SamplingParams(
            n=SAMPLES, temperature=TEMPERATURE, max_tokens=LENGTH, ignore_eos=True, logprobs=0, seed=seed, detokenize=False
        )
        outputs = self.engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        answers = [(list(out.prompt_token_ids), answer) for out in outputs for answer in out.outputs]
        tokens = [prompt + list(answer.token_ids) for prompt, answer in answers]
        rollout = [[row[token].logprob for row, token in zip(a.logprobs, a.token_ids, strict=True)] for _, a in answers]
        return torch.tensor(tokens), torch.tensor(rollout)

    def log_probs(self, tokens: torch.Tensor) -> torch.Tensor:
        """The policy's log-probs of the responses [B, LENGTH]."""
        logits = self.model(input_ids=tokens, use_cache=False, logits_to_keep=LENGTH + 1).logits[:, :-1].float()
        return (logits / TEMPERATURE).log_softmax(-1).gather(-1, tokens[:, -LENGTH:, None]).squeeze(-1)

    def loss(self, new: torch.Tensor, old: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
        advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-6))[:, None]
        return -(torch.exp(new - old) * advantages).mean()

    def step(self, number: int) -> dict[str, float]:
        self.sync()
        tokens, old = self.sample(number)
        rewards = -tokens[:, -LENGTH:].float().mean(1)
        new = self.log_probs(tokens)
        self.loss(new, old, rewards).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"reward": float(rewards.mean()), "difference": float((new - old).detach().abs().max()), "tokens": old.numel()}


if __name__ == "__main__":
    from tinyrl import Trainer  # the module that other packages see, not __main__

    trainer = Trainer(sys.argv[1])
    for number in range(int(sys.argv[2])):
        print({"step": number, **trainer.step(number)}, flush=True)
