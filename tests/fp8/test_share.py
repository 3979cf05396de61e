"""How much of a model is FP8: counted on the meta device, and said when a run starts."""

from __future__ import annotations

import pytest
import torch

from jetrl_patch.config import Config
from jetrl_patch.fp8.convert import select_layers, share_of
from jetrl_patch.trainer.preflight import say_share

from ..models import config_of


def on_meta(family, **options):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(family, **options))


def test_a_model_of_thirty_billion_parameters():
    """The shape of Qwen3-30B-A3B. Its lm_head, which stays in BF16, is a tenth of what a token computes."""
    model = on_meta(
        "qwen3_moe", vocab_size=151936, hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=48, head_dim=128,
        num_attention_heads=32, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8,
    )  # fmt: skip
    share = share_of(model, select_layers(model))
    assert share.parameters > 0.95 and share.inside > 0.95
    attention, experts, router = 2 * 2048 * 4096 + 2 * 2048 * 512, 3 * 2048 * 768, 128 * 2048
    head, norms = 151936 * 2048, 48 * (2 * 2048 + 2 * 128) + 2048
    fp8, all_fp8 = 48 * (attention + 8 * experts), 48 * (attention + 128 * experts)
    assert share.flops == pytest.approx(fp8 / (fp8 + 48 * router + head))
    assert share.inside == pytest.approx(fp8 / (fp8 + 48 * router))
    assert share.parameters == pytest.approx(all_fp8 / (all_fp8 + 48 * router + 2 * head + norms))


def test_excluded_layers_and_tied_embeddings_are_not_counted():
    model = on_meta("qwen3", tie_word_embeddings=True)
    whole, part = (share_of(model, select_layers(model, exclude)) for exclude in ((), ("mlp",)))
    attention, mlp, head = 256 * (256 + 2 * 128 + 256), 3 * 256 * 512, 384 * 256
    assert whole.inside == 1 and whole.flops == pytest.approx(3 * (attention + mlp) / (3 * (attention + mlp) + head))
    assert part.inside == pytest.approx(attention / (attention + mlp))
    assert whole.parameters == pytest.approx(3 * (attention + mlp) / sum(p.numel() for p in model.parameters()))


def test_a_run_says_it_once_at_its_start(tmp_path, caplog):
    config_of("glm4_moe", num_hidden_layers=2).save_pretrained(tmp_path)
    caplog.set_level("INFO", "jetrl_patch.trainer.preflight")
    for config in (Config(precision="int8-rollout"), Config(precision="bf16")):
        say_share(tmp_path, config.resolved(), 1)
    say_share("somebody/remote", Config(precision="fp8-unified").resolved(), 1)
    assert not caplog.records
    for _ in range(2):  # the trainer loop repeats the driver's checks
        say_share(tmp_path, Config(precision="fp8-unified").resolved(), 1)
    (line,) = caplog.messages
    assert line.startswith("jetrl_patch: FP8: ") and line.endswith("without lm_head)")
