"""Run under torchrun: verl's real FSDP engine in FP16, patched, on the CPU.

    torchrun --nproc_per_node=N fp16_engine_script.py fsdp|fsdp2 MODEL_DIR

Trains a step, overflows on one rank, streams the weights, breaks one, and ends with a loss that stays NaN.
"""

import math
import sys

import jetrl_patch

if __name__ == "__main__":
    strategy, model_dir = sys.argv[1:]
    jetrl_patch.enable(precision="fp16")

    import pytest
    import torch
    from fsdp_engine import batch_of, build  # in this folder
    from verl.utils.distributed import destroy_global_process_group, initialize_global_process_group

    from jetrl_patch.adapters.verl.precision import wanted
    from jetrl_patch.adapters.verl.state import WORKER
    from jetrl_patch.config import Config
    from jetrl_patch.errors import ConflictError, PrecisionError, SyncError

    def figures():
        return WORKER.loss_scale.figures()

    torch.set_num_threads(1)
    _, rank, world = initialize_global_process_group()
    mixed = wanted(Config(precision="fp16"))["actor_rollout_ref.actor.fsdp_config.mixed_precision"]

    def engine(mixed_precision):
        built = build(strategy, model_dir, mixed_precision=mixed_precision)
        built._build_model_optimizer()
        return built

    with pytest.raises(ConflictError, match=r"required torch\.float16, found torch\.bfloat16"):
        engine(None)
    actor = engine(mixed)

    def weights():
        return {n: t.detach().clone() for n, t in type(actor).get_per_tensor_param.__wrapped__(actor)[0]}

    def step(factor=1.0):
        """Run one step on both ranks, with this rank's own loss factor."""
        generator = torch.Generator().manual_seed(rank)
        rows = [torch.randint(2, 384, (n,), generator=generator) for n in (9, 17)]
        batch = batch_of(rows)
        with actor.train_mode(disable_auto_offload=True):
            actor.train_batch(batch, lambda model_output, data, dp_group=None: (
                -1e-3 * factor * model_output["log_probs"].values().mean(), {}
            ))  # fmt: skip

    def same(a, b):
        return all(torch.equal(a[name], b[name]) for name in a)

    def on_all_ranks(value):
        everybody = [None] * world
        torch.distributed.all_gather_object(everybody, value)
        return all(each == everybody[0] for each in everybody)

    start = weights()
    assert all(weight.dtype == torch.float32 for weight in start.values())
    assert str(type(actor.scaler).__name__) == "ShardedGradScaler" and actor.scaler.is_enabled()
    step()
    trained = weights()
    assert not same(start, trained) and figures() == {"loss_scale": 2.0**16, "skipped_steps": 0.0}, figures()

    step(1e30 if rank == world - 1 else 1.0)  # the last rank overflows, so all ranks skip
    assert same(trained, weights()) and figures() == {"loss_scale": 2.0**15, "skipped_steps": 1.0}, figures()
    assert on_all_ranks(figures())
    step()
    after = weights()
    assert not same(trained, after) and figures() == {"loss_scale": 2.0**15, "skipped_steps": 1.0}, figures()

    sent = dict(actor.get_per_tensor_param()[0])
    assert sent.keys() == after.keys()
    assert all(torch.equal(sent[name], after[name].half()) for name in sent)

    with torch.no_grad():
        for parameter in actor.module.parameters():
            getattr(parameter, "_local_tensor", parameter).view(-1)[:1] = 1e5
    with pytest.raises(SyncError, match=r"\|w\| = 100000, which FP16 cannot hold"):
        list(actor.get_per_tensor_param()[0])
    for _ in range(15):
        step(math.nan)
    assert figures() == {"loss_scale": 1.0, "skipped_steps": 16.0}, figures()
    with pytest.raises(PrecisionError, match="at the smallest loss scale"):
        step(math.nan)
    if rank == 0:
        print("FACTS fine")
    destroy_global_process_group()
