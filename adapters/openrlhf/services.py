"""This adapter's ``Trainer`` (jetrl_patch/registry.py)."""

from jetrl_patch.adapters.openrlhf.doctor import asked_for, model_path, needs, needs_flash_attn, programs, read
from jetrl_patch.adapters.openrlhf.model import prepare
from jetrl_patch.adapters.openrlhf.settings import chosen, complete, problems, program_problem

__all__ = [
    "asked_for", "chosen", "complete", "model_path", "needs", "needs_flash_attn", "prepare", "problems",
    "program_problem", "programs", "read",
]  # fmt: skip
