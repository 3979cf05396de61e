"""Run under torchrun: verl's real FSDP engine with LoRA, patched, on the CPU.

    torchrun --nproc_per_node=N lora_script.py fsdp|fsdp2 MODEL_DIR FOLDER fp32|8bit|fp8 [ADAPTER]

Trains adapters, streams the weights, and builds a second engine of a plain checkpoint with the streamed weights' values: its
log-probs must be the same bits. A third engine resumes. With ADAPTER the first starts from a saved one.
Prints one JSON line of facts on rank 0.
"""

import json
import sys
from pathlib import Path

import jetrl_patch

if __name__ == "__main__":
    strategy, model_dir, folder, states, *adapter = sys.argv[1:]
    jetrl_patch.enable(precision="fp8-unified", exclude=("layers.1.mlp.down_proj",), optimizer_states=states)

    import torch
    from fsdp_engine import batch_of, build  # in this folder
    from merged_by_hand import assert_sent, merged_values
    from torch.distributed.tensor import DTensor
    from transformers import AutoModelForCausalLM
    from verl.trainer.config import CheckpointConfig
    from verl.utils.distributed import destroy_global_process_group, initialize_global_process_group

    from jetrl_patch.adapters.verl.precision import optimizer_wanted
    from jetrl_patch.session import active_config
    from jetrl_patch.sync.protocol import COMMIT, decode_json

    torch.set_num_threads(1)
    torch.manual_seed(0)
    _, rank, world = initialize_global_process_group()
    lora = {"lora_rank": 8, "lora_alpha": 16, "lora": {"merge": True}, "exclude_modules": r".*layers\.2\..*q_proj"}
    if adapter:
        lora["lora_adapter_path"] = adapter[0]

    optimizer = optimizer_wanted({"actor_rollout_ref.actor.strategy": strategy}.get, active_config())
    optimizer = {path.rpartition(".")[2]: value for path, value in optimizer.items()}

    def engine(path, **model):
        built = build(strategy, path, model=model, optimizer=optimizer, checkpoint=CheckpointConfig())
        built.initialize()
        return built

    def batch(rows: list[int]):
        generator = torch.Generator().manual_seed(1)
        sequences = [torch.randint(2, 384, (n,), generator=generator) for n in (9, 33, 17, 26)]
        chosen = [sequences[i] for i in rows]
        return batch_of(chosen)

    def log_probs(model):
        with model.eval_mode(disable_auto_offload=True):
            output = model.infer_batch(batch([0, 1, 2, 3]))
        # the last label of a sequence comes from its neighbour and has no meaning
        return torch.cat([t[:-1].clone() for t in output["model_output"]["log_probs"].unbind()])

    def reference(model):
        with model.disable_adapter():
            return log_probs(model)

    def loss(model_output, data, dp_group=None):
        return -model_output["log_probs"].values().mean(), {}

    def train(model, steps=1):
        with model.train_mode(disable_auto_offload=True):
            for _ in range(steps):
                model.train_batch(batch([2 * (rank % 2), 2 * (rank % 2) + 1]), loss)

    def state(model):
        tensors = model.module.state_dict()
        return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in tensors.items()}

    def sync(model):
        stream, peft = model.get_per_tensor_param(layered_summon=True, base_sync_done=True)  # as verl's worker calls it
        assert peft is None
        return {name: tensor.clone() for name, tensor in stream}

    def digests(model):
        return decode_json(sync(model)[COMMIT], COMMIT)["digests"]

    plain, actor = engine(model_dir), engine(model_dir, **lora)
    assert len(actor._jetrl.adapters) == 20 and len(actor._jetrl.layers) == 20
    before = log_probs(plain)
    assert torch.equal(reference(actor), before), "without adapters the actor is the reference model"
    assert torch.equal(log_probs(actor), before) is not bool(adapter), "B starts at zero, unless an adapter was loaded"
    first = state(actor)
    train(actor, 2)
    after, trained = log_probs(actor), state(actor)
    changed = {name for name in first if not torch.equal(first[name], trained[name])}
    assert changed == {name for name in first if "lora_" in name} and len(changed) == 40
    assert not torch.equal(after, before), "training changed nothing"
    for _ in range(2):  # W and W' take turns
        assert torch.equal(reference(actor), before) and torch.equal(log_probs(actor), after)

    # what is sent: W' by hand, under the names of the plain model
    sent = sync(actor)
    values = merged_values(trained)
    assert_sent(sent, values, actor._jetrl.layers)
    everybody = [None] * world
    sums = decode_json(sent[COMMIT], COMMIT)["digests"]
    torch.distributed.all_gather_object(everybody, sums)
    assert all(d == sums for d in everybody), "ranks send different bytes"
    assert all(torch.equal(a, b) for a, b in zip(state(actor).values(), trained.values(), strict=True)), "the sync wrote to W"

    # a plain model that holds these values computes the same bits
    merged = Path(folder) / f"merged-{strategy}-{world}-{bool(adapter)}"
    if rank == 0:
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
        model.load_state_dict(values)
        model.save_pretrained(merged)
    torch.distributed.barrier()
    assert torch.equal(log_probs(engine(str(merged))), after), "trainer and rollout compute with different weights"

    # resuming gives the same bits, and the next step too
    saved = Path(folder) / f"checkpoint-{strategy}-{world}-{bool(adapter)}"
    actor.save_checkpoint(str(saved))
    torch.manual_seed(99)  # another A than the one saved
    resumed = engine(model_dir, **lora)
    resumed.load_checkpoint(str(saved), del_local_after_load=False)
    assert digests(resumed) == sums and torch.equal(log_probs(resumed), after)
    train(actor), train(resumed)
    assert torch.equal(log_probs(resumed), log_probs(actor)) and not torch.equal(log_probs(actor), after)
    assert digests(resumed) == digests(actor) != sums

    if rank == 0:
        facts = {"class": type(actor.optimizer).__name__, "adapters": len(actor._jetrl.adapters), "tensors": len(sent) - 2}
        print("FACTS " + json.dumps(facts))
    destroy_global_process_group()
