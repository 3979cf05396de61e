"""The Hydra overrides of verl that a CPU run needs.

They fit the run to a CPU's size and features and do not depend on the precision mode.
``python -m jetrl_patch.adapters.cpu.verl_overrides`` prints them for a shell.
"""

from __future__ import annotations


def cpu_overrides(processes: int = 1) -> list[str]:
    """Return the overrides for ``python -m verl.trainer.main_ppo``.

    Args:
        processes: training processes, and Ray's logical GPUs; also the upper limit of vLLM's tensor-parallel size.
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
        # the engine shares the memory of the machine with the trainer: no sleeping, a small KV cache
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
