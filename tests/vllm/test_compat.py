"""Switches that only some versions of vLLM have: an enabled one is found in every version that has it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

import jetrl_patch
from jetrl_patch import ModelError
from jetrl_patch.adapters.vllm import compat
from jetrl_patch.adapters.vllm.compat import SEQUENCE_PARALLEL, backends_per_kind, routes_error, sequence_parallel
from jetrl_patch.adapters.vllm.engine import check_engine, prepare_arguments
from jetrl_patch.config import Config
from jetrl_patch.errors import VersionError


@pytest.mark.parametrize(("path", "name"), SEQUENCE_PARALLEL)
def test_sequence_parallelism_is_refused_by_name(
    checkpoint: Callable[..., str], monkeypatch: pytest.MonkeyPatch, path: str, name: str
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    jetrl_patch.enable(precision="fp8-unified")
    found = EngineArgs(model=checkpoint("qwen3"), skip_tokenizer_init=True, max_model_len=128).create_engine_config()
    assert sequence_parallel(found) == []
    owner = found
    for part in path.split("."):
        owner = getattr(owner, part)
    if isinstance(getattr(type(owner), name, None), property):
        monkeypatch.setattr(type(owner), name, property(lambda self: True))
    else:
        setattr(owner, name, True)
    with pytest.raises(
        ModelError, match=rf"does not support sequence parallelism \({name}\): trainer and rollout would differ"
    ):
        check_engine(found, jetrl_patch.status().config)


def test_a_version_without_the_switches_has_nothing_to_refuse() -> None:
    compilation = SimpleNamespace(pass_config=SimpleNamespace())
    assert sequence_parallel(SimpleNamespace(compilation_config=compilation, parallel_config=SimpleNamespace())) == []
    assert backends_per_kind(SimpleNamespace()) == []


def test_a_version_that_asks_no_module_for_its_experts(
    checkpoint: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(model=checkpoint("qwen3_moe"), skip_tokenizer_init=True, enable_return_routed_experts=True)
    config = Config(align="linear")
    prepare_arguments(args, config)
    monkeypatch.setattr(compat, "installed_version", lambda _: "0.24.0")
    with pytest.raises(VersionError, match=r"enable_return_routed_experts .* required vllm>=0\.28,<0\.31, found 0\.24\.0"):
        prepare_arguments(args, config)
    prepare_arguments(args, Config(precision="bf16"))


@pytest.mark.parametrize(
    ("version", "able"),
    [("0.24.0", False), ("0.27.1", False), ("0.28.0", True), ("0.28.0rc1", True), ("0.30.0+cpu", True), ("0.31.0", False)],
)
def test_the_versions_that_return_experts(monkeypatch: pytest.MonkeyPatch, version: str, able: bool) -> None:
    monkeypatch.setattr(compat, "installed_version", lambda _: version)
    assert (routes_error() is None) == able


def test_the_installed_version_has_what_the_table_says() -> None:
    from vllm.config import ModelConfig
    from vllm.model_executor.layers.fused_moe import routed_experts_capturer

    asks = hasattr(routed_experts_capturer, "RoutedExpertsCaptureSource")
    assert (routes_error() is None) == (asks and hasattr(ModelConfig, "enable_return_routed_experts"))
