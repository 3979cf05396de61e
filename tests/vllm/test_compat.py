"""Switches that only some versions of vLLM have: one that is on is found in every version that has it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

import jetrl_patch
from jetrl_patch import ModelError
from jetrl_patch.adapters.vllm.compat import SEQUENCE_PARALLEL, backends_per_kind, returns_routes, sequence_parallel
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
    assert returns_routes()
    prepare_arguments(args, config)
    monkeypatch.setattr("jetrl_patch.adapters.vllm.engine.returns_routes", lambda: False)
    with pytest.raises(VersionError, match=r"enable_return_routed_experts .* required vLLM 0\.28 to 0\.30.*Set measure_routes"):
        prepare_arguments(args, config)
    prepare_arguments(args, Config(precision="bf16"))
