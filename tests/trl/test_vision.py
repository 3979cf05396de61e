"""Vision-language models in TRL: whole runs on the CPU, the prompts that vLLM gets, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jetrl_patch.adapters.trl import settings, vision
from jetrl_patch.config import Config
from jetrl_patch.errors import ModelError
from tests import vision_models
from tests.trl import LIMIT, LORA, TRL, ZERO3, needs_trl, pictures, train
from tests.trl.test_runs import EXACT, assert_exact, steps_of

pytestmark = [pytest.mark.timeout(3 * LIMIT)]

RUN = [needs_trl, vision_models.needs_images, pytest.mark.e2e]
SHARDED = {"transformer_layer_cls_to_wrap": ["Qwen3VLTextDecoderLayer", "Qwen3VLVisionBlock"]}


@pytest.mark.parametrize(
    ("family", "given", "ranks"),
    [
        pytest.param("qwen2_5_vl", {"beta": 0.04, "max_steps": 3}, 1, marks=RUN),
        pytest.param("qwen3_vl", {"deepspeed": ZERO3, "beta": 0.04}, 2, marks=RUN),
        pytest.param("qwen2_5_vl", {"lora": LORA, "rloo": True, "temperature": 0.8, "learning_rate": 1e-2}, 1, marks=RUN),
        pytest.param("qwen3_vl", {"fsdp2": SHARDED}, 2, marks=[*RUN, pytest.mark.slow]),
        pytest.param("qwen2_5_vl", {"vllm_tensor_parallel_size": 2}, 2, marks=[*RUN, pytest.mark.slow]),
        *(
            pytest.param(family, {}, 1, marks=[*RUN, pytest.mark.slow])
            for family in ("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
        ),
    ],
)
def test_a_run_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, given: dict[str, Any], ranks: int
) -> None:
    """The tower is trained and the same pictures come again, so an engine that kept their features would differ."""
    model = pictures.checkpoint(tmp_path / "model", family)
    monkeypatch.setenv("PYTHONPATH", vision_models.environ()["PYTHONPATH"])
    run = {"vision": model, "vllm_max_model_length": 256, "max_steps": 2, **given}
    for line in steps_of(train(tmp_path, EXACT, run, ranks), run["max_steps"]):
        assert_exact(line)
        assert line["grad_norm"] > 0.0


@needs_trl
def test_the_bugs_are_there() -> None:
    """As tests/test_upstream_fixes.py asserts of the installed frameworks."""
    source = (TRL / "trl" / "generation" / "vllm_generation.py").read_text()
    assert 'row = {"prompt_token_ids": ids}' in source and "reset_encoder_cache" not in source


def test_an_engine_gets_one_placeholder_for_each_image() -> None:
    assert vision.one_each([1, 9, 9, 9, 2, 2, 9, 3], 9, 2) == [1, 9, 2, 2, 9, 3]
    assert vision.one_each([1, 2, 2], 9, 0) == [1, 2, 2]
    with pytest.raises(ModelError, match="required 2 runs of image tokens, one for each image, found 1"):
        vision.one_each([1, 9, 9, 2], 9, 2)


@pytest.mark.parametrize(
    ("mode", "more", "found"),
    [
        ("server", {}, "vllm_mode='server'"), ("colocate", {"tools": [print]}, "tools"),
        ("colocate", {"environment_factory": print}, "environment_factory"), ("colocate", {"tools": []}, ""),
    ],
)  # fmt: skip
def test_what_has_not_run_is_refused(mode: str, more: dict[str, Any], found: str) -> None:
    given = (SimpleNamespace(vllm_mode=mode), settings.tools_of(more), Config(**EXACT))
    if not found:
        settings.check_model(vision_models.config_of("qwen2_5_vl"), *given)
        return
    with pytest.raises(ModelError, match=f"vllm_mode='colocate' without tools .*, found {found}"):
        settings.check_model(vision_models.config_of("qwen2_5_vl"), *given)
