"""verl's Megatron engine with TransformerEngine's layers, with a stand-in for Megatron: what it sends, and where it stops."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jetrl_patch.adapters.verl import megatron_model
from jetrl_patch.config import Config
from jetrl_patch.sync.send import SyncStats
from tests.fp8 import te_fakes as te
from tests.models import build

ROOT = Path(__file__).resolve().parents[2]
LINEAR = Config(align="linear", backend="te")


def engine(scale_format: str, wrong: str = "nothing") -> tuple[str, str]:
    """Run ``megatron_script``; return the first word of its last line, and the rest."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("JETRL_", "NVTE_", "COV"))}
    done = subprocess.run(
        [sys.executable, "-m", "tests.verl.megatron_script", scale_format, wrong],
        cwd=ROOT, env={**environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FACTS ", "ERROR "))]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    word, _, text = lines[-1].partition(" ")
    return word, text


@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
def test_the_stream_is_what_transformer_engine_computes_with(monkeypatch, scale_format):
    """With FP32 scales the plugin's own quantizer gives other bytes, so it cannot replace TransformerEngine's."""
    te.install(monkeypatch)
    hf = build("llama", head_dim=128, tie_word_embeddings=True)
    source = megatron_model.announce(hf.config, LINEAR.replace(scale_format=scale_format), "te")
    weights = {name: tensor.contiguous() for name, tensor in hf.state_dict().items()}
    sent = dict(source.stream(iter(weights.items()), SyncStats()))
    assert "lm_head.weight" in weights and "lm_head.weight" not in sent
    assert len(source.layers) == 21
    for layer in source.layers:
        theirs = te.quantized(weights[f"{layer}.weight"], scale_format == "pow2").parts
        q, s = sent[f"{layer}.weight"], sent[f"{layer}.weight_scale_inv"]
        assert torch.equal(q.view(torch.uint8), theirs["rowwise_data"])
        assert torch.equal(s, theirs["rowwise_scale_inv"][:, : s.shape[1]])


@pytest.mark.parametrize(
    ("scale_format", "variable"), [pytest.param("pow2", "0", marks=pytest.mark.slow), ("fp32", "1")]
)
def test_verls_engine_sends_what_transformer_engine_computes_with(scale_format, variable):
    word, text = engine(scale_format)
    assert word == "FACTS", text
    facts = json.loads(text)
    terms = {"precision": "fp8-unified", "align": "linear", "scale_format": scale_format, "backend": "te"}
    assert {key: facts["terms"][key] for key in terms} == terms
    assert facts["layers"] == facts["equal"] == 21 and facts["rest"] and facts["complete"] and facts["lm_head"]
    assert facts["untouched"] and facts["peft"] is None and facts["stats"] == [21, True]
    assert facts["backend"] == "te" and facts["scales"] == variable and facts["scales_after"] is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ("recipe", "ModelError: TransformerEngine in Megatron's layers: .*found MXFP8BlockScaling"),
        ("settings", "ModelError: the TransformerConfig of Megatron's model: .*found .*'fp8': False"),
        ("plain", "ModelError: layers of Module: .*found 11, and 1 other layers with matrices .*linear_fc2"),
        ("short", "ModelError: Megatron's model: required 3 transformer blocks, found 2"),
        ("heads", "ModelError: the model with Megatron: .*head_dim=64"),
        ("nan", r"SyncError: .*up_proj.* holds NaN"),
    ],
)
def test_verls_engine_stops_before_the_rollout_gets_anything_else(wrong, match):
    word, text = engine("pow2", wrong)
    assert word == "ERROR" and re.search(match, text), text


@pytest.mark.slow
def test_tied_weights_and_critics():
    word, text = engine("pow2", "tied")
    assert word == "FACTS" and json.loads(text)["complete"] and not json.loads(text)["lm_head"], text
    assert engine("pow2", "critic") == ("FACTS", '{"converted": false}')


@pytest.mark.slow
def test_a_stage_of_a_pipeline_sends_the_whole_model():
    """Two of three blocks are on this rank, in two chunks. The export adds the third."""
    word, text = engine("pow2", "stages")
    assert word == "FACTS", text
    facts = json.loads(text)
    assert facts["layers"] == facts["equal"] == 21 and facts["complete"] and facts["untouched"]


def test_sharded_masters_are_sent_as_the_forward_pass_rounds_them():
    """Megatron-Bridge exports Megatron-FSDP's FP32 masters; the layers compute with BF16 copies of them."""
    word, text = engine("pow2", "sharded")
    assert word == "FACTS", text
    facts = json.loads(text)
    assert facts["layers"] == facts["equal"] == 21 and facts["rest"] and facts["complete"] and facts["untouched"]


def test_the_real_packages():
    """Check the names of Megatron and Megatron-Bridge that the code and the stand-ins use."""
    fp8_utils = pytest.importorskip("megatron.core.fp8_utils")
    import dataclasses

    from megatron.bridge import AutoBridge
    from megatron.core.extensions import transformer_engine as extensions
    from megatron.core.transformer import TransformerConfig

    from jetrl_patch.adapters.verl.megatron_model import BUILT
    from jetrl_patch.backends import transformer_engine

    assert callable(fp8_utils.get_fp8_recipe)
    assert set(BUILT) <= {field.name for field in dataclasses.fields(TransformerConfig)}
    assert callable(AutoBridge.export_hf_weights) and callable(AutoBridge.get_conversion_tasks)
    for name in ("TELayerNormColumnParallelLinear", "TEColumnParallelLinear", "TERowParallelLinear"):
        assert transformer_engine._has_base(getattr(extensions, name), *transformer_engine.LINEARS)
