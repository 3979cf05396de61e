"""Make the example's checkpoint: a small Qwen3, trained by cross-entropy to imitate both authors of ``task.py``.

Start it with ``python -m examples.words.warm_start``. It takes a few minutes of plain PyTorch on one CPU thread. The same seed
on the same machine gives the same bytes. Another processor may add floating-point numbers in another order and round differently.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.common.task import Question
from examples.words import CHECKPOINT, task
from examples.words.reward import compute_score
from examples.words.tokenizer import build_tokenizer

IGNORE = -100
# share of the careful author's answers: high while the model learns arithmetic, low at the end, where guessing should dominate
WORKED_SHARE_EARLY, WORKED_SHARE_LATE, LATE = 0.6, 0.25, 0.7


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A freshly initialized FP32 model: 4 layers, hidden size 256, head_dim 64, 2 KV heads, 2.4 million parameters."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        initializer_range=0.05,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        use_sliding_window=False,
    )
    return Qwen3ForCausalLM(config)


def prompt_ids(tokenizer: PreTrainedTokenizerFast, question: Question) -> list[int]:
    """The chat prompt of one question as token ids, as verl builds it."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question.text}], add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer(text)["input_ids"])


def batch(
    tokenizer: PreTrainedTokenizerFast,
    prompts: dict[task.Question, list[int]],
    size: int,
    worked_share: float,
    rng: random.Random,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(ids, labels)``, both int64 [size, longest], padded on the right; labels are IGNORE outside the response."""
    rows = []
    for question in rng.sample(list(prompts), size):
        author = task.worked_answer if rng.random() < worked_share else task.guessed_answer
        rows.append((prompts[question], author(question, rng)))
    return padded(tokenizer, rows)


def padded(tokenizer: PreTrainedTokenizerFast, rows: Sequence[tuple[list[int], str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """``(ids, labels)`` of prompts and their answers, both int64 [rows, longest]; labels are IGNORE outside the answers."""
    answered = [(prompt, [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]) for prompt, answer in rows]
    longest = max(len(p) + len(r) for p, r in answered)
    ids = torch.full((len(rows), longest), tokenizer.pad_token_id)
    labels = torch.full((len(rows), longest), IGNORE)
    for i, (p, r) in enumerate(answered):
        ids[i, : len(p) + len(r)] = torch.tensor(p + r)
        labels[i, len(p) : len(p) + len(r)] = torch.tensor(r)
    return ids, labels


@torch.no_grad()
def accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    questions: Sequence[Question],
    temperature: float,
    seed: int = 0,
    max_new_tokens: int = 40,
    score: Callable[[str, str, str], float] = compute_score,
) -> float:
    """The mean score of the answers to the questions; temperature 0 is greedy."""
    generator = torch.Generator().manual_seed(seed)
    rows = [prompt_ids(tokenizer, q) for q in questions]
    width = max(map(len, rows))
    ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(r)) + r for r in rows])
    mask = torch.tensor([[0] * (width - len(r)) + [1] * len(r) for r in rows])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    done = torch.zeros(len(rows), dtype=torch.bool)
    responses: list[list[int]] = [[] for _ in rows]
    cache = None
    step_ids, step_positions = ids, positions
    for _ in range(max_new_tokens):
        out = model(
            input_ids=step_ids, attention_mask=mask, position_ids=step_positions, past_key_values=cache, use_cache=True
        )
        cache = out.past_key_values
        logits = out.logits[:, -1].float()
        if temperature:
            chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
        else:
            chosen = logits.argmax(-1)
        for i, token in enumerate(chosen.tolist()):
            if not done[i] and token != tokenizer.eos_token_id:
                responses[i].append(token)
        done |= chosen == tokenizer.eos_token_id
        if done.all():
            break
        step_ids, step_positions = chosen[:, None], step_positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    texts = [tokenizer.decode(r, skip_special_tokens=True) for r in responses]
    return sum(score("", text, str(q.answer)) for text, q in zip(texts, questions, strict=True)) / len(questions)


def train(steps: int, batch_size: int, lr: float, seed: int, report_every: int = 100) -> Qwen3ForCausalLM:
    """Minimize cross-entropy on the response tokens; AdamW with a linear warm-up and a linear decay to zero.

    Prints the held-out accuracy every ``report_every`` steps; never if that is 0.
    """
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed)
    questions, held_out = task.split()
    prompts = {q: prompt_ids(tokenizer, q) for q in questions}
    rng = random.Random(seed)

    def examples(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        worked_share = WORKED_SHARE_EARLY if step <= LATE * steps else WORKED_SHARE_LATE
        return batch(tokenizer, prompts, batch_size, worked_share, rng)

    started = time.perf_counter()

    def report(step: int, loss: float) -> None:
        if report_every and (step % report_every == 0 or step == steps):
            greedy = accuracy(model, tokenizer, held_out[:128], 0.0)
            sampled = accuracy(model, tokenizer, held_out[:128], 1.0)
            print(
                f"step {step:4d}  loss {loss:.3f}  held-out greedy {greedy:.2f}  sampled {sampled:.2f}"
                f"  {time.perf_counter() - started:.0f} s",
                flush=True,
            )

    fit(model, examples, steps, lr, report)
    return model


def fit(
    model: PreTrainedModel,
    examples: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    steps: int,
    lr: float,
    report: Callable[[int, float], None],
) -> None:
    """Train on ``examples(step)``, ids and labels, for steps 1 to ``steps``. ``report`` receives each step and its loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    warm_up = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warm_up, max(0.0, (steps - i) / (steps - warm_up)))
    )
    for step in range(1, steps + 1):
        ids, labels = examples(step)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        report(step, loss.item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=CHECKPOINT)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(1)  # for reproducibility: the number of threads decides how sums are split
    tokenizer = build_tokenizer()
    model = train(args.steps, args.batch_size, args.lr, args.seed).to(torch.bfloat16)
    _, held_out = task.split()
    greedy, sampled = (accuracy(model, tokenizer, held_out, t) for t in (0.0, 1.0))
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id).save_pretrained(args.out)
    record = {k: v for k, v in vars(args).items() if k != "out"} | {"greedy": greedy, "sampled": sampled}
    (args.out / "warm_start.json").write_text(json.dumps(record, indent=2) + "\n")
    print(f"{args.out}: held-out accuracy greedy {greedy:.3f}, sampled at temperature 1 {sampled:.3f}")


if __name__ == "__main__":
    main()
