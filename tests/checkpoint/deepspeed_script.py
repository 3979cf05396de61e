"""Run under torchrun: DeepSpeed, as OpenRLHF configures it, saves and loads a checkpoint on the CPU.

    torchrun --nproc_per_node=N deepspeed_script.py STAGE FOLDER 8bit|fp8

Makes two updates, a checkpoint, and two more updates; a second engine loads the checkpoint and repeats the last two. Weights,
masters and states must equal those of the first, bit for bit. Rank 0 prints the results as one JSON line.
"""

import json
import sys

import jetrl_patch

if __name__ == "__main__":
    stage, folder, states = int(sys.argv[1]), *sys.argv[2:]
    jetrl_patch.enable(precision="bf16", optimizer_states=states)

    import deepspeed
    import torch
    from openrlhf.utils.deepspeed.deepspeed import DeepspeedStrategy
    from openrlhf.utils.deepspeed.deepspeed_utils import get_train_ds_config
    from torch.utils import _pytree as pytree

    from tests.optim.states import state_bytes

    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    strategy = DeepspeedStrategy.__new__(DeepspeedStrategy)
    strategy.is_rank_0, strategy.print = (lambda: rank == 0), print

    def engine():
        torch.manual_seed(0)
        adam = {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}}
        config = get_train_ds_config(False, adam_offload=False, stage=stage, zpg=1, optim_config=adam)
        config |= {"train_micro_batch_size_per_gpu": 2, "train_batch_size": 2 * world}
        layers = [torch.nn.Linear(96, 131), torch.nn.GELU(), torch.nn.Linear(131, 257), torch.nn.Linear(257, 8)]
        model = torch.nn.Sequential(*layers).to(torch.bfloat16)
        schedule = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 8)  # noqa: E731
        return deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), lr_scheduler=schedule, config=config
        )[0]

    def train(model, seeds):
        for seed in seeds:
            generator = torch.Generator().manual_seed(10 * seed + rank)
            x = torch.randn(2, 96, generator=generator).to(torch.bfloat16)
            model.backward(model(x).float().square().mean())
            model.step()

    def plain(tensor):
        names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else []
        return [plain(getattr(tensor, name)) for name in names] or tensor.detach().clone()

    def content(model):
        """Every tensor of masters and states, and the weights used in computation."""
        inner = model.basic_optimizer
        found = [plain(p) for p in inner.state]
        found += [plain(t) for s in inner.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        with deepspeed.zero.GatheredParameters(list(model.module.parameters())):
            found += [p.detach().clone() for p in model.module.parameters()]
        return pytree.tree_leaves(found)

    def same(a, b):
        return [
            torch.equal(x.view(-1).view(torch.uint8), y.view(-1).view(torch.uint8)) for x, y in zip(a, b, strict=True)
        ]

    first = engine()
    train(first, (1, 2))
    strategy.save_ckpt(first, folder, "global_step2", client_state={"steps": 2})
    train(first, (3, 4))
    second = engine()
    _, client = strategy.load_ckpt(second, folder)
    at_checkpoint = content(second)
    train(second, (3, 4))
    resumed, expected = content(second), content(first)
    assert client["steps"] == 2
    assert all(same(resumed, expected)), f"the resumed run is another: {same(resumed, expected)}"
    assert not all(same(resumed, at_checkpoint))
    assert first.lr_scheduler.get_last_lr() == second.lr_scheduler.get_last_lr()
    if rank == 0:
        kept, fp32 = state_bytes(first.basic_optimizer)
        facts = {"kept": kept, "fp32": fp32, "class": type(first.basic_optimizer).__name__}
        print("FACTS " + json.dumps(facts))
    torch.distributed.destroy_process_group()
