"""Real verl with vision-language models: GRPO on prompts with and without an image, with FP8 in the language model alone."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from tests import vision_models
from tests.fp8.thresholds import MISMATCH
from tests.verl.run_verl import A, M, R, Run, write_data
from tests.verl.test_async_runs import APART
from tests.verl.test_e2e import TIMEOUT, finish

BF16 = {"JETRL_PRECISION": "bf16", "JETRL_UPSTREAM_FIXES": "1"}  # without them samples of one length end verl's step
LINEAR, ROLLOUT = {"JETRL_PRECISION": "fp8-unified", "JETRL_ALIGN": "linear"}, {"JETRL_PRECISION": "fp8-rollout"}
#: all prompts have one image of one size, and all answers one length
EQUAL = f"{R}.ignore_eos=True"


def make_task(folder: Path, family: str, equal: bool) -> Path:
    """Write a model, prompts of which every second one has an image, or each the same (``equal``), and a reward."""
    def image(seed: int) -> dict[str, bytes]:
        file = io.BytesIO()
        vision_models.picture(seed, 64 if equal else 64 + 32 * (seed % 3)).save(file, "PNG")
        return {"bytes": file.getvalue()}

    # as wide as the tokenizer: verl bans further tokens in vLLM alone
    vision_models.save(folder / "model", family, vocab_size=vision_models.FIRST + len(vision_models.words(family)))
    rows: list[dict[str, Any]] = [
        {
            "data_source": "toy", "prompt": [{"role": "user", "content": "<image>" * seen + f"{i % 10}?"}], "ability": "math",
            "images": [image(i)] * seen, "reward_model": {"style": "rule", "ground_truth": "1"}, "extra_info": {"index": i},
        }
        for i, seen in ((i, equal or i % 2 == 0) for i in range(16))
    ]  # fmt: skip
    write_data(folder, rows)
    return folder


def start(folder: Path, family: str, *extra: str, environ: dict[str, str], **options: Any) -> Run:
    sizes = ("data.max_prompt_length=64", f"{R}.max_model_len=96", "data.image_key=images")
    task = make_task(folder, family, EQUAL in extra)
    return Run(task, *sizes, *extra, environ={**environ, **vision_models.environ()}, **{"steps": 2} | options)


#: on all linear layers, as verl's own script has them
ADAPTERS = (f"{M}.lora_rank=8", f"{M}.lora_alpha=16", f"{M}.target_modules=all-linear")
V0, V1 = "trainer.use_v1=False", "trainer.use_v1=True"


@vision_models.needs_images
@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 100)
@pytest.mark.parametrize(
    ("family", "environ", "extra", "options"),
    [
        ("qwen2_5_vl", BF16, (V1, EQUAL), {}),
        ("qwen2_5_vl", LINEAR, (V1, EQUAL), {}),
        ("qwen2_5_vl", LINEAR, (V1, f"{M}.use_fused_kernels=True"), {}),
        ("qwen2_5_vl", LINEAR, (V0,), {"processes": 2}),
        ("qwen2_5_vl", ROLLOUT, (V1, f"{A}.use_kl_loss=True"), {}),
        ("qwen3_vl", LINEAR, (V1, f"{M}.use_remove_padding=True"), {"strategy": "fsdp"}),
        ("qwen3_vl", ROLLOUT, (V0, EQUAL), {}),
        ("qwen3_vl", LINEAR, (V1, "trainer.v1.trainer_mode=colocate_async"), {}),
        ("qwen2_5_vl", LINEAR, (V1, *APART), {}),
        ("qwen3_5", LINEAR, (V1, f"{M}.use_remove_padding=True"), {}),
        ("qwen3_5", ROLLOUT, (V0, f"{M}.use_fused_kernels=True"), {"strategy": "fsdp"}),
        ("qwen3_5_moe", LINEAR, (V1, f"{M}.use_remove_padding=True"), {}),
        ("qwen3_vl_moe", LINEAR, (V1, f"{A}.use_kl_loss=True"), {}),
        ("qwen3_vl_moe", ROLLOUT, (V0, f"{M}.use_remove_padding=True"), {"processes": 2}),
        ("glm4v", LINEAR, (V1,), {}),
        ("glm4v", ROLLOUT, (V1, EQUAL), {}),
        ("qwen2_5_vl", LINEAR, (V1, *ADAPTERS, f"{A}.use_kl_loss=True", f"{M}.exclude_modules=.*visual.*"), {}),
        ("qwen2_5_vl", ROLLOUT, (V1, *ADAPTERS), {}),
    ],
)
def test_grpo_on_images_and_text(
    tmp_path: Path, family: str, environ: dict[str, str], extra: tuple[str, ...], options: dict[str, Any]
) -> None:
    """Every tensor is sent, the tower's in BF16, and log-probs are as close as on text.

    verl bans the two tokens in place of images and films in vLLM alone, which adds to the difference.
    """
    run = start(tmp_path, family, *extra, environ=environ, **options)
    layers, inside, blocks, rest = vision_models.numbers(tmp_path / "model")
    sent, most = {  # in BF16 mode verl sends FP32
        "bf16": (4 * (inside + rest), 0.03),
        "fp8-unified": (inside + 4 * blocks + 2 * rest, 0.1),
        "fp8-rollout": (2 * (inside + rest), 0.2),
    }[environ["JETRL_PRECISION"]]
    if family == "qwen3_5_moe":  # routes differ, and a state hands that on
        most = MISMATCH[environ["JETRL_PRECISION"]]
    for step in finish(run, 2):
        assert step["jetrl/quantized_layers"] == (0 if environ is BF16 else layers)
        assert step["jetrl/sync_bytes_total"] == sent
        assert step["jetrl/tokens"] >= 16
        if step["jetrl/stale_fraction"] < 1:  # asynchronous trainers use samples of older weights too
            assert 0 < step["jetrl/logp_abs_diff_mean"] < most


@vision_models.needs_images
@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 100)
@pytest.mark.parametrize(
    ("family", "extra", "options"),
    [
        ("qwen2_5_vl", (V1, f"{M}.use_remove_padding=True"), {}),
        ("qwen2_5_vl", (V0,), {"processes": 2}),
        ("qwen3_vl", (V1, f"{M}.use_remove_padding=True"), {"strategy": "fsdp"}),
        ("qwen3_vl_moe", (V1, f"{M}.use_remove_padding=True"), {}),
        ("qwen3_5", (V1, f"{M}.use_remove_padding=True"), {}),
        ("qwen3_5", (V0,), {"strategy": "fsdp"}),
        ("qwen3_5_moe", (V1, f"{M}.use_remove_padding=True"), {}),
        ("qwen2_5_vl", (V1, *ADAPTERS, f"{A}.use_kl_loss=True", f"{M}.use_remove_padding=True"), {}),
    ],
)
def test_exact_mode_on_images_and_text(tmp_path: Path, family: str, extra: tuple[str, ...], options: dict[str, Any]) -> None:
    run = start(tmp_path, family, *extra, environ={"JETRL_PRECISION": "fp8-unified"}, steps=3, **options)
    layers = vision_models.numbers(tmp_path / "model")[0]
    for step in finish(run, 3):
        assert step["jetrl/quantized_layers"] == layers
        assert step["jetrl/tokens"] >= 16
        assert (step["jetrl/bit_equal_fraction"], step["jetrl/logp_abs_diff_max"]) == (1.0, 0.0)
