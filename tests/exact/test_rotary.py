"""The trainer's rotary table: long enough without reading the positions, with unchanged values."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from jetrl_patch.exact import ops
from jetrl_patch.exact.modules import ExactRotary, longest_context

from ..waits import NothingIsReadBack


def rotary(**options):
    made = ExactRotary()
    made.config = LlamaConfig(hidden_size=64, num_attention_heads=2, max_position_embeddings=50, **options)
    return made


def expected(config, positions):
    cos, sin = ops.rotary_table(ops.rope_frequencies(config), int(positions.max()) + 1)
    return tuple(torch.cat((t, t), -1)[positions] for t in (cos, sin))


@pytest.mark.parametrize("positions", [torch.arange(50)[None], torch.arange(90)[None], torch.tensor([[200, 7]])], ids=len)
def test_any_position_has_its_value(positions):
    module = rotary()
    for _ in range(2):
        found = module.forward(torch.zeros(1), positions)
        assert all(torch.equal(a, b) for a, b in zip(found, expected(module.config, positions), strict=True))


def test_the_host_reads_no_position():
    module = rotary()
    module.forward(torch.zeros(1), torch.arange(50)[None])
    with NothingIsReadBack():
        module.forward(torch.zeros(1), torch.arange(49, -1, -1)[None])


def test_scaling_makes_the_context_longer_as_in_vllm():
    assert longest_context(rotary().config) == 50
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 50}
    assert longest_context(rotary(rope_parameters=yarn).config) == 200
    scaled = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}
    module = rotary(rope_parameters=scaled)
    assert longest_context(module.config) == 125
    with NothingIsReadBack():  # nor to build the table
        module.forward(torch.zeros(1), torch.tensor([[124]]))
