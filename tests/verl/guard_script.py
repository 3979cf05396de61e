"""Run under torchrun: verl's real FSDP engines on two ranks with different data, and a model with ill-conditioned layers.

    torchrun --nproc_per_node=N guard_script.py fsdp|fsdp2 MODEL_DIR

Runs two steps and three syncs without a receiver. Every rank prints what it decided and announced, as one JSON line.
"""

import json
import sys

import jetrl_patch

if __name__ == "__main__":
    strategy, model_dir = sys.argv[1:3]
    jetrl_patch.enable(precision="fp8-unified", monitor_every=1, guard_sqnr=22.0)

    import torch
    from fsdp_engine import batch_of, build  # in this folder
    from verl.utils.distributed import destroy_global_process_group, initialize_global_process_group

    from jetrl_patch.sync.protocol import MANIFEST, Manifest

    torch.set_num_threads(1)
    _, rank, world = initialize_global_process_group()

    def engine(forward_only: bool):
        built = build(strategy, model_dir, forward_only=forward_only, optimizer={"lr": 0.0})
        built._build_model_optimizer()
        return built

    def batch(seed: int):
        generator = torch.Generator().manual_seed(seed)
        ids = [torch.randint(2, 384, (n,), generator=generator) for n in (31, 18)]
        return batch_of(ids)

    def log_probs(model):
        with model.eval_mode(disable_auto_offload=True):
            return model.infer_batch(batch(7))["model_output"]["log_probs"].values()

    def loss(model_output, data, dp_group=None):
        return -model_output["log_probs"].values().mean(), {}

    def sync(model):
        stream, _ = model.get_per_tensor_param()
        manifest = next(Manifest.decode(tensor) for name, tensor in stream if name == MANIFEST)
        return {"guarded": manifest.guarded, "metrics": model._jetrl.end_sync(), "lines": model._jetrl.take_lines()}

    actor, reference = engine(False), engine(True)
    fp8 = log_probs(actor)
    found = [sync(actor)]
    for _ in range(2):
        with actor.train_mode(disable_auto_offload=True):
            actor.train_batch(batch(rank), loss)
        found.append(sync(actor))
    ours, theirs = log_probs(actor), log_probs(reference)
    assert torch.equal(ours, theirs), "the reference computes with the same weights, and left FP8 with the actor"
    assert not torch.equal(ours, fp8), "three layers in BF16 change no bit"
    everybody = [None] * world
    torch.distributed.all_gather_object(everybody, found)
    if rank == 0:
        print("FACTS " + json.dumps(everybody))
    destroy_global_process_group()
