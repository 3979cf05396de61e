"""Graphs that vLLM compiled under other settings are not found again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import VllmConfig

import jetrl_patch
from jetrl_patch import Config
from jetrl_patch.adapters.vllm.worker import KEY, mark_settings
from jetrl_patch.errors import ConflictError
from jetrl_patch.measure.parity import Job

#: what vLLM's own hash does not see, beside the first of them
OTHERS: tuple[dict[str, Any], ...] = (
    {"precision": "fp8-unified", "align": "linear"},
    {"precision": "fp8-rollout"},
    {"precision": "fp8-rollout", "scale_format": "fp32"},
    {"precision": "fp8-rollout", "exclude": ("down_proj",)},
    {"precision": "fp8-rollout", "rollout_granularity": "channel"},
)


def hash_with(backend: str = "triton", attention: str = "", **settings: Any) -> str:
    vllm_config = VllmConfig(additional_config={"theirs": 1})
    mark_settings(vllm_config, Config(**settings), backend, attention)
    assert isinstance(vllm_config.additional_config, dict) and vllm_config.additional_config["theirs"] == 1
    return vllm_config.compute_hash()


def test_every_setting_has_graphs_of_its_own() -> None:
    first = OTHERS[0]
    hashes = [hash_with(**other) for other in OTHERS]
    hashes += [hash_with("deep_gemm", **first), hash_with(attention="flash3", **first)]
    assert len(set(hashes)) == len(hashes) and hash_with(**first) == hashes[0]
    assert VllmConfig(additional_config={"theirs": 1}).compute_hash() not in hashes


def test_a_worker_names_its_own(checkpoint: Any, engine: Any) -> None:
    jetrl_patch.enable(precision="fp8-unified")
    llm = engine(Job(model=checkpoint("qwen2"), config=jetrl_patch.status().config))
    (report,) = llm.collective_rpc("jetrl_report", kwargs={"digests": False})
    (named,) = llm.collective_rpc(lambda worker: worker.vllm_config.additional_config[KEY])
    assert named == {**report["config"], "backend": report["backend"], "attention": report["attention"]}
    (there,) = llm.collective_rpc(lambda worker: worker.model_runner.vllm_config is worker.vllm_config)
    assert there  # whose hash names the graphs


def test_what_cannot_be_added_to_is_refused() -> None:
    with pytest.raises(ConflictError, match=r"additional_config.*required a dict.*found SimpleNamespace"):
        mark_settings(SimpleNamespace(additional_config=SimpleNamespace()), Config(), "", "")  # type: ignore[arg-type]
