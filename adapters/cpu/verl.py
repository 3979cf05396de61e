"""What verl 0.9.1 needs to run on a CPU: Hydra overrides and patches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jetrl_patch.adapters.cpu import CpuPatch, vllm_cpu_version
from jetrl_patch.patching.patch import replacement

# ---- The Hydra overrides of a CPU run ------------------------------------------------------------
# They fit the run to a CPU, whatever the precision. ``python -m jetrl_patch.adapters.cpu.verl`` prints them for a shell.

def cpu_overrides(processes: int = 1) -> list[str]:
    """Return the overrides for ``python -m verl.trainer.main_ppo``.

    ``processes`` is the number of training processes and of Ray's logical GPUs, and vLLM's largest tensor-parallel size.
    """
    actor, ref, rollout = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout"))
    return [
        "trainer.device=cpu",
        f"trainer.n_gpus_per_node={processes}",
        "trainer.nnodes=1",
        # no flash attention, no compiler
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.model.use_remove_padding=False",
        f"{actor}.use_torch_compile=False",
        f"{actor}.fsdp_config.use_torch_compile=False",
        f"{ref}.fsdp_config.use_torch_compile=False",
        # engine and trainer share the machine's memory: no sleep mode, a small KV cache
        f"{rollout}.free_cache_engine=False",
        f"+{rollout}.enable_sleep_mode=False",
        f"{rollout}.enforce_eager=True",
        f"+{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes={64 << 20}",
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes=64",
        # few and small processes
        f"{rollout}.agent.num_workers=1",
        "reward.num_workers=1",
        "data.dataloader_num_workers=0",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "ray_kwargs.ray_init.num_cpus=16",
        f"+ray_kwargs.ray_init.num_gpus={processes}",
        "+ray_kwargs.ray_init.include_dashboard=False",
        f"+ray_kwargs.ray_init.object_store_memory={200_000_000}",
    ]


if __name__ == "__main__":
    print(" ".join(cpu_overrides()))


# ---- Patches for verl 0.9.1 on a CPU -------------------------------------------------------------
# The patch that makes weights reloadable on a CPU is in the vLLM adapter, because vLLM needs it without verl too.

@replacement
def _version(original: Any, distribution_name: str) -> Any:
    found = vllm_cpu_version() if distribution_name == "vllm" else None
    return original(distribution_name) if found is None else found


@replacement
def _init_process_group(original: Any, backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
    if isinstance(backend, str) and backend.replace(" ", "") == "cpu:gloo,cpu:gloo":
        backend = "cpu:gloo"
    return original(backend, *args, **kwargs)


@replacement
def _check_sync_module_states(original: Any, module_states: Any) -> None:
    if any(state.device.type != "cpu" for state in module_states):
        original(module_states)


@replacement
def _fsdp1_init(original: Any, self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    if getattr(kwargs.get("device_id"), "type", None) == "cpu":
        kwargs["cpu_offload"] = None
    original(self, module, *args, **kwargs)


@replacement
def _load_fsdp_model(original: Any, model: Any) -> None:
    from verl.utils.fsdp_utils import fsdp_version

    if fsdp_version(model) != 1:
        original(model)


@replacement
def _offload_policy(original: Any, pin_memory: bool = True) -> Any:
    return original(pin_memory=False)


@replacement
def _receive_weights(original: Any, self: Any, on_bucket_received: Callable[..., Any]) -> Any:
    def with_copies(weights: list[tuple[str, Any]], is_last: bool) -> None:
        on_bucket_received([(name, tensor.clone()) for name, tensor in weights], is_last)

    return original(self, on_bucket_received=with_copies)


@replacement
def _load_valuehead_model(original: Any, local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForTokenClassification

    settings = {"torch_dtype": torch_dtype, "config": model_config, "trust_remote_code": trust_remote_code}
    return AutoModelForTokenClassification.from_pretrained(local_path, attn_implementation="sdpa", **settings)


#: the open request for CPU support in verl
NO_CPU = "https://github.com/verl-project/verl/issues/3266"

VERSION = CpuPatch(
    "importlib.metadata", "version", _version, fixes="verl",
    reason="verl looks up the version of the distribution 'vllm' and fails, because the CPU build is called vllm-cpu",
    remove_when="vLLM's CPU build is published as vllm, or verl.utils.vllm.vllm_quant_utils reads vllm.__version__",
)

FOR_TORCH = (
    CpuPatch(
        "torch.distributed", "init_process_group", _init_process_group, fixes="verl",
        reason="verl appends the platform's backend to 'cpu:gloo', and torch rejects 'cpu:gloo,cpu:gloo' as a duplicate",
        upstream=NO_CPU,
        remove_when="verl.utils.distributed passes torch one backend per device type",
    ),
    CpuPatch(
        "torch.distributed.fsdp._init_utils", "_check_module_states_for_sync_module_states",
        _check_sync_module_states, fixes="torch",
        reason="FSDP1 rejects sync_module_states with CPU parameters, although gloo can broadcast them",
        upstream="https://github.com/pytorch/pytorch/pull/83663",
        remove_when="torch's _check_module_states_for_sync_module_states accepts CPU parameters if the group has a CPU backend",
    ),
    CpuPatch(
        "torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel.__init__", _fsdp1_init, fixes="torch",
        reason="FSDP1 offloads verl's reference model to pinned memory, which needs an accelerator and saves nothing on a CPU",
        remove_when="torch's FSDP1 calls pin_memory only if there is an accelerator",
    ),
)

FOR_VERL = (
    CpuPatch(
        "verl.utils.model", "load_valuehead_model", _load_valuehead_model, fixes="verl",
        reason="verl loads every critic with flash attention, whatever its configuration says, and blames a missing trl when "
        "that fails. A critic that only trl can load is not covered",
        upstream="https://github.com/verl-project/verl/issues/5210",
        remove_when="verl.utils.model.load_valuehead_model takes the critic's attn_implementation",
    ),
    CpuPatch(
        "verl.workers.engine.fsdp.transformer_impl", "load_fsdp_model_to_gpu", _load_fsdp_model, fixes="verl",
        reason="with FSDP1 verl builds torch.device('cpu:cpu'), which torch rejects; on a CPU there is nothing to load",
        upstream=NO_CPU,
        remove_when="verl.utils.fsdp_utils.load_fsdp_model_to_gpu supports a device without an index",
    ),
    CpuPatch(
        "verl.workers.engine.fsdp.transformer_impl", "CPUOffloadPolicy", _offload_policy, fixes="verl",
        reason="verl's FSDP2 reference model offloads to pinned memory, which needs an accelerator",
        upstream=NO_CPU,
        remove_when="verl's FSDPEngine passes pin_memory=False to CPUOffloadPolicy on a platform that cannot pin",
    ),
    CpuPatch(
        "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer", "BucketedWeightReceiver.receive_weights",
        _receive_weights, fixes="verl",
        reason="on a CPU, verl's received weights stay views of the shared memory, whose close() then raises BufferError and "
        "leaves the sender waiting",
        remove_when="verl's BucketedWeightReceiver.receive_weights clones tensors, or drops views before it closes the memory",
    ),
)
