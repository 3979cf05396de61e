"""Shared by tests of ``old_log_probs``: three configurations, and log-probs that are wrong by one ulp."""

from __future__ import annotations

import torch

from jetrl_patch.config import Config

STOP = Config(old_log_probs="rollout").resolved()
RECOMPUTE = Config(old_log_probs="recompute").resolved()
GO_ON = STOP.replace(on_mismatch="recompute")


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def one_ulp_off(values: torch.Tensor, row: int, position: int) -> torch.Tensor:
    changed = values.clone()
    changed.view(torch.int32)[row, position] += 1
    return changed
