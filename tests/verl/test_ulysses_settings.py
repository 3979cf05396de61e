"""Ulysses in verl's configuration: what is accepted, and what its workers would reject late."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import jetrl_patch
from jetrl_patch.adapters.verl import settings, ulysses
from jetrl_patch.errors import ConfigError, ModelError
from jetrl_patch.exact.sequence_parallel import PACKED, packed_sdpa
from tests.fp8.thresholds import SQNR_ATTENTION, sqnr
from tests.models import build
from tests.verl.test_settings import BF16, EXACT, LINEAR, ROLLOUT

A, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
REFERENCE = f"{A}.use_kl_loss=True"
PADDED = "actor_rollout_ref.model.use_remove_padding"
SIZES = [f"{role}.{part}ulysses_sequence_parallel_size" for role in (A, REF) for part in ("", "fsdp_config.")]


@pytest.mark.parametrize("config", [EXACT, LINEAR, ROLLOUT, BF16])
def test_each_mode_takes_packed_sequences(base, config):
    settings.check(base(REFERENCE, *(f"{path}=2" for path in SIZES)), config)


@pytest.mark.parametrize("path", SIZES)
def test_what_verls_workers_would_reject_late(path):
    good = {path: 2, f"{A}.use_kl_loss": True, PADDED: True, "trainer.n_gpus_per_node": 2, "trainer.nnodes": 2}
    assert list(ulysses.problems(good.get)) == []
    (problem,) = ulysses.problems({**good, PADDED: False}.get)
    required = "required packed sequences, the only ones that verl slices"
    assert str(problem) == f"verl setting {path}=2: {required}, found {PADDED}=False. Set {PADDED}=True."
    (problem,) = ulysses.problems({**good, path: 3}.get)
    assert f"{path}=3: required a divisor of the number of ranks, found 4 ranks. Set it" in str(problem)


def test_a_size_for_both_models_is_one_problem():
    both = {**dict.fromkeys(SIZES, 2), "algorithm.use_kl_in_reward": True}
    assert len(list(ulysses.problems(both.get))) == 2  # padded, and on one rank


def test_the_settings_are_judged_where_verl_reads_them(base):
    with pytest.raises(ConfigError, match="required packed sequences"):
        settings.check(base(f"{SIZES[2]}=2", REFERENCE, f"{PADDED}=False"), EXACT)
    settings.check(base(f"{SIZES[2]}=2", f"{PADDED}=False"), EXACT)  # a run without a reference model
    with pytest.raises(ModelError, match="found 4 query and 2 key/value heads"):
        settings.check(base(f"{SIZES[0]}=8"), EXACT)


@pytest.mark.parametrize(
    ("heads", "shared", "fits"), [(4, 2, {2, 4}), (12, 3, {3, 6, 12}), (8, 8, {2, 4, 8}), (6, 1, {2, 3, 6})]
)
def test_heads_that_the_ranks_can_share(heads, shared, fits):
    hf_config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=shared, model_type="llama")
    hf_config.get_text_config = lambda: hf_config
    for size in range(2, 13):
        found = list(ulysses.model_problems({SIZES[0]: size}.get, hf_config))
        assert len(found) == (size not in fits) and all(isinstance(problem, ModelError) for problem in found)
        for problem in found:
            assert re.search(rf"={size}: required a divisor .*found {heads} query and {shared} key/value heads\. ", str(problem))


def engine_of(size: int) -> SimpleNamespace:
    return SimpleNamespace(ulysses_sequence_parallel_size=size, ulysses_parallel_group="a group")


def test_only_an_engine_that_cuts_sequences_changes_its_model():
    model = build("qwen3", attn_implementation="eager")
    ulysses.share(model, engine_of(1))
    assert model.config._attn_implementation == "eager"
    ulysses.share(model, engine_of(2))
    assert model.config._attn_implementation == PACKED
    exchanges = {id(m._jetrl_exchange) for m in model.modules() if hasattr(m, "_jetrl_exchange")}
    assert len(exchanges) == 1 and model.model.layers[2].self_attn._jetrl_exchange.size == 2


def test_verls_flash_attention_is_left_to_verl():
    model = build("qwen3")
    model.config._attn_implementation_internal = "flash_attention_2"
    ulysses.share(model, engine_of(2))
    assert model.config._attn_implementation == "flash_attention_2"
    assert not any(hasattr(m, "_jetrl_exchange") for m in model.modules())


@pytest.mark.parametrize("what", ["flex_attention", "a layer without it", "vision"])
def test_an_attention_that_would_see_slices_is_refused(what):
    model = build("qwen3", attn_implementation="sdpa")
    if what == "flex_attention":
        model.config._attn_implementation_internal = what
    elif what == "vision":
        model.config.vision_config = {}
    else:
        model.model.layers[1].self_attn = nn.Identity()
    with pytest.raises(ModelError, match=r"sequence parallelism of Qwen3ForCausalLM: required .*found .*\. Set"):
        ulysses.share(model, engine_of(2))
    assert not any(hasattr(m, "_jetrl_exchange") for m in model.modules())


def test_a_padded_batch_is_refused():
    jetrl_patch.enable(precision="bf16")
    model = build("qwen3", attn_implementation="sdpa")
    ulysses.share(model, engine_of(2))
    ids = torch.randint(2, 384, (2, 5))
    with pytest.raises(ModelError, match="required packed sequences, found a padded batch"):
        model(input_ids=ids, attention_mask=torch.tensor([[1] * 5, [0, 1, 1, 1, 1]]), use_cache=False)


def qkv(tokens: int):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, h, tokens, 64, generator=generator).to(torch.bfloat16) for h in (4, 2, 2)]


def test_packed_attention_against_fp64():
    q, k, v = qkv(30)
    positions = torch.cat([torch.arange(n) for n in (11, 1, 18)])[None]
    out, _ = packed_sdpa(nn.Identity(), q, k, v, None, position_ids=positions, use_cache=False, sliding_window=18)
    Q, K, V = (t.double().repeat_interleave(4 // t.shape[1], 1) for t in (q, k, v))
    sequence = torch.tensor([0] * 11 + [1] + [2] * 18)
    seen = (sequence[:, None] == sequence[None]) & torch.ones(30, 30, dtype=torch.bool).tril()
    scores = (Q @ K.transpose(-1, -2) * 64**-0.5).masked_fill(~seen, float("-inf"))
    assert sqnr(out, (scores.softmax(-1) @ V).transpose(1, 2)) > SQNR_ATTENTION


@pytest.mark.parametrize(
    ("more", "message"), [({"softcap": 50.0}, "without softcap"), ({"sliding_window": 17}, "a sequence has 18 tokens")]
)
def test_packed_attention_computes_plain_attention_only(more, message):
    with pytest.raises(ModelError, match=message):
        packed_sdpa(nn.Identity(), *qkv(18), None, position_ids=torch.arange(18)[None], **more)


def test_of_ranks_with_the_same_tokens_one_reports_a_bypassed_batch(monkeypatch):
    from jetrl_patch.adapters.verl import sync

    for first in (True, False):
        monkeypatch.setattr(sync.WORKER, "measured", ["sums"])
        found = sync._compared(SimpleNamespace(is_mp_src_rank_with_outputs=lambda first=first: first))
        assert found["bypass_mode"] == ["sums"] * first
        assert sync.WORKER.measured == []
