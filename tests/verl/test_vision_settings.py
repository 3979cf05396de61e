"""verl's settings with a vision-language model: what is accepted, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from jetrl_patch.adapters.verl import settings
from jetrl_patch.adapters.verl.vision import check_worker
from jetrl_patch.config import Config
from jetrl_patch.errors import ModelError
from tests import vision_models
from tests.verl.test_settings import BF16, EXACT, LINEAR, ROLLOUT

A, M, R = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
MEGATRON = Config(precision="fp8-unified", align="linear", backend="te")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return config_in(tmp_path_factory.mktemp("vision"), "qwen2_5_vl")


def config_in(path: Path, family: str) -> Path:
    vision_models.config_of(family).save_pretrained(path)
    return path


@pytest.mark.parametrize("config", [EXACT, LINEAR, ROLLOUT, BF16, Config(precision="fp16")])
def test_what_official_scripts_set_is_accepted(base, model, config):
    given = base(
        f"{M}.path={model}", f"{M}.use_remove_padding=True", f"{M}.use_fused_kernels=True", f"{A}.freeze_vision_tower=True",
        f"{A}.use_kl_loss=True", f"{A}.ulysses_sequence_parallel_size=2", "trainer.n_gpus_per_node=2",
        f"{R}.tensor_model_parallel_size=2", f"+{R}.engine_kwargs.vllm.mm_processor_cache_gb=0",
    )  # fmt: skip
    assert [str(problem) for problem in settings.problems(given, config)] == []


@pytest.mark.parametrize("config", [LINEAR, ROLLOUT])
def test_adapters_are_accepted_and_sent_as_merged_weights(base, model, config):
    given = base(f"{M}.path={model}", f"{M}.lora_rank=64", f"{M}.target_modules=all-linear", f"{M}.exclude_modules='.*visual.*'")
    assert [str(problem) for problem in settings.problems(given, config)] == []
    assert f"{M}.lora.merge=True, which was False" in settings.complete(given, config)


@pytest.mark.parametrize("config", [LINEAR, ROLLOUT])
def test_experts_beside_a_tower_are_split_whole(base, tmp_path, config):
    given = base(f"{M}.path={config_in(tmp_path, 'qwen3_vl_moe')}", f"{R}.tensor_model_parallel_size=2")
    assert [str(problem) for problem in settings.problems(given, config)] == []
    assert any(f"{R}.expert_parallel_size=2, which was 1" in change for change in settings.complete(given, config))


@pytest.mark.parametrize(
    ("config", "extra", "says"),
    [
        (Config(precision="int8-rollout"), (), r"required one text model, or with an FP8 rollout one of qwen2_5_vl"),
        (
            ROLLOUT,
            (f"{M}.use_fused_kernels=True", f"{M}.fused_kernel_options.impl_backend=triton"),
            r"use_fused_kernels with model_type='qwen2_5_vl': required the implementation torch, found .*='triton'\. Set",
        ),
        (LINEAR, ("actor_rollout_ref.hybrid_engine=False",), r"hybrid_engine: required True for a vision-language .*found False"),
        (LINEAR, (f"{R}.tensor_model_parallel_size=4",), r"cuts a block of 128 in 2 layers: model\.language_model\.layers\.0"),
        (LINEAR, (f"+{R}.engine_kwargs.vllm.mm_encoder_attn_dtype=fp8",), r"mm_encoder_attn_dtype .*found 'fp8'\. Remove it"),
    ],
)
def test_what_is_not_handled_is_one_error(base, model, config, extra, says):
    (problem,) = settings.problems(base(f"{M}.path={model}", *extra), config)
    with pytest.raises(type(problem), match=says):
        raise problem


@pytest.mark.parametrize("films", [[], [{"video": "a.mp4", "fps": 1}]])
@pytest.mark.parametrize("typed", [False, True])
def test_exact_mode_refuses_data_with_videos(base, model, tmp_path, films, typed):
    import pyarrow
    import pyarrow.parquet as parquet

    video = pyarrow.struct({"video": pyarrow.string(), "fps": pyarrow.int64()})
    schema = pyarrow.schema({"prompt": pyarrow.string(), "videos": pyarrow.list_(video)}) if typed else None
    file = tmp_path / "train.parquet"
    rows = [{"prompt": "1+2=", "videos": []}, {"prompt": "<video>what?", "videos": films}]
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), file)
    given = base(f"{M}.path={model}", f"data.train_files=[{file}]")
    assert [str(problem) for problem in settings.problems(given, LINEAR)] == []
    says = f"data.train_files={file}: required images and text in exact mode (videos have not been tried), found videos in"
    assert [str(problem).startswith(says) for problem in settings.problems(given, EXACT)] == [True] * len(films)


def test_megatron_names_its_families(base, model, monkeypatch):
    from jetrl_patch.adapters.verl import megatron

    with pytest.raises(ModelError, match=r"the model with Megatron: required one of qwen2, .*found model_type='qwen2_5_vl'"):
        megatron.check_model(vision_models.config_of("qwen2_5_vl"), megatron.Sizes(1, 1, 1, 1, True, False), LINEAR)


def test_a_remote_model_is_refused_in_the_worker():
    from types import SimpleNamespace

    def check(hf_config, options):
        model = SimpleNamespace(
            use_fused_kernels=options is not None, fused_kernel_options=options, use_remove_padding=True
        )
        check_worker(hf_config, SimpleNamespace(ulysses_sequence_parallel_size=1, model_config=model), False)

    hf_config = vision_models.config_of("qwen3_vl")
    with pytest.raises(ModelError, match=r"required the implementation torch, found .*impl_backend='triton'\. Set .*=torch"):
        check(hf_config, {"impl_backend": "triton"})
    for options in (None, {"impl_backend": "torch"}):
        check(hf_config, options)
    check(hf_config.get_text_config(), {"impl_backend": "triton"})


def test_in_exact_mode_ranks_do_not_share_sequences():
    import jetrl_patch
    from jetrl_patch.adapters.verl.ulysses import check_whole

    config = vision_models.config_of("qwen3_vl")
    check_whole(config, 2)
    jetrl_patch.enable(precision="fp8-unified")
    check_whole(config, 1)
    with pytest.raises(ModelError, match=r"with a vision tower in exact mode .*found model_type='qwen3_vl'\. Set it to 1"):
        check_whole(config, 2)


def test_the_flops_of_a_model_that_sees_are_those_of_its_text():
    from verl.utils.flops_counter import FlopsCounter

    import jetrl_patch

    jetrl_patch.enable(precision="bf16")
    config = vision_models.config_of("glm4v")
    text = FlopsCounter(config).estimate_flops([8, 3], 1.0)[0]
    assert text > 0 and config.model_type == "glm4v" and not hasattr(config, "hidden_size")
    jetrl_patch.disable()
    with pytest.raises(AttributeError):
        FlopsCounter(config).estimate_flops([8, 3], 1.0)
