"""The trainer: a Hugging Face model prepared by the plugin, FP32 master weights, AdamW."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jetrl_patch import loop

if TYPE_CHECKING:
    from examples.stability.rollout import Sample


class Policy:
    """BF16 compute weights with FP32 master weights; the learning rate warms up over ten updates.

    Args:
        path: the model to start from.
        micro_batch: responses per forward pass.
        temperature: divides the logits.
    """

    def __init__(self, path: str, learning_rate: float, micro_batch: int = 64, temperature: float = 1.0) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        self.source = loop.convert(self.model)
        self.micro_batch, self.temperature = micro_batch, temperature
        self.parameters = list(self.model.parameters())
        self.masters = [torch.nn.Parameter(p.detach().float().clone()) for p in self.parameters]
        self.optimizer = torch.optim.AdamW(self.masters, lr=learning_rate)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 10))

    def weights(self) -> dict[str, Tensor]:
        return dict(self.model.state_dict())

    def save(self, path: Path) -> None:
        """Write the masters and the state of the optimizer to ``path``, which is replaced at once."""
        unfinished = path.with_name(f".{path.name}.unfinished")
        state = {"masters": self.masters, "optimizer": self.optimizer.state_dict(), "schedule": self.schedule.state_dict()}
        torch.save(state, unfinished)
        unfinished.replace(path)

    def load(self, path: Path) -> None:
        """Go on from what ``save`` wrote."""
        state = torch.load(path, weights_only=True)
        with torch.no_grad():
            for master, saved in zip(self.masters, state["masters"], strict=True):
                master.copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self._install()

    def export(self, folder: Path, tokenizer: Any) -> None:
        """Write the compute weights and the tokenizer to ``folder``, as a Hugging Face checkpoint that appears there at once."""
        unfinished = folder.with_name(f".{folder.name}.unfinished")
        self.model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)

    @torch.no_grad()
    def _install(self) -> None:
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            parameter.copy_(master)

    def log_probs(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        """FP32 log-probs of the response tokens, padded to [B, T], and the mask."""
        width = max(len(s.prompt) + len(s.response) for s in samples)
        longest = max(len(s.response) for s in samples)
        ids, seen = (
            torch.zeros(len(samples), width, dtype=torch.long),
            torch.zeros(len(samples), width, dtype=torch.long),
        )
        for row, s in enumerate(samples):
            tokens = [*s.prompt, *s.response]
            ids[row, : len(tokens)], seen[row, : len(tokens)] = torch.tensor(tokens), 1
        starts = torch.tensor([len(s.prompt) - 1 for s in samples])
        first = int(starts.min())  # no prompt's logits, which are most of a large vocabulary's cost
        everywhere = loop.log_probs(self.model, ids, seen, self.temperature, last=width - first - 1)
        mask = torch.arange(longest) < torch.tensor([len(s.response) for s in samples])[:, None]
        places = (starts[:, None] - first + torch.arange(longest)).clamp(max=width - 2 - first)
        return everywhere.gather(1, places) * mask, mask

    @torch.no_grad()
    def score(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor]:
        """(π_old, μ, mask), each [B, T]."""
        longest = max(len(s.response) for s in samples)
        found = torch.zeros(len(samples), longest)
        kept = torch.zeros(len(samples), longest, dtype=torch.bool)
        rollout = torch.zeros(len(samples), longest)
        for start in range(0, len(samples), self.micro_batch):
            part = samples[start : start + self.micro_batch]
            log_probs, mask = self.log_probs(part)
            found[start : start + len(part), : mask.shape[1]] = log_probs
            kept[start : start + len(part), : mask.shape[1]] = mask
        for row, s in enumerate(samples):
            rollout[row, : len(s.response)] = torch.tensor(s.log_probs)
        return found, rollout, kept

    def step(self, samples: Sequence[Sample], loss: Callable[[Tensor, slice], Tensor]) -> float:
        """Take one optimizer step on these samples; return the gradient norm before clipping at 1.

        Args:
            loss: (log π_θ [B, T], rows of the samples) -> the micro-batch's contribution to the loss, a scalar.
        """
        for start in range(0, len(samples), self.micro_batch):
            rows = slice(start, min(start + self.micro_batch, len(samples)))
            log_probs, _ = self.log_probs(samples[rows])
            loss(log_probs, rows).backward()
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        norm = float(torch.nn.utils.clip_grad_norm_(self.masters, 1.0, error_if_nonfinite=True))
        self.optimizer.step()
        self.schedule.step()
        self._install()
        return norm
