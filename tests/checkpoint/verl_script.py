"""Run under torchrun: verl's real FSDP engine saves and loads a checkpoint on the CPU.

    torchrun --nproc_per_node=N verl_script.py fsdp|fsdp2 MODEL_DIR FOLDER fp32|8bit|fp8

Makes two updates, a checkpoint, and two more updates; a second engine loads the checkpoint and repeats the last two. Its
weights and states must equal those of the first, bit for bit. Rank 0 prints the results as one JSON line.
"""

import json
import sys
from pathlib import Path

import jetrl_patch

if __name__ == "__main__":
    strategy, model_dir, folder, states = sys.argv[1:]
    jetrl_patch.enable(precision="fp8-unified", optimizer_states=states)

    sys.path.append(str(Path(__file__).parents[1] / "verl"))
    import torch
    from fsdp_engine import batch_of, build
    from omegaconf import OmegaConf
    from torch.utils import _pytree as pytree
    from verl.trainer.config import CheckpointConfig
    from verl.utils.distributed import destroy_global_process_group, initialize_global_process_group

    from jetrl_patch.adapters.verl.precision import optimizer_wanted
    from jetrl_patch.session import active_config

    torch.set_num_threads(1)
    _, rank, world = initialize_global_process_group()
    verl_config = OmegaConf.create({"actor_rollout_ref": {"actor": {"strategy": strategy, "optim": {}}}})
    chosen = optimizer_wanted(lambda path: OmegaConf.select(verl_config, path), active_config())
    chosen = {path.rpartition(".")[2]: value for path, value in chosen.items()}

    def engine():
        optimizer = {"lr_warmup_steps": 8, **chosen}
        built = build(strategy, model_dir, optimizer=optimizer, checkpoint=CheckpointConfig(), forward_only=False)
        built.initialize()
        return built

    def loss(model_output, data, dp_group=None):
        return -model_output["log_probs"].values().mean(), {}

    def train(model, seeds):
        for seed in seeds:
            generator = torch.Generator().manual_seed(10 * seed + rank)
            rows = [torch.randint(2, 384, (n,), generator=generator) for n in (9, 33)]
            batch = batch_of(rows)
            with model.train_mode(disable_auto_offload=True):
                model.train_batch(batch, loss)
                model.lr_scheduler_step()

    def plain(tensor):
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else []
        return [plain(getattr(tensor, name)) for name in names] or tensor.detach().clone()

    def content(model):
        """Every tensor of weights and states."""
        found = [plain(p) for p in model.module.parameters()]
        found += [plain(t) for s in model.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        return pytree.tree_leaves(found)

    def same(a, b):
        return [
            torch.equal(x.view(-1).view(torch.uint8), y.view(-1).view(torch.uint8))
            for x, y in zip(a, b, strict=True)
            if x.numel()
        ]

    first = engine()
    train(first, (1, 2))
    first.save_checkpoint(folder)
    train(first, (3, 4))
    second = engine()
    begun = content(second)
    second.load_checkpoint(folder, del_local_after_load=False)
    at_checkpoint = content(second)
    train(second, (3, 4))
    resumed, expected = content(second), content(first)
    assert all(same(resumed, expected)), "the resumed run is another"
    assert not all(same(resumed, at_checkpoint)) and not all(same(at_checkpoint[: len(begun)], begun))
    assert first.lr_scheduler.get_last_lr() == second.lr_scheduler.get_last_lr() == [1e-3 * 4 / 8]
    if rank == 0:
        from tests.optim.states import state_bytes

        kept, fp32 = state_bytes(first.optimizer)
        print("FACTS " + json.dumps({"kept": kept, "fp32": fp32, "class": type(first.optimizer).__name__}))
    destroy_global_process_group()
