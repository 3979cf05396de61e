"""Values on a framework's own objects."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from jetrl_patch.patching.attached import Attached

KEPT: Attached[Any] = Attached("_jetrl_kept", "tests have no other way")


def test_a_value_is_kept_and_a_module_registers_nothing() -> None:
    holder = nn.Linear(2, 3)
    assert KEPT.get(holder) is None
    for value in (nn.Linear(4, 5), nn.Parameter(torch.ones(2)), 7):
        KEPT.set(holder, value)
        assert KEPT.get(holder) is value
    assert [name for name, _ in holder.named_parameters()] == ["weight", "bias"] and not list(holder.children())
    assert repr(KEPT) == "Attached('_jetrl_kept': tests have no other way)"


def test_tensors_hold_values_too() -> None:
    tensor = torch.ones(2)
    KEPT.set(tensor, "mine")
    assert KEPT.get(tensor) == "mine" and KEPT.get(tensor.clone()) is None
