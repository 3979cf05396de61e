"""Before an engine serves, every FP8 linear is checked against its backend."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.config import SchedulerConfig, VllmConfig, set_current_vllm_config

from jetrl_patch import Config
from jetrl_patch.backends import get_backend, row_equality
from jetrl_patch.errors import ModelError


@pytest.mark.parametrize("precision", ["fp8-unified", "fp8-rollout"])
def test_the_rollout_asks_for_row_equality(precision, monkeypatch):
    from jetrl_patch.adapters.vllm.method import QuantizedLinearMethod

    def compare(backend, shape, device, scale_format, trained, decoded, layout, most):
        return row_equality.Verdict(False, f"{backend.name} {shape} {scale_format} {most}")

    monkeypatch.setattr(row_equality, "compare_rows", compare)
    batches = SchedulerConfig(max_num_batched_tokens=300, max_num_seqs=8, max_model_len=300, is_encoder_decoder=False)
    with set_current_vllm_config(VllmConfig(scheduler_config=batches)):
        method = QuantizedLinearMethod(Config(precision=precision), "model.layers.0.mlp.down_proj", packed={}, cut=[])
    method.format._backend = get_backend("torch")
    layer = SimpleNamespace(weight=torch.empty(64, 256, dtype=torch.float8_e4m3fn, device="meta"))  # stands for a GPU
    if precision == "fp8-rollout":
        method.process_weights_after_loading(layer)  # the trainer is BF16: nothing could be equal
    else:
        with pytest.raises(ModelError, match=r"'torch' in a rollout.*torch \(64, 256\) pow2 300"):
            method.process_weights_after_loading(layer)
    layer.weight = torch.empty(64, 256, dtype=torch.float8_e4m3fn)
    method.process_weights_after_loading(layer)
