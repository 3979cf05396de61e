"""Models with a vision tower in real engines: which layers are FP8, their names, and weight syncs, with images and with text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jetrl_patch.adapters.vllm.shards import hf_name
from jetrl_patch.models import families
from tests import forks, vision_models

FAMILIES = list(vision_models.FAMILIES)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], str]:
    """``checkpoints(name, seed)``: path of a tiny checkpoint of a family or variant, written at the first call."""
    root = tmp_path_factory.mktemp("vision")

    def make(name: str, seed: int) -> str:
        path = Path(root) / f"{name}-{seed}"
        family, text = vision_models.VARIANTS.get(name, (name, {}))
        return str(path) if path.exists() else vision_models.save(path, family, seed, **text)

    return make


def run(*words: str) -> None:
    script, environ = Path(__file__).with_name("vision_script.py"), vision_models.environ()
    done = forks.run(script, *words, imports=forks.WITH_VLLM, environ=environ)
    assert done.returncode == 0 and done.stdout.endswith("FINE\n"), done.stdout[-2000:] + done.stderr[-6000:]


@vision_models.needs_images
@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mode"),
    [
        (family, mode)
        for family in FAMILIES
        for mode in ("linear", "fp8-rollout", "channel")
        if not (mode == "channel" and families.FAMILIES[family].mixture)  # refused: experts are quantized in blocks
    ],
)
def test_the_language_model_is_fp8_and_the_tower_is_synced_in_bf16(
    checkpoints: Callable[[str, int], str], family: str, mode: str
) -> None:
    run("sync", checkpoints(family, 0), checkpoints(family, 1), mode)


@vision_models.needs_images
@pytest.mark.e2e
def test_a_broken_sync_is_one_error_and_stops_the_engine(checkpoints: Callable[[str, int], str]) -> None:
    run("broken", checkpoints("qwen2_5_vl", 0), checkpoints("qwen2_5_vl", 1), "linear")


@vision_models.needs_images
@pytest.mark.e2e
def test_exact_mode_is_refused_by_name(checkpoints: Callable[[str, int], str]) -> None:
    run("refused_exact", checkpoints("glm4v", 0))


@vision_models.needs_images
@pytest.mark.e2e
@pytest.mark.parametrize(
    ("family", "given"),
    [
        pytest.param("qwen2_5_vl", ("cached", "48"), marks=pytest.mark.pins),
        pytest.param("qwen2_5_vl", ("uncached", "4096"), marks=pytest.mark.slow),
        pytest.param("qwen2_5_vl", ("uncached", "48", "2"), marks=pytest.mark.slow),
        pytest.param("qwen3_vl", ("cached", "48"), marks=pytest.mark.slow),
        pytest.param("qwen3_vl", ("cached", "4096", "2"), marks=pytest.mark.slow),
        pytest.param("qwen3_vl_moe", ("uncached", "4096"), marks=pytest.mark.slow),
        ("qwen3_5", ("cached", "300")),  # vLLM caches states at the end of blocks of 256
        pytest.param("qwen3_5-tied", ("uncached", "48"), marks=pytest.mark.slow),
        pytest.param("qwen3_5", ("cached", "4096", "2"), marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", ("uncached", "4096"), marks=pytest.mark.slow),
        pytest.param("qwen3_5_moe", ("cached", "300", "2"), marks=pytest.mark.slow),
    ],
)
def test_log_probs_have_the_same_bits(checkpoints: Callable[[str, int], str], family: str, given: tuple[str, ...]) -> None:
    """With images and text, in batches of 1, 7 and 32, in chunks of so many tokens; before and after a sync, or on two ranks."""
    run("exact", checkpoints(family, 0), checkpoints(family, 1), *given)


def classes(family: str) -> Any:
    from transformers import AutoConfig
    from vllm.model_executor.models.registry import ModelRegistry

    from jetrl_patch.models.families import FAMILIES as RECORDS

    record = RECORDS[family]
    assert AutoConfig.for_model(family).model_type == family
    return record, ModelRegistry._try_load_model_cls(record.causal_lm)


@vision_models.needs_images
def test_names_are_those_of_transformers() -> None:
    run("names", *FAMILIES)


def test_a_name_without_a_map_or_with_another_map_is_left_as_it_is() -> None:
    mapper: Any = SimpleNamespace(orig_to_new_prefix={"old.": None, "a.": "b.", "c.": "b."}, apply_list=lambda names: names)
    assert hf_name("language_model.model.layers.0", None) == "language_model.model.layers.0"
    assert hf_name("model.layers.0.mlp", mapper) == "model.layers.0.mlp"
    assert hf_name("b.layers.0", mapper) == "b.layers.0"  # no name leads there
    mapper.apply_list = lambda names: [name.replace("c.", "b.") for name in names]
    assert hf_name("b.layers.0", mapper) == "c.layers.0"
