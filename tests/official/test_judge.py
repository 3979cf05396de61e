"""The verdicts: what the checks of the driver say, per mode, with the model's true shapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from jetrl_patch.models.families import FAMILIES
from jetrl_patch.trainer.preflight import checkpoint_problems
from scripts.official import models
from scripts.official.expand import expand
from scripts.official.judge import ASYNC, Judged, judge, modes, on_target
from tests.official.scripts import HEAD, grpo, write


def verdict(folder: Path, text: str) -> Judged:
    (expansion,) = expand(write(folder / "checkout", run=text), folder / "work")
    assert expansion.failure == ""
    models.write_all(folder / "models")
    with on_target():
        return judge(expansion.launches[0], folder / "models", folder / "work")


def abouts(judged: Judged, mode: str) -> list[str]:
    return [problem.about for problem in judged.verdicts[mode]]


def test_the_modes_are_all_modes():
    assert list(modes()) == ["exact", "linear", "fp8-rollout", "int8-rollout", "fp16", "bf16"]


def test_a_dense_launch_is_accepted_in_every_mode(tmp_path):
    found = verdict(tmp_path, grpo())
    assert (found.framework, found.kind, found.model) == ("verl", "dense", "Qwen/Qwen3-8B")
    assert {mode: found.verdicts[mode] for mode in modes()} == dict.fromkeys(modes(), ())
    assert found.set_keys["actor_rollout_ref.rollout.name"] == "vllm"


def test_each_refused_setting_is_named_in_the_modes_that_refuse_it(tmp_path):
    found = verdict(tmp_path, grpo("+actor_rollout_ref.rollout.min_tokens=2", "actor_rollout_ref.rollout.quantization=fp8"))
    names = {path: f"actor_rollout_ref.rollout.{path}" for path in ("min_tokens", "quantization")}
    assert sorted(abouts(found, "exact")) == sorted(names.values())
    assert abouts(found, "linear") == [names["quantization"]] and abouts(found, "bf16") == []
    assert "required 0" in next(p.text for p in found.verdicts["exact"] if p.about == names["min_tokens"])


def test_the_models_shapes_decide(tmp_path):
    """Qwen2.5-7B's MLP of 18944 columns is 148 blocks: two ranks keep them whole, eight do not."""
    two = verdict(
        tmp_path / "2", grpo("actor_rollout_ref.rollout.tensor_model_parallel_size=2", model="Qwen/Qwen2.5-7B")
    )
    eight = verdict(
        tmp_path / "8", grpo("actor_rollout_ref.rollout.tensor_model_parallel_size=8", model="Qwen/Qwen2.5-7B")
    )
    assert two.accepted("exact")
    assert abouts(eight, "exact") == ["the tensor-parallel split"] and "K = 18944" in eight.verdicts["exact"][0].text


def test_a_script_with_videos_has_them_in_its_data(tmp_path):
    (expansion,) = expand(write(tmp_path / "checkout", run_video=grpo(model="Qwen/Qwen3.5-2B")), tmp_path / "work")
    models.write_all(tmp_path / "models")
    with on_target():
        found = judge(expansion.launches[0], tmp_path / "models", tmp_path / "work")
    assert abouts(found, "exact") == ["data.train_files=videos.parquet"] and found.accepted("linear")
    assert "found videos in its column 'videos'" in found.verdicts["exact"][0].text
    assert verdict(tmp_path / "other", grpo(model="Qwen/Qwen3.5-2B")).accepted("exact")


def test_a_script_for_ascend_is_refused_whether_or_not_it_names_the_device(tmp_path):
    (expansion,) = expand(write(tmp_path / "checkout", **{"ascend_extras/run": grpo()}), tmp_path / "work")
    models.write_all(tmp_path / "models")
    with on_target():
        found = judge(expansion.launches[0], tmp_path / "models", tmp_path / "work")
    assert all(abouts(found, mode) == ["trainer.device"] for mode in modes())
    assert "trainer.device=npu" in found.notes[0]


def test_an_unknown_model_is_said_to_be_unknown(tmp_path):
    found = verdict(tmp_path, grpo(model="somebody/new-model-9B"))
    assert found.kind == "" and found.model == "somebody/new-model-9B"


PROGRAM = "python3 -m verl.experimental.{} actor_rollout_ref.model.path=Qwen/Qwen3-8B{}\n"


def test_another_entry_point_is_refused_by_name(tmp_path):
    found = verdict(tmp_path, HEAD + PROGRAM.format("new_policy.main", ""))
    assert found.kind == ASYNC and found.model == "Qwen/Qwen3-8B"
    assert all("new_policy.main" in found.verdicts[mode][0].text for mode in modes())


def test_an_asynchronous_program_is_judged_by_its_settings(tmp_path):
    program, nccl = "fully_async_policy.fully_async_main", " actor_rollout_ref.rollout.checkpoint_engine.backend=nccl"
    found = verdict(tmp_path / "1", HEAD + PROGRAM.format(program, nccl))
    assert found.kind == ASYNC and all(found.accepted(mode) for mode in modes() if mode != "fp16")
    refused = verdict(tmp_path / "2", HEAD + PROGRAM.format(program, nccl + " async_training.use_trainer_do_validate=True"))
    assert all(abouts(refused, mode) == ["async_training.use_trainer_do_validate"] for mode in ("exact", "linear", "bf16"))


def test_a_training_without_a_rollout_is_not_judged(tmp_path):
    assert verdict(tmp_path, HEAD + "torchrun -m verl.trainer.sft_trainer a=1\n").kind is None


@pytest.mark.parametrize("program", ["recipe.dapo.main_dapo", "recipe.prime.main_prime", "rllm.trainer.verl.train_agent_ppo"])
def test_a_recipes_own_program_has_a_rollout(tmp_path, program):
    """It takes verl's settings, so it is another entry point, not a training without a rollout."""
    found = verdict(tmp_path, HEAD + f"python3 -m {program} actor_rollout_ref.model.path=Qwen/Qwen3-8B\n")
    assert (found.framework, found.kind, found.target) == ("verl", ASYNC, program)
    assert all(abouts(found, mode) == ["the entry point"] for mode in modes())


def test_what_hydra_refuses_is_a_reason(tmp_path):
    found = verdict(tmp_path, grpo("actor_rollout_ref.rollout.no_such_setting=1"))
    assert found.kind == "dense" and "no_such_setting" in found.verdicts["bf16"][0].text


OPENRLHF = HEAD + (
    "ray job submit --address=http://127.0.0.1:8265 -- python3 -m openrlhf.cli.train_ppo_ray "
    "--actor.model_name_or_path OpenRLHF/Llama-3-8b-sft-mixture --data.prompt_dataset x --reward.remote_url r.py "
    "--vllm.num_engines 2 --algo.advantage.is_correction_enable {more}\n"
)


def test_openrlhf_in_its_older_words(tmp_path):
    found = verdict(tmp_path / "1", OPENRLHF.format(more="--algo.advantage.is_correction_type icepop"))
    assert (found.framework, found.kind) == ("openrlhf", "dense") and found.accepted("exact")
    assert "is_correction_level token --algo.advantage.is_correction_mode mask" in found.notes[0]
    late = verdict(tmp_path / "2", OPENRLHF.format(more="--train.async_enable"))
    assert late.kind == ASYNC


def test_openrlhf_on_images(tmp_path):
    """As its script for vision-language models."""
    words = OPENRLHF.replace("OpenRLHF/Llama-3-8b-sft-mixture", "Qwen/Qwen3.5-2B").format(
        more="--algo.advantage.estimator reinforce_baseline --rollout.n_samples_per_prompt 8 --data.max_images_per_prompt 1 "
        "--data.image_key images --actor.freeze_visual_encoder --train.colocate_all --vllm.enable_sleep --ds.enable_sleep "
        "--ds.attn_implementation eager"
    )
    found = verdict(tmp_path, words)
    assert found.kind == "VL"
    assert {mode for mode in found.verdicts if not found.accepted(mode)} == {"int8-rollout"}, found.verdicts


@pytest.mark.parametrize("name", models.MODELS)
def test_every_record_has_a_type_and_a_class(name):
    model = models.MODELS[name]
    assert model.kind in models.CLASSES and model.family and model.config["architectures"]
    assert model.kind != "dense" or {"hidden_size", "intermediate_size", "num_key_value_heads"} <= set(model.config)


@pytest.mark.parametrize("name", sorted(name for name, model in models.MODELS.items() if model.family in FAMILIES))
def test_a_record_of_a_supported_family_passes_the_models_check(tmp_path, name):
    """As the hub's own config.json would: a record without a key that a check asks for makes the page refuse its scripts."""
    models.write_all(tmp_path)
    assert list(checkpoint_problems(models.folder(name, tmp_path), modes()["linear"], 1)) == []
