"""This adapter's ``Trainer`` (jetrl_patch/registry.py) and ``Merger``."""

from jetrl_patch.adapters.verl.checkpoint import merge
from jetrl_patch.adapters.verl.doctor import layout, model_path, needs, needs_flash_attn, read
from jetrl_patch.adapters.verl.model import prepare
from jetrl_patch.adapters.verl.preset import config_of as asked_for
from jetrl_patch.adapters.verl.settings import TRAINERS as programs
from jetrl_patch.adapters.verl.settings import chosen, complete, problems, program_problem

__all__ = [
    "asked_for", "chosen", "complete", "layout", "merge", "model_path", "needs", "needs_flash_attn", "prepare", "problems",
    "program_problem", "programs", "read",
]  # fmt: skip
