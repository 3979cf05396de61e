"""Run under torchrun: verl's real FSDP engine with LoRA on a vision-language model, patched, on the CPU.

    torchrun --nproc_per_node=N vision_lora_script.py fsdp|fsdp2 FAMILY MODEL_DIR FOLDER PRECISION [EXCLUDE_MODULES]

Adapters on every linear layer, also of the tower unless EXCLUDE_MODULES names it. Trains them on samples with and without
images, streams the weights, and builds a second engine of a plain checkpoint with the merged weights.
"""

import sys
from pathlib import Path

import jetrl_patch

#: mean difference of log-probs between W x + B (A x), which verl's trainer computes in fp8-rollout, and W' x: 2e-3 was seen
CLOSE = 0.02

if __name__ == "__main__":
    strategy, family, model_dir, folder, precision, *exclude = sys.argv[1:]
    unified = precision == "fp8-unified"
    jetrl_patch.enable(precision=precision, **({"align": "linear"} if unified else {}))

    import torch
    from fsdp_engine import batch_of, build  # in this folder
    from merged_by_hand import assert_sent, merged_values
    from tensordict.tensorclass import NonTensorData, NonTensorStack
    from torch.distributed.tensor import DTensor
    from transformers import AutoModelForImageTextToText
    from verl.utils.distributed import destroy_global_process_group, initialize_global_process_group
    from vision_engine_script import stand_in_for_flash_attention

    from tests import vision_models

    torch.set_num_threads(1)
    torch.manual_seed(0)
    _, rank, world = initialize_global_process_group()
    plain = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.bfloat16)
    tower = plain.config.vision_config
    width = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
    generator = torch.Generator().manual_seed(1)

    def sample(length: int, seen: bool):
        """Token ids [length], verl's position ids [4, length], and an image of 4 tokens."""
        image = [vision_models.FIRST, *[vision_models.FIRST + 2] * 4, vision_models.FIRST + 1] if seen else []
        ids = torch.tensor([7, *image, *torch.randint(8, 250, (length - 1 - len(image),), generator=generator).tolist()])
        grid = torch.tensor([[1, 4, 4]]) if seen else None
        positions, _ = plain.model.get_rope_index(ids[None], (ids == vision_models.FIRST + 2).long()[None], grid)
        images = {"pixel_values": torch.randn(16, width, generator=generator), "image_grid_thw": grid} if seen else {}
        return ids, torch.cat([torch.arange(length)[None], positions[:, 0]]), images

    SAMPLES = [sample(20, True), sample(31, False), sample(25, True), sample(17, False)]

    def engine(path, **model):
        built = build(strategy, path, model=model)
        built.initialize()
        return built

    def batch(rows):
        ids, positions, images = zip(*rows, strict=True)
        made = batch_of(list(ids))
        made["position_ids"] = torch.nested.as_nested_tensor(list(positions), layout=torch.jagged)
        made["multi_modal_inputs"] = NonTensorStack.from_list([NonTensorData(one) for one in images])
        return made

    def log_probs(model):
        with model.eval_mode(disable_auto_offload=True):
            output = model.infer_batch(batch(SAMPLES))
        # the last label of a sequence comes from its neighbour and has no meaning
        return torch.cat([t[:-1].clone() for t in output["model_output"]["log_probs"].unbind()])

    def loss(model_output, data, dp_group=None):
        return -model_output["log_probs"].values().mean(), {}

    def state(model):
        tensors = model.module.state_dict()
        return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in tensors.items()}

    actor = engine(
        model_dir, lora_rank=8, lora_alpha=16, lora={"merge": True}, target_modules="all-linear",
        exclude_modules=exclude[0] if exclude else None,
    )  # fmt: skip
    stand_in_for_flash_attention(family)
    before, first = log_probs(actor), state(actor)
    with actor.train_mode(disable_auto_offload=True):
        for _ in range(2):
            actor.train_batch(batch(SAMPLES[rank::world]), loss)
    after, trained = log_probs(actor), state(actor)
    assert not torch.equal(before, after), "training changed nothing"
    changed = {name for name in first if not torch.equal(first[name], trained[name])}
    adapters = {name for name in first if "lora_" in name}
    assert changed == adapters and len(adapters) == 2 * len(actor._jetrl.adapters)
    assert any(".visual." in name for name in adapters) is not bool(exclude)

    # what is sent: W' by hand, under the names of the plain model, of which the language model's layers are FP8
    stream, peft = actor.get_per_tensor_param(layered_summon=False, base_sync_done=True)
    sent = {name: tensor.clone() for name, tensor in stream}
    assert peft is None
    values = merged_values(trained)
    assert values.keys() == plain.state_dict().keys()
    assert_sent(sent, values, actor._jetrl.layers if unified else ())
    assert all(torch.equal(a, b) for a, b in zip(state(actor).values(), trained.values(), strict=True)), "the sync wrote to W"

    merged = Path(folder) / "merged"
    if rank == 0:
        plain.load_state_dict(values)
        plain.save_pretrained(merged)
    torch.distributed.barrier()
    other = log_probs(engine(str(merged)))
    off = float((other - after).abs().mean())
    assert (torch.equal(other, after) and off == 0.0) if unified else off < CLOSE, off
    print("FINE", len(adapters), off)
    destroy_global_process_group()
