"""GRPO in one file and one process, without Ray or a trainer framework: sums in words, every token bit-equal.

``VLLM_ENABLE_V1_MULTIPROCESSING=0 python -m examples.own_loop [STEPS]``
"""

from __future__ import annotations

import os
import random
import sys
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine runs in this process

import jetrl_patch

jetrl_patch.enable(precision="fp8-unified")

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402

from examples.words import CHECKPOINT, task  # noqa: E402
from examples.words.reward import compute_score  # noqa: E402
from jetrl_patch import loop  # noqa: E402

PROMPTS, GROUP, LENGTH, TEMPERATURE, LEARNING_RATE, CLIP = 16, 8, 40, 1.0, 2e-4, 0.2


def pad(rows: list[list[float]], left: bool) -> torch.Tensor:
    """[B, T] from B lists of at most T numbers, with zeros on one side."""
    width = max(map(len, rows))
    return torch.tensor([[0] * (width - len(row)) + row if left else row + [0] * (width - len(row)) for row in rows])


class Rollout:
    """A vLLM engine, and the task's questions and rewards."""

    def __init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
        self.questions, _ = task.split()
        self.engine = LLM(
            model=str(CHECKPOINT), dtype="bfloat16", max_model_len=128, max_num_seqs=128, enforce_eager=True,
            skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 28, logprobs_mode="processed_logprobs",
        )  # fmt: skip

    def sample(self, seed: int) -> dict[str, torch.Tensor]:
        """``GROUP`` answers to each of ``PROMPTS`` questions: token ids, masks, log-probs and rewards, a row for each answer."""
        asked = random.Random(seed).sample(self.questions, PROMPTS)
        chats = [[{"role": "user", "content": question.text}] for question in asked]
        texts = [self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
        stop = self.tokenizer.eos_token_id
        params = SamplingParams(
            n=GROUP, temperature=TEMPERATURE, max_tokens=LENGTH, stop_token_ids=[stop], logprobs=0, seed=seed, detokenize=False
        )
        requests = [{"prompt_token_ids": self.tokenizer(text)["input_ids"]} for text in texts]
        prompts, responses, log_probs, rewards = [], [], [], []
        for question, output in zip(asked, self.engine.generate(requests, params, use_tqdm=False), strict=True):
            for answer in output.outputs:
                tokens = list(answer.token_ids)
                prompts.append(list(output.prompt_token_ids))
                responses.append(tokens)
                log_probs.append([entry[token].logprob for entry, token in zip(answer.logprobs, tokens, strict=True)])
                text = self.tokenizer.decode([token for token in tokens if token != stop])
                rewards.append(compute_score("words", text, str(question.answer)))
        seen = torch.cat((pad([[1] * len(row) for row in prompts], True), pad([[1] * len(row) for row in responses], False)), 1)
        return {
            "input_ids": torch.cat((pad(prompts, True), pad(responses, False)), 1),
            "attention_mask": seen,
            "mask": seen[:, -max(map(len, responses)) :].bool(),
            "log_probs": pad(log_probs, False),
            "rewards": torch.tensor(rewards),
        }


def train(steps: int) -> list[dict[str, float]]:
    """Train; print a line of figures for each step, and return them."""
    rollout = Rollout()
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.bfloat16)
    source = loop.convert(model)
    masters = [torch.nn.Parameter(weight.detach().float()) for weight in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE)
    found = []
    for step in range(steps):
        begin = time.perf_counter()
        sync = loop.send(source, model.state_dict(), rollout.engine)
        batch = rollout.sample(step)
        mask, rewards = batch["mask"], batch["rewards"].view(PROMPTS, GROUP)
        advantages = ((rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + 1e-6)).view(-1, 1)
        width = mask.shape[1]
        new = loop.log_probs(model, batch["input_ids"], batch["attention_mask"], TEMPERATURE, last=width)
        figures = loop.compare(new, batch["log_probs"], mask)  # raises AuditError if a token differs
        ratio = torch.exp(new - batch["log_probs"])
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        (-(gain * mask).sum() / mask.sum()).backward()
        for master, weight in zip(masters, model.parameters(), strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0, error_if_nonfinite=True)
        optimizer.step()
        with torch.no_grad():
            for master, weight in zip(masters, model.parameters(), strict=True):
                weight.copy_(master)
        found.append({**figures, **sync, "reward": float(rewards.mean()), "seconds": time.perf_counter() - begin})
        words = "step {:3}   reward {:.3f}   tokens {:5.0f}   bit-equal {:.1%}   {:.1f} s"
        equal, tokens = figures["jetrl/bit_equal_fraction"], figures["jetrl/tokens"]
        print(words.format(step, found[-1]["reward"], tokens, equal, found[-1]["seconds"]), flush=True)
    return found


if __name__ == "__main__":
    train(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
