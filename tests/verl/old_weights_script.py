"""Run under torchrun: verl's real FSDP engines update several times between two syncs, patched, on the CPU.

    torchrun --nproc_per_node=N old_weights_script.py MODEL_DIR two|all|gather

For each placement of the parameters: the weights after two cycles with verl's own save and restore are those without, bit for
bit, and every pass for old log-probs of a cycle has the bits of its first. Then the copies are taken away: the first restore
that loses something raises. Prints one JSON line of facts on rank 0.
"""

import json
import sys
from types import SimpleNamespace

import jetrl_patch

UPDATES, CYCLES = 3, 2
PLACEMENTS = [
    ("fsdp2", {"param_offload": True, "optimizer_offload": True}),
    ("fsdp2", {}),
    ("fsdp2", {"offload_policy": True}),
    ("fsdp", {}),
]

if __name__ == "__main__":
    model_dir, which = sys.argv[1:]
    jetrl_patch.enable(precision="fp8-unified", fp8_all_gather=which == "gather")

    import torch
    from fsdp_engine import batch_of, build  # in this folder
    from verl.experimental.separation.engine_workers import DetachActorWorker
    from verl.utils.distributed import destroy_global_process_group, initialize_global_process_group
    from verl.workers.engine.fsdp import transformer_impl

    from jetrl_patch.adapters.verl import old_log_probs
    from jetrl_patch.errors import AuditError

    # on a GPU param_offload makes new tensors at each move; on a CPU a move is none
    transformer_impl.load_fsdp_model_to_gpu = lambda module: module._apply(torch.clone)
    torch.set_num_threads(1)
    _, rank, world = initialize_global_process_group()
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(2, 384, (n,), generator=generator) for n in (9, 33, 17, 26)]

    def worker_of(strategy, placement):
        engine = build(strategy, model_dir, **placement)
        engine._build_model_optimizer()
        worker = object.__new__(DetachActorWorker)
        worker.config = SimpleNamespace(actor=SimpleNamespace(strategy=strategy))
        worker.actor, worker._strategy_handlers = SimpleNamespace(engine=engine), None
        return worker

    def log_probs(engine):
        with engine.eval_mode():
            output = engine.infer_batch(batch_of(sequences))
        return [t[:-1].clone() for t in output["model_output"]["log_probs"].unbind()]

    def loss(model_output, data, dp_group=None):
        return -model_output["log_probs"].values().mean(), {}

    def weights(engine):
        return {name: tensor.detach().clone() for name, tensor in type(engine).get_per_tensor_param.__wrapped__(engine)[0]}

    def train(worker, restoring):
        """As ``PPOTrainerSeparateAsync`` does. Returns the weights, and the old log-probs of each update of each cycle."""
        engine, passes = worker.actor.engine, []
        for _ in range(CYCLES):
            passes.append([])
            for i in range(UPDATES):
                if restoring:
                    worker.save_model_to_cpu(i)
                    if i:
                        worker.restore_model_from_cpu(0)
                passes[-1].append(log_probs(engine))
                if restoring and i:
                    worker.restore_model_from_cpu(i)
                    worker.clear_cpu_model(i)
                with engine.train_mode():
                    engine.train_batch(batch_of([sequences[(i + rank) % 4]]), loss)
        return weights(engine), passes

    def same(left, right):
        return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))

    facts = []
    for strategy, placement in PLACEMENTS if which == "all" else PLACEMENTS[:2]:
        plain, current = train(worker_of(strategy, placement), restoring=False)
        found, old = train(worker_of(strategy, placement), restoring=True)
        assert plain.keys() == found.keys()
        facts.append({
            "placement": [strategy, *placement],
            "equal": sum(torch.equal(plain[name], found[name]) for name in plain), "tensors": len(plain),
            "first": all(same(cycle[0], now[0]) for cycle, now in zip(old, current, strict=True)),
            "kept": all(same(cycle[0], later) for cycle in old for later in cycle),
            "moved": not any(same(cycle[0], later) for cycle in current for later in cycle[1:]),
        })  # fmt: skip

    old_log_probs._own = lambda saved, parameters: dict(saved)
    try:
        train(worker_of(*PLACEMENTS[0]), restoring=True)
        said = "nothing"
    except AuditError as error:
        said = str(error)
    if rank == 0:
        print("FACTS " + json.dumps({"runs": facts, "without copies": said}))
    destroy_global_process_group()
