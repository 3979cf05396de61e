"""Ulysses in verl's configuration: what is accepted, and what its workers would reject late."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import jetrl_patch
from jetrl_patch.adapters.transformers.packed import PACKED, packed_sdpa
from jetrl_patch.adapters.verl import settings, ulysses
from jetrl_patch.errors import ConfigError, ModelError
from tests.fp8.thresholds import SQNR_ATTENTION, sqnr
from tests.models import build, config_of
from tests.verl.test_settings import BF16, EXACT, LINEAR, ROLLOUT, base

__all__ = ["base"]
A, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
REFERENCE = f"{A}.use_kl_loss=True"
PADDED = "actor_rollout_ref.model.use_remove_padding=False"
SIZES = [f"{role}.{part}ulysses_sequence_parallel_size" for role in (A, REF) for part in ("", "fsdp_config.")]


@pytest.mark.parametrize("config", [EXACT, LINEAR, ROLLOUT, BF16])
@pytest.mark.parametrize("path", SIZES)
def test_each_mode_takes_packed_sequences(base, path, config):
    settings.check(base(f"{path}=2", REFERENCE), config)


@pytest.mark.parametrize("path", SIZES)
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([PADDED], r"required packed sequences.*found .*use_remove_padding=False\. Set .*use_remove_padding=True"),
        (["trainer.n_gpus_per_node=3"], r"required a divisor of the number of ranks, found 3 ranks\. Set"),
    ],
)
def test_what_verls_workers_would_reject_late(base, path, overrides, message):
    name = path.replace(".", r"\.")
    with pytest.raises(ConfigError, match=rf"{name}=2: {message}"):
        settings.check(base(f"{path}=2", REFERENCE, *overrides), EXACT)


def test_a_reference_that_the_run_does_not_have_is_not_judged(base):
    settings.check(base(f"{SIZES[2]}=2", PADDED), EXACT)
    settings.check(base(PADDED), EXACT)


def test_heads_that_the_ranks_cannot_share(base, tmp_path):
    verl_config = base(f"{A}.ulysses_sequence_parallel_size=8")  # 4 heads
    with pytest.raises(
        ModelError, match=r"size=8: required a divisor of the query heads.*found 4 and 2 heads\. Choose"
    ):
        settings.check(verl_config, EXACT)
    settings.check(base(f"{A}.ulysses_sequence_parallel_size=4"), EXACT)  # each key/value head on two ranks
    config_of("qwen3", num_attention_heads=12, num_key_value_heads=3).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="found 12 and 3 heads"):
        settings.check(base(f"{A}.ulysses_sequence_parallel_size=4", f"actor_rollout_ref.model.path={tmp_path}"), EXACT)


def engine_of(size: int) -> SimpleNamespace:
    return SimpleNamespace(ulysses_sequence_parallel_size=size, ulysses_parallel_group="a group")


def test_only_an_engine_that_cuts_sequences_changes_its_model():
    model = build("qwen3", attn_implementation="eager")
    ulysses.share(model, engine_of(1))
    assert model.config._attn_implementation == "eager"
    ulysses.share(model, engine_of(2))
    assert model.config._attn_implementation == PACKED
    exchanges = {id(m.jetrl_exchange) for m in model.modules() if hasattr(m, "jetrl_exchange")}
    assert len(exchanges) == 1 and model.model.layers[2].self_attn.jetrl_exchange.size == 2


def test_verls_flash_attention_is_left_to_verl():
    model = build("qwen3")
    model.config._attn_implementation_internal = "flash_attention_2"
    ulysses.share(model, engine_of(2))
    assert model.config._attn_implementation == "flash_attention_2"
    assert not any(hasattr(m, "jetrl_exchange") for m in model.modules())


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
    assert not any(hasattr(m, "jetrl_exchange") for m in model.modules())


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
    ("more", "message"), [({"softcap": 50.0}, "found softcap"), ({"sliding_window": 17}, "a sequence of 18")]
)
def test_packed_attention_computes_plain_attention_only(more, message):
    with pytest.raises(ModelError, match=message):
        packed_sdpa(nn.Identity(), *qkv(18), None, position_ids=torch.arange(18)[None], **more)


def test_of_ranks_with_the_same_tokens_one_reports_a_bypassed_batch(monkeypatch):
    from jetrl_patch.adapters.verl import sync

    for first in (True, False):
        monkeypatch.setattr(sync.WORKER, "measured", ["sums"])
        assert (
            sync._measured(SimpleNamespace(is_mp_src_rank_with_outputs=lambda first=first: first)) == ["sums"] * first
        )
        assert sync.WORKER.measured == []
