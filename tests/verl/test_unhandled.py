"""verl's settings and programs that are not equal on both sides: refused by name, in the driver and in the doctor."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from jetrl_patch.adapters.verl import rollout, settings
from jetrl_patch.adapters.verl import settings as programs
from jetrl_patch.adapters.verl.adapter import ADAPTER
from jetrl_patch.cli.run import program_problem
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, JetrlError, split_fix
from jetrl_patch.patching.guards import file_of
from tests.models import config_of
from tests.verl.composed import composer

A, F, R, M = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout", "model"))
V = f"{R}.engine_kwargs.vllm"
EXACT, LINEAR = Config(precision="fp8-unified"), Config(precision="fp8-unified", align="linear")
ROLLOUT, BF16, FP16 = Config(precision="fp8-rollout"), Config(precision="bf16"), Config(precision="fp16")
QUANTIZED = [EXACT, LINEAR, ROLLOUT]
EVERY = [*QUANTIZED, BF16, FP16]

Compose = Callable[..., Any]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    path = tmp_path_factory.mktemp("model")
    config_of("qwen3").save_pretrained(path)
    with composer(minimum(path)) as make:
        yield make


def minimum(path: Any) -> list[str]:
    return [
        f"{R}.name=vllm", f"{R}.tensor_model_parallel_size=1", f"{M}.path={path}", f"{A}.ppo_micro_batch_size_per_gpu=1",
    ]  # fmt: skip


def found(verl_config: Any, config: Config) -> list[str]:
    return [str(problem) for problem in settings.problems(verl_config, config)]


#: overrides, part of the message, the modes that refuse it
REFUSED: list[tuple[str, str, list[Config]]] = [
    ("trainer.device=npu", "required cuda or cpu", EVERY),
    ("global_profiler.tool=npu", "required a profiler of CUDA", EVERY),
    ("skip.rollout.enable=True", "samples of this run", EVERY),
    ("skip.rollout_tq.enable=True", "samples of this run", EVERY),
    ("skip.async_rollout.enable=True", "samples of this run", EVERY),
    ("trainer.v1.separate_async.hybrid_rollout.enable_switch=True", "a rollout that stays on its own devices", EVERY),
    ("+trainer.v1.separate_async.invented_tomorrow=1", "invented_tomorrow", QUANTIZED),
    ("+trainer.v1.colocate_async.invented.tomorrow=1", "invented.tomorrow", QUANTIZED),
    (f"{R}.agent.custom_async_server.path=server.py", "verl's own vLLM server", EVERY),
    (f"{R}.full_determinism=True", "batch-invariant", QUANTIZED),
    (f"{R}.enable_rollout_routing_replay=True", "its FSDP engine ignores them", QUANTIZED),
    (f"+{A}.fsdp_config.router_replay.mode=R3", "its FSDP engine ignores them", QUANTIZED),
    (f"+{A}.megatron.router_replay.mode=R2", "experts in Megatron choose their own", QUANTIZED),
    (f"+{F}.fsdp_config.mixed_precision.param_dtype=fp32", "required bf16", QUANTIZED),
    (f"{M}.hf_config_path=/elsewhere", "where vLLM reads its configuration", QUANTIZED),
    (f"{M}.tiled_mlp.enabled=True", "exact mode's own MLP", [EXACT]),
    (f"{A}.strategy=torchtitan {F}.strategy=fsdp2", "actor.strategy", [*QUANTIZED, FP16]),
    (f"{F}.strategy=torchtitan", "ref.strategy", [*QUANTIZED, FP16]),
    (f"+{A}.fsdp_config.mixed_precision.param_dtype=fp32", "required bf16", QUANTIZED),
    (f"{A}.fsdp_config.qat.enable=True ++{R}.qat={{}}", "actor.fsdp_config.qat", [*QUANTIZED, FP16]),
    (f"++{R}.qat={{enable:true}}", "rollout.qat", [*QUANTIZED, FP16]),
    (f"{R}.quantization_config_file=own.json", "no quantization but", [*QUANTIZED, FP16]),
    (f"+{R}.checkpoint_manager_class=own.Manager", "verl's own checkpoint manager", EVERY),
    (f"{R}.checkpoint_engine.custom_backend_module=own", "send tensors unchanged", QUANTIZED),
    (f"{R}.checkpoint_engine.backend=nccl", "the others send BF16", [FP16]),
    (f"{R}.checkpoint_engine.backend=nixl", "checkpoint_engine.backend", [*QUANTIZED, FP16]),
    (f"{M}.lora.rank=8", "lora.rank", [*QUANTIZED, FP16]),
    (f"{M}.lora_adapter_path=own", "verl merges adapters in BF16", [FP16]),
    (f"{R}.disaggregation.enabled=True", "tensor parallelism only", QUANTIZED),
    (f"{R}.pipeline_model_parallel_size=2", "tensor parallelism only", QUANTIZED),
    (f"{R}.expert_parallel_size=2", "tensor_model_parallel_size=1", QUANTIZED),
    (f"{M}.mtp.enable=True", "no drafts of a model", QUANTIZED),
    (f"+{R}.presence_penalty=0.1", "required 0, the only value", [EXACT]),
    (f"+{R}.frequency_penalty=0.1", "required 0, the only value", [EXACT]),
    (f"{R}.temperature=2.1", "the highest temperature that vLLM accepts", EVERY),
    (f"+{M}.override_config.rope_theta=5000", "override_config.rope_theta", QUANTIZED),
    (f"+{M}.override_config.model_config.rope_theta=5000", "override_config.rope_theta", QUANTIZED),
    (f"+{M}.override_config.rope_scaling.type=yarn", "override_config.rope_scaling", QUANTIZED),
    (f"+{M}.override_config.attention_dropout=0.1", "override_config.attention_dropout", [EXACT]),
    (f"{A}.fsdp_config.model_dtype=bf16", "required fp32", [LINEAR, ROLLOUT, FP16]),
    (f"+{A}.fsdp_config.mixed_precision.buffer_dtype=bf16", "rotary frequencies", [LINEAR, ROLLOUT]),
    # handed on to vLLM
    (f"+{V}.hf_overrides.rope_theta=5000", "which the trainer reads too", QUANTIZED),
    (f"+{V}.tensor_parallel_size=2", "the framework's own tensor-parallel size", QUANTIZED),
    (f"+{V}.kv_cache_dtype=fp8", "kv_cache='fp8'", QUANTIZED),
    (f"+{V}.dtype=float32", "engine_kwargs.vllm.dtype", [*QUANTIZED, FP16]),
    (f"+{V}.quantization=fp8", "no quantization but", [*QUANTIZED, FP16]),
    (f"+{V}.load_format=sharded_state", "load_format", QUANTIZED),
    (f"+{V}.model_impl=transformers", "auto or vllm", QUANTIZED),
    (f"+{V}.compilation_config.pass_config.enable_sp=True", "which compute nothing", QUANTIZED),
    (f"+{V}.data_parallel_size=2", "data_parallel_size", QUANTIZED),
    (f"+{V}.enable_expert_parallel=True", "enable_expert_parallel", QUANTIZED),
    (f"+{V}.mm_processor_kwargs.max_pixels=1000", "mm_processor_kwargs", QUANTIZED),
    (f"+{V}.worker_cls=mine.Worker", "worker_cls", QUANTIZED),
    (f"+{V}.weight_transfer_config.backend=nccl", "weight_transfer_config", QUANTIZED),
    (f"+{V}.speculative_config.method=eagle", "speculative_config", QUANTIZED),
    (f"+{V}.invented_tomorrow=1", "invented_tomorrow", QUANTIZED),
    (f"+{V}.attention_backend=FLASH_ATTN", "attention_backend", [EXACT]),
    (f"+{V}.block-size=32", "block-size", [EXACT]),
    (f"+{V}.logprobs_mode=raw_logprobs", "required processed_logprobs, those of the distribution that was sampled from", EVERY),
    (f"{R}.logprobs_mode=raw_logits", "required processed_logprobs, those of the distribution that was sampled from", EVERY),
    (f"{R}.temperature=0", "the lowest temperature at which vLLM samples", EVERY),
    (f"+{V}.logits_processors=[mine]", "logits_processors", [EXACT]),
]  # fmt: skip


@pytest.mark.parametrize(("override", "says", "refusing"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_a_setting_is_refused_once_in_exactly_these_modes(
    base: Compose, override: str, says: str, refusing: list[Config]
) -> None:
    verl_config = base(*override.split())
    for config in EVERY:
        problems = found(verl_config, config)
        assert len(problems) == (config in refusing), (config.precision, config.align, problems)
        if problems:
            assert says in problems[0] and split_fix(problems[0])[1] and len(problems[0]) < 330, problems[0]


def test_torchs_deterministic_mode_beside_cublaslt_is_refused_in_exact_mode(base: Compose) -> None:
    path = f"{A}.fsdp_config.full_determinism"
    verl_config = base(f"{path}=True")
    (problem,) = found(verl_config, EXACT.replace(backend="cublaslt"))
    assert f"{path} with" in problem and "cuBLAS workspace" in problem
    for config in (EXACT, LINEAR.replace(backend="cublaslt")):
        assert found(verl_config, config) == []


def test_what_the_official_scripts_hand_on_stays_accepted(base: Compose) -> None:
    verl_config = base(
        f"+{V}.mm_processor_cache_gb=0", f"+{V}.compilation_config.cudagraph_mode=FULL_DECODE_ONLY",
        f"+{V}.compilation_config.cudagraph_capture_sizes=[4,8]", f"+{V}.max_model_len=512", f"+{V}.async_scheduling=True",
        f"+{V}.tensor_parallel_size=1", f"+{V}.kv_cache_dtype=auto", f"+{V}.max-num-seqs=8", f"+{V}.hf_overrides={{}}",
        f"+{M}.override_config.max_position_embeddings=32768", f"+{M}.override_config.attention_dropout=0.",
        f"+{M}.override_config.output_router_logits=True", f"+{A}.fsdp_config.mixed_precision.reduce_dtype=bf16",
        f"{M}.trust_remote_code=True", f"{M}.hf_config_path=${{{M}.path}}",
    )  # fmt: skip
    for config in EVERY:
        assert found(verl_config, config) == []


@pytest.mark.parametrize("program", ["fully_async_policy/config:fully_async", "one_step_off_policy/config:one_step_off"])
def test_asynchronous_programs_are_accepted_with_a_rollout_of_their_own(program: str, base: Compose, tmp_path: Any) -> None:
    place, _, name = program.partition(":")
    folder = file_of("verl", "experimental", *place.split("/"))
    assert folder is not None
    config_of("qwen3").save_pretrained(tmp_path)
    search = f"hydra.searchpath=[file://{file_of('verl', 'trainer', 'config')}]"
    kept = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(folder), version_base=None):
            verl_config = compose(f"{name}_ppo_trainer", [search, *minimum(tmp_path)])
    finally:
        GlobalHydra.instance().hydra = kept
    verl_config.actor_rollout_ref.rollout.checkpoint_engine.backend = "nccl"
    able = [config for config in EVERY if config.precision != "fp16"]  # which needs a transfer in FP16
    for config in able:
        assert found(verl_config, config) == []
    if "async_training" not in verl_config:
        return
    for name in ("use_trainer_do_validate", "use_dynamic_resource_scheduling"):
        verl_config.async_training[name] = True
        for config in able:
            (problem,) = found(verl_config, config)
            assert name in problem and "a rollout that stays on its own devices" in problem
        verl_config.async_training[name] = False
    OmegaConf.update(verl_config, "async_training.invented_tomorrow", 1, force_add=True)
    for config in (EXACT, LINEAR, ROLLOUT):
        (problem,) = found(verl_config, config)
        assert "async_training.invented_tomorrow" in problem and "required a setting that verl 0.9 has, found 1" in problem
    assert found(verl_config, BF16) == []


def test_every_setting_of_the_asynchronous_trainers_is_refused_or_harmless() -> None:
    """A setting that a new version of verl adds fails here until it is reviewed."""
    folder = file_of("verl", "trainer", "config")
    program = file_of("verl", "experimental", "fully_async_policy", "config", "fully_async_ppo_trainer.yaml")
    assert folder is not None and program is not None
    plain, fully = (OmegaConf.load(path) for path in (folder / "ppo_trainer.yaml", program))
    sections = {rollout.PROGRAM: fully.async_training}
    sections |= {path: OmegaConf.select(plain, path) for path in (rollout.COLOCATED, rollout.SEPARATE)}
    settings = {path for section, value in sections.items() for path, _ in rollout.leaves(section, value)}
    refused = {rule.path for rule in rollout.ASYNC_RULES}
    assert settings == refused | set(rollout.HARMLESS) and not refused & set(rollout.HARMLESS)


UNSUPPORTED = [
    "verl.trainer.main_generation_server",
    "verl.trainer.sft_trainer",
    "/opt/verl/verl/trainer/sft_trainer_ray.py",
]
SUPPORTED = [
    "verl.experimental.fully_async_policy.fully_async_main", "verl.experimental.one_step_off_policy.main_ppo",
    "verl.trainer.main_ppo", "/opt/verl/verl/trainer/main_ppo.py", "verl.trainer.main_eval", "verl.model_merger.__main__",
    "train.py", "/home/verl/train.py", "recipe.dapo.main_dapo", "pytest.__main__", "",
]  # fmt: skip


@pytest.mark.parametrize("target", UNSUPPORTED)
def test_another_program_of_verl_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    problem = program_problem(target)
    assert isinstance(problem, ConfigError) and "Use verl.trainer.main_ppo" in str(problem)
    main = ModuleType("__main__")
    if target.endswith(".py"):
        main.__file__ = target
    else:
        main.__spec__ = SimpleNamespace(name=target)  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "__main__", main)
    for config in EVERY:
        with pytest.raises(JetrlError, match=r"jetrl_patch in verl\.(trainer|experimental)"):
            ADAPTER.check(config)


@pytest.mark.parametrize("target", SUPPORTED)
def test_other_programs_are_not(target: str) -> None:
    assert program_problem(target) is None is programs.program_problem(target)


def test_the_launcher_refuses_before_the_program_starts() -> None:
    words = [sys.executable, "-m", "jetrl_patch", "run", "--precision", "bf16", "-m", UNSUPPORTED[0], "x=y"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"jetrl: ConfigError: jetrl_patch in {UNSUPPORTED[0]}: required verl.trainer.main_ppo")
    assert done.stderr.count("\n") == 1
