"""Run under torchrun: verl's real FSDP engines in ``int8-rollout`` with ``invariant_scale``, on the CPU.

    torchrun --nproc_per_node=N int8_engine_script.py fsdp|fsdp2 MODEL_DIR

Each rank trains on different samples. All ranks must then stream the same bytes, and the smoothing must follow from the
activations of all ranks together, which the script's own hooks record. Prints FACTS on rank 0.
"""

import json
import sys

import jetrl_patch

if __name__ == "__main__":
    strategy, model_dir = sys.argv[1:3]
    jetrl_patch.enable(precision="int8-rollout", invariant_scale=1.5)

    import numpy
    import torch
    from fsdp_engine import batch_of, build  # in this folder
    from transformers import AutoModelForCausalLM
    from verl.utils.distributed import destroy_global_process_group, initialize_global_process_group

    from jetrl_patch.backends.rowwise import quantize_int8_rows
    from jetrl_patch.sync.protocol import COMMIT, SCALE_SUFFIX, decode_json

    torch.set_num_threads(1)
    _, rank, world = initialize_global_process_group()

    def engine(forward_only: bool):
        built = build(strategy, model_dir, forward_only=forward_only)
        built._build_model_optimizer()
        return built

    def full(model):
        return {n: t.detach().clone() for n, t in type(model).get_per_tensor_param.__wrapped__(model)[0]}

    def batch():
        generator = torch.Generator().manual_seed(10 + rank)
        sequences = [torch.randint(2, 384, (n,), generator=generator) for n in (9, 17)]
        return batch_of(sequences)

    def loss(model_output, data, dp_group=None):
        return -model_output["log_probs"].values().mean(), {}

    actor, reference = engine(False), engine(True)
    original = dict(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).named_parameters())
    for name, weight in full(reference).items():
        assert torch.equal(weight.float(), original[name]), name
    readers = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")
    for name, weight in full(actor).items():
        factor = 1 / 1.5 if name.endswith(readers) else 1.5 if "layernorm" in name else 1.0
        assert torch.allclose(weight.float(), original[name] * factor, rtol=1e-6), name

    list(actor.get_per_tensor_param()[0])  # after the first sync the forward pass is observed
    captured: dict[str, torch.Tensor] = {}

    def watch(name):
        def hook(module, args):
            amax = args[0].detach().float().abs().flatten(0, -2).amax(0)
            captured[name] = torch.maximum(captured.get(name, amax), amax)

        return hook

    groups = {group.norm: group.readers for group in actor._jetrl.smoother.groups}
    modules = {n.replace("_fsdp_wrapped_module.", ""): m for n, m in actor.module.named_modules()}
    for norm, names in groups.items():
        modules[names[0].removesuffix(".weight")].register_forward_pre_hook(watch(norm))
    with actor.train_mode(disable_auto_offload=True):
        for _ in range(2):
            actor.train_batch(batch(), loss)
    assert len(captured) == len(groups) == 6
    mine = {norm: amax.clone() for norm, amax in captured.items()}
    for amax in captured.values():
        torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX)
    assert world == 1 or any(not torch.equal(mine[n], captured[n]) for n in mine), "ranks saw the same"

    weights = {n: t.to(torch.bfloat16).float() for n, t in full(actor).items()}
    sent = {name: tensor.clone() for name, tensor in actor.get_per_tensor_param()[0]}
    for norm, names in groups.items():
        x = captured[norm].double().numpy()
        w = numpy.max([weights[n].abs().amax(0).numpy() for n in names], axis=0).astype(numpy.float64)
        log = 0.5 * numpy.log2(x) - 0.5 * numpy.log2(w)
        f = torch.from_numpy(2.0 ** numpy.round(log - log.mean())).float()
        assert len(f.unique()) > 1
        assert torch.equal(sent[norm].float(), weights.pop(norm) / f), norm
        for name in names:
            q, s = quantize_int8_rows(weights.pop(name) * f)
            assert torch.equal(sent[name], q) and torch.equal(sent[name + SCALE_SUFFIX], s), name
    for name, weight in weights.items():
        quantized = name.removesuffix(".weight") in actor._jetrl.layers
        assert torch.equal(sent[name], quantize_int8_rows(weight).q if quantized else weight.to(torch.bfloat16)), name
    digests = decode_json(sent[COMMIT], COMMIT)["digests"]
    everybody = [None] * world
    torch.distributed.all_gather_object(everybody, digests)
    assert all(d == digests for d in everybody), "ranks send different bytes"
    if rank == 0:
        print("FACTS " + json.dumps({"groups": len(groups), "tensors": len(digests)}))
    destroy_global_process_group()
