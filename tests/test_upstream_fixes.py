"""Fixes for bugs of other projects: which patches they are, when they are applied, and whether they are still needed.

Everything is read from the real adapters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from jetrl_patch import registry, session
from jetrl_patch._versions import SUPPORTED
from jetrl_patch.config import Config
from jetrl_patch.config.modes import MODES
from jetrl_patch.patching.patch import NO_REPORT, OnImport, Patch

PLATFORMS = ("cpu", "cuda")
MASKED = {"bf16": {"correction": "mis"}, "fp8-unified": {"align": "linear", "correction": "mis"}}
CONFIGS = [
    Config(precision=precision, platform=platform, **settings)
    for platform in PLATFORMS
    for precision in MODES
    for settings in ({}, MASKED.get(precision, {}))
]
#: what a fix may be needed by, so that no setting turns it off
NEEDED_BY = {
    "",
    "a run on a CPU",
    "weight syncs on a CPU",
    "speculative decoding on a CPU",
    "training GLM-4.1V in verl",
    "a trainer and an eager engine in one process, as in `jetrl parity`",
}


def of(config: Config) -> list[Patch | OnImport]:
    """All that the adapters list for these settings, before ``upstream_fixes`` has its effect."""
    return [what for adapter in registry.adapters() for what in (*adapter.patches(config), *adapter.hooks(config))]


def key(what: Patch | OnImport) -> str:
    return f"{what.fixes}: {what.target}"


EVERY = {(what.target, what.reason): what for config in CONFIGS for what in of(config)}
FIXES = [what for what in EVERY.values() if what.fixes]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_no_patch_is_listed_twice(config: Config) -> None:
    """Applied twice, a replacement would wrap itself."""
    listed = [(what.target, getattr(what, "make", None)) for what in of(config)]
    assert len(listed) == len(set(listed)), [target for target, make in listed if listed.count((target, make)) > 1]


#: fix -> a module of the installed release, and the part of its source that is wrong
BUGS = {
    "vllm: vllm.engine.arg_utils.EngineArgs.create_engine_config": (
        "vllm.model_executor.model_loader.weight_utils",
        "for param in model.state_dict().values():\n        initialize_single_dummy_weight(",
    ),
    "vllm: vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm": (
        "vllm.model_executor.layers.utils",
        "layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)",
    ),
    "vllm: vllm.model_executor.layers.rotary_embedding.base.RotaryEmbedding.forward_cpu": (
        "vllm.model_executor.layers.rotary_embedding.base",
        "ops.rotary_embedding(\n            positions,\n            query,\n            key,",
    ),
    "vllm: vllm.model_executor.layers.attention.mla_attention.MLAAttention.process_weights_after_loading": (
        "vllm.model_executor.layers.attention.mla_attention",
        "self.kv_b_proj.weight = torch.nn.Parameter(",
    ),
    "vllm: vllm.distributed.device_communicators.shm_broadcast.MessageQueue.wait_until_ready": (
        "vllm.distributed.device_communicators.shm_broadcast",
        "self.shared_memory.close()\n            if self.is_creator:\n                self.shared_memory.unlink()",
    ),
    "vllm: vllm.distributed.device_communicators.cpu_communicator._CPUSHMDistributed._init_cpu_shm": (
        "vllm.distributed.device_communicators.cpu_communicator",
        "torch.distributed.barrier(self.communicator.device_group)\n\n        return handle",
    ),
    "vllm: vllm.v1.engine.utils.CoreEngineProcManager.finished_procs": (
        "vllm.v1.engine.utils",
        "proc.name: proc.exitcode\n            for proc in self.processes\n            if proc.exitcode is not None",
    ),
    "vllm: vllm.v1.engine.core_client.AsyncMPClient._ensure_output_queue_task": (
        "vllm.v1.engine.core_client",
        "except asyncio.CancelledError:\n                outputs_queue.put_nowait(EngineDeadError())\n\n        resources.output",
    ),
    "vllm: vllm.model_executor.models.transformers.base.Base._decorate_for_torch_compile": (
        "vllm.model_executor.models.transformers.base",
        "self._decorate_cls_for_torch_compile(\n            cls=self._pre_trained_model_classes.decoder,",
    ),
    "vllm: vllm.v1.sample.rejection_sampler._expand.kernel": (
        "vllm.v1.worker.cpu_model_runner",
        "vllm.v1.sample.rejection_sampler.expand_kernel = cpu_tl.expand_kernel",
    ),
    **{
        f"vllm: vllm.v1.sample.rejection_sampler._{kernel}.kernel": (
            "vllm.v1.worker.cpu_model_runner",
            f"vllm.v1.sample.rejection_sampler.{kernel}_kernel = (\n            cpu_tl.{kernel}_kernel\n",
        )
        for kernel in ("rejection_greedy_sample", "rejection_random_sample", "sample_recovered_tokens")
    },
    "tqdm: tqdm.std.TqdmDefaultWriteLock.create_mp_lock": ("tqdm.std", "cls.mp_lock = RLock()"),
    "torch: torch.utils.file_baton.FileBaton.wait": (
        "torch.utils.cpp_extension",
        "baton = FileBaton(os.path.join(build_directory, 'lock'))",
    ),
    "verl: verl.workers.engine_workers.maybe_fix_3d_position_ids": (
        "verl.utils.tensordict_utils",
        'data["position_ids"]._ragged_idx = 2',
    ),
    "verl: verl.workers.engine.base.maybe_fix_3d_position_ids": (
        "verl.utils.tensordict_utils",
        'data["position_ids"]._ragged_idx = 2',
    ),
    "verl: verl.models.transformers.qwen2_vl._get_input_embeds": (
        "verl.models.transformers.qwen2_vl",
        "image_embeds = model.visual(pixel_values, grid_thw=image_grid_thw)\n        inputs_embeds = inputs_embeds + 0.0 *",
    ),
    "verl: verl.models.transformers.glm4v._get_input_embeds": (
        "verl.models.transformers.glm4v",
        "image_embeds = model.visual(pixel_values, grid_thw=image_grid_thw)\n        n_image_tokens =",
    ),
    "verl: verl.workers.rollout.vllm_rollout.vllm_async_server.qwen2_5_vl_dedup_image_tokens": (
        "verl.workers.rollout.utils",
        '"Qwen2VLImageProcessor" in processor.image_processor.__class__.__name__',
    ),
    "verl: verl.utils.flops_counter.FlopsCounter.__init__": ("verl.utils.flops_counter", "        self.config = config\n"),
    "verl: verl.models.transformers.qwen2_vl.forward_with_torch_backend": (
        "verl.models.transformers.qwen2_vl",
        "vocab_weights=self.lm_head.weight,",
    ),
    "verl: verl.models.transformers.qwen3_vl.forward_with_torch_backend": (
        "verl.models.transformers.qwen3_vl",
        "vocab_weights = vocab_weights.full_tensor()",
    ),
    "verl: verl.models.transformers.qwen3_5.forward_with_torch_backend": (
        "verl.models.transformers.qwen3_5",
        "vocab_weights = vocab_weights.full_tensor()",
    ),
    "verl: verl.models.transformers.glm4v.forward_with_torch_backend": (
        "verl.models.transformers.glm4v",
        "vocab_weights=self.lm_head.weight,",
    ),
    "verl: verl.models.transformers.qwen3_5._call_accepts_kwarg": (
        "verl.models.transformers.qwen3_5",
        "any(param.kind == param.VAR_KEYWORD for param in params.values())",
    ),
    "verl: verl.workers.engine.fsdp.transformer_impl.FSDPEngine._build_module": (
        "verl.models.transformers.monkey_patch",
        "Insert all-to-all before and after flash attention.",
    ),
    "verl: verl.trainer.ppo.rollout_corr_helper.compute_is_metrics": (
        "verl.trainer.ppo.rollout_corr_helper",
        "1.0 / verl_F.masked_mean(is_weights_normalized.square(), response_mask).item()",
    ),
    "openrlhf: vllm.v1.engine.async_llm.AsyncLLM.generate": (
        "openrlhf.trainer.ppo_utils.samples_generator",
        'logprobs=1 if self.args.algo.advantage.is_correction_level != "off" else None,\n        )',
    ),
    "openrlhf: vllm.v1.engine.async_llm.AsyncLLM.collective_rpc": (
        "openrlhf.trainer.ray.vllm_engine",
        "async def reset_prefix_cache(self):\n        await self.llm.reset_prefix_cache()\n",
    ),
    "openrlhf: openrlhf.trainer.ray.ppo_actor.ActorPPOTrainer._init_vllm_sync_group": (
        "openrlhf.trainer.ray.ppo_actor",
        "master_address, master_port, 0, world_size, torch.cuda.current_device()",
    ),
    # a run on a CPU: verl
    "verl: importlib.metadata.version": ("verl.utils.vllm.vllm_quant_utils", 'importlib.metadata.version("vllm")'),
    "verl: torch.distributed.init_process_group": (
        "verl.utils.distributed",
        'f"cpu:gloo,{get_device_name()}:{get_nccl_backend()}"',
    ),
    "torch: torch.distributed.fsdp._init_utils._check_module_states_for_sync_module_states": (
        "torch.distributed.fsdp._init_utils",
        'tensor.device == torch.device("cpu") for tensor in module_states',
    ),
    "torch: torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel.__init__": (
        "torch.distributed.fsdp._flat_param",
        "flat_param._local_shard = flat_param._local_shard.pin_memory()",
    ),
    "verl: verl.utils.model.load_valuehead_model": ("verl.utils.model", 'attn_implementation="flash_attention_2",'),
    "verl: verl.workers.engine.fsdp.transformer_impl.load_fsdp_model_to_gpu": (
        "verl.utils.fsdp_utils",
        'torch.device(f"{get_device_name()}:{device_id}")',
    ),
    "verl: verl.workers.engine.fsdp.transformer_impl.CPUOffloadPolicy": (
        "verl.workers.engine.fsdp.transformer_impl",
        "offload_policy = CPUOffloadPolicy(pin_memory=True)",
    ),
    "verl: verl.workers.rollout.vllm_rollout.bucketed_weight_transfer.BucketedWeightReceiver.receive_weights": (
        "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer",
        "if self.use_shm:\n                        tensor = tensor.to(self.device)",
    ),
    # a run on a CPU: OpenRLHF
    "openrlhf: openrlhf:torch.cuda": ("openrlhf.trainer.ray.launcher", "torch.cuda.synchronize()"),
    "openrlhf: openrlhf.utils.deepspeed.deepspeed.init_device_mesh": (
        "openrlhf.utils.deepspeed.deepspeed",
        'init_device_mesh(\n            "cuda",',
    ),
    "openrlhf: openrlhf.utils.deepspeed.deepspeed.get_train_ds_config": (
        "openrlhf.utils.deepspeed.deepspeed_utils",
        '"device": "cpu" if adam_offload else "none",\n            "pin_memory": True,',
    ),
    "openrlhf: openrlhf.utils.deepspeed.deepspeed.get_eval_ds_config": (
        "openrlhf.utils.deepspeed.deepspeed_utils",
        '"device": "cpu" if offload else "none",\n            "pin_memory": True,',
    ),
    "openrlhf: openrlhf.utils.deepspeed.deepspeed.DeepspeedStrategy.moving_average": (
        "openrlhf.trainer.ray.ppo_actor",
        'self.strategy.moving_average(self.actor, self.ema_model, self.ema_beta, "cuda")',
    ),
    "openrlhf: openrlhf.utils.distributed_util.stateless_init_process_group": (
        "openrlhf.utils.distributed_util",
        "pynccl = PyNcclCommunicator(pg, device=device)",
    ),
    "openrlhf: openrlhf.trainer.ray.ppo_actor.stateless_init_process_group": (
        "openrlhf.utils.distributed_util",
        "pynccl = PyNcclCommunicator(pg, device=device)",
    ),
    "openrlhf: openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap.update_weight": (
        "openrlhf.trainer.ray.vllm_worker_wrap",
        'weight = torch.empty(shape, dtype=dtype, device="cuda")',
    ),
    "deepspeed: deepspeed.accelerator.cpu_accelerator.CPU_Accelerator.is_fp16_supported": (
        "deepspeed.accelerator.cpu_accelerator",
        "if torch.ops.mkldnn._is_mkldnn_fp16_supported():",
    ),
    "deepspeed: deepspeed.comm.torch.TorchBackend.all_gather": (
        "deepspeed.comm.torch",
        "return torch.distributed.all_gather(tensor_list=tensor_list, tensor=tensor, group=group, async_op=async_op)",
    ),
    "deepspeed: deepspeed.comm.torch.TorchBackend.all_gather_into_tensor": (
        "deepspeed.comm.torch",
        "return self.all_gather_function(output_tensor=output_tensor,",
    ),
    "openrlhf: vllm.engine.arg_utils.EngineArgs.create_engine_config": (
        "openrlhf.trainer.ray.vllm_engine",
        'distributed_executor_backend = "uni" if tensor_parallel_size == 1 else "ray"',
    ),
    "openrlhf: ray.init": ("openrlhf.trainer.ray.launcher", "@ray.remote(num_gpus=1)"),
}


def planned(config: Config) -> set[str]:
    """The fixes that ``enable(config)`` applies."""
    return {f"{patch.fixes}: {patch.target}" for patch in session.preview(config) if patch.fixes}


def ids(patches: list[Patch | OnImport]) -> list[str]:
    return [key(what) for what in patches]


@pytest.mark.parametrize("what", FIXES, ids=ids(FIXES))
def test_a_fix_names_a_thread_or_says_that_there_is_none(what: Patch | OnImport) -> None:
    thread = re.fullmatch(r"https://github\.com/[\w-]+/[\w-]+/(issues|pull)/\d+", what.upstream)
    assert thread or what.upstream == NO_REPORT, what.upstream
    assert what.needed_by in NEEDED_BY
    assert what.fixes in ("vllm", "verl", "openrlhf", "torch", "deepspeed", "tqdm")


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("settings", [{}, MASKED["bf16"]], ids=["plain", "masked"])
def test_bf16_has_only_fixes_without_which_it_does_not_start(platform: str, settings: dict[str, str]) -> None:
    config = Config(precision="bf16", platform=platform, **settings)
    every = {key(what): what for what in of(config) if what.fixes}
    needed = {name for name, what in every.items() if what.needed_by}
    assert planned(config) == needed
    assert planned(config.replace(upstream_fixes=True)) == set(every) > needed
    cpu = {name for name in needed if every[name].needed_by == "a run on a CPU"}
    assert bool(cpu) is (platform == "cpu")


@pytest.mark.parametrize("precision", sorted(set(MODES) - {"bf16"}))
def test_every_other_mode_has_all_of_them_unless_told_otherwise(precision: str) -> None:
    config = Config(precision=precision, platform="cpu")
    every = {key(what): what for what in of(config) if what.fixes}
    assert planned(config) == planned(config.replace(upstream_fixes=True)) == set(every)
    assert planned(config.replace(upstream_fixes=False)) == {name for name, what in every.items() if what.needed_by}


@pytest.mark.parametrize("precision", list(MODES))
def test_the_plugins_own_patches_do_not_depend_on_it(precision: str) -> None:
    every = [session.preview(Config(precision=precision, upstream_fixes=on)) for on in (True, False)]
    own = [[patch for patch in patches if not patch.fixes] for patches in every]
    assert own[0] == own[1] and len(every[0]) > len(every[1])


def projects() -> Iterator[str]:
    yield from (*SUPPORTED, "pytorch", "deepspeed", "tqdm")


@pytest.mark.parametrize("what", EVERY.values(), ids=[what.target for what in EVERY.values()])
def test_a_patch_names_the_upstream_change_that_ends_it(what: Patch | OnImport) -> None:
    if isinstance(what, OnImport) and not what.fixes:  # mostly entries in registries, which are there to stay
        return
    words = what.remove_when.lower()
    assert any(project in words for project in projects()), what.remove_when
    assert len(words.split()) > 2 and "extension point" not in words, what.remove_when


def outdated(text: str) -> list[str]:
    """The releases named in ``text`` that the oldest supported version has reached: ``vllm 0.24``."""
    found = []
    for project, release in re.findall(r"\b(\w+) (\d+\.\d+(?:\.\d+)?)", text):
        if project.lower() in SUPPORTED:
            required = SpecifierSet(SUPPORTED[project.lower()][0])
            oldest = min(Version(part.version) for part in required if part.operator == ">=")
            if Version(release) <= oldest:
                found.append(f"{project} {release}")
    return found


def test_a_release_that_all_supported_versions_have_reached_is_seen() -> None:
    assert outdated("vLLM 0.24 has vllm#1") == ["vLLM 0.24"] == outdated("verl has it, vLLM 0.24 too")
    assert outdated("vLLM 0.99 has vllm#1, and torch 99.0") == outdated("vLLM keeps the weight") == []


@pytest.mark.parametrize("what", EVERY.values(), ids=[what.target for what in EVERY.values()])
def test_no_supported_version_has_left_a_patch_behind(what: Patch | OnImport) -> None:
    """Where ``remove_when`` names a release, some supported version is older."""
    assert outdated(what.remove_when) == [], f"{what.target} is needed by no supported version: remove it"


def test_every_fix_has_its_bug_and_every_bug_its_fix() -> None:
    assert {key(what) for what in FIXES} == set(BUGS)


@pytest.mark.parametrize("name", BUGS)
def test_the_bug_is_still_in_the_installed_release(name: str) -> None:
    """Otherwise upstream has changed the patched code: check which supported versions still need the patch."""
    dotted, fragment = BUGS[name]
    root, *rest = dotted.split(".")
    spec = find_spec(root)
    assert spec is not None and spec.submodule_search_locations
    file = Path(spec.submodule_search_locations[0]).joinpath(*rest)
    source = (file.with_suffix(".py") if not file.is_dir() else file / "__init__.py").read_text()
    assert fragment in source, f"{name}: {dotted} no longer has {fragment!r}"
