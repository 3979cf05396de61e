"""Run under torchrun: verl's real FSDP engines (actor and reference model), patched, on the CPU.

    torchrun --nproc_per_node=N engine_script.py fsdp|fsdp2 MODEL_DIR [gather]

Trains a few steps, then streams the weights and compares every byte with a direct quantization of the full weights.
Prints one JSON line of facts on rank 0.
"""

import json
import sys

import jetrl_patch

if __name__ == "__main__":
    strategy, model_dir, *gather = sys.argv[1:]
    jetrl_patch.enable(precision="fp8-unified", fp8_all_gather=bool(gather))

    import torch
    from fsdp_engine import batch_of, build  # in this folder
    from verl.utils.distributed import destroy_global_process_group, initialize_global_process_group

    from jetrl_patch.backends.quantize import quantize_weight
    from jetrl_patch.fp8.gather import Fp8Shard
    from jetrl_patch.fp8.linear import Fp8Linear
    from jetrl_patch.sync.protocol import COMMIT, MANIFEST, SCALE_SUFFIX, decode_json

    torch.set_num_threads(1)
    _, rank, world = initialize_global_process_group()

    def engine(forward_only: bool, **model):
        built = build(strategy, model_dir, model=model, forward_only=forward_only)
        built._build_model_optimizer()
        return built

    def batch(rows: list[int], **extra):
        generator = torch.Generator().manual_seed(1)
        lengths = [9, 33, 17, 26]
        sequences = [torch.randint(2, 384, (n,), generator=generator) for n in lengths]
        chosen = [sequences[i] for i in rows]
        return batch_of(chosen, **extra)

    def log_probs(model, rows, **extra):
        with model.eval_mode(disable_auto_offload=True):
            output = model.infer_batch(batch(rows, **extra))
        # the last label of a sequence comes from its neighbour and has no meaning
        return [t[:-1].clone() for t in output["model_output"]["log_probs"].unbind()]

    promised = set()

    def states(model):
        return [m.fp8 for m in model.module.modules() if isinstance(m, Fp8Linear)]

    def loss(model_output, data, dp_group=None):
        promised.update(state.promise for state in states(actor))
        return -model_output["log_probs"].values().mean(), {}

    actor, reference = engine(False), engine(True)
    before = log_probs(reference, [0, 1, 2, 3])
    assert all(torch.equal(a, b) for a, b in zip(log_probs(actor, [0, 1, 2, 3]), before, strict=True))
    with actor.train_mode(disable_auto_offload=True):
        for _ in range(2):
            actor.train_batch(batch([2 * (rank % 2), 2 * (rank % 2) + 1]), loss)
    # weights that are not sharded are promised to stay within an update: one promise for each of the two
    assert len(promised) == (2 if world == 1 else 1) and (None in promised) == (world > 1), promised
    assert {state.promise for state in states(actor)} == {None}
    after = log_probs(actor, [0, 1, 2, 3])
    assert not any(torch.equal(a, b) for a, b in zip(after, before, strict=True)), "training changed nothing"

    # a row's log-probs depend on that row alone, packed or padded, whatever the other rows are
    same = {
        "packed": log_probs(actor, [0, 1, 2, 3], micro_batch_size_per_gpu=4),
        "padded": log_probs(actor, [0, 1, 2, 3], micro_batch_size_per_gpu=4, use_remove_padding=False),
        "padded by 2": log_probs(actor, [0, 1, 2, 3], micro_batch_size_per_gpu=2, use_remove_padding=False),
    }
    for how, found in same.items():
        for ours, theirs in zip(found, after, strict=True):
            assert torch.equal(ours, theirs), f"{how}: {(ours - theirs).abs().max()}"

    full = {n: t.detach().clone() for n, t in type(actor).get_per_tensor_param.__wrapped__(actor)[0]}
    stream, peft = actor.get_per_tensor_param(layered_summon=True, base_sync_done=True)  # as verl's worker calls it
    sent = {name: tensor.clone() for name, tensor in stream}
    assert peft is None and len(actor._jetrl.layers) == 7 * 3
    for name, weight in full.items():
        if name.removesuffix(".weight") in actor._jetrl.layers:
            q, s = quantize_weight(weight.to(torch.bfloat16), "pow2")
            assert torch.equal(sent[name].view(torch.uint8), q.view(torch.uint8)), name
            assert torch.equal(sent[name + SCALE_SUFFIX], s), name
        else:
            assert torch.equal(sent[name], weight.to(torch.bfloat16)), name
    assert set(sent) == {*full, *(n + ".weight" + SCALE_SUFFIX for n in actor._jetrl.layers), MANIFEST, COMMIT}
    digests = decode_json(sent[COMMIT], COMMIT)["digests"]
    everybody = [None] * world
    torch.distributed.all_gather_object(everybody, digests)
    assert all(d == digests for d in everybody), "ranks send different bytes"

    def gradients(**model):
        trained = engine(False, **model)
        with trained.train_mode(disable_auto_offload=True):
            trained.optimizer_zero_grad()
            trained.forward_backward_batch(batch([0, 1, 2, 3], micro_batch_size_per_gpu=2), loss, forward_only=False)
            grads = {name: p.grad for name, p in trained.module.named_parameters() if p.grad is not None}
            return {name: getattr(grad, "_local_tensor", grad).clone() for name, grad in grads.items()}

    if not gather:  # activations that verl keeps in host memory until backward; the settings refuse both
        plain, empty = gradients(), torch.empty
        torch.empty = lambda *size, pin_memory=False, **options: empty(*size, **options)  # a CPU build pins no memory
        for recompute in (False, True):
            offloaded = gradients(enable_activation_offload=True, enable_gradient_checkpointing=recompute)
            assert len(plain) == len(offloaded) and all(torch.equal(plain[name], offloaded[name]) for name in plain), recompute
        torch.empty = empty

    # verl installs the fused forward on the model's class, so this engine is the last one
    fused = engine(False, use_fused_kernels=True, fused_kernel_options={"impl_backend": "torch"})
    as_fused = {"use_fused_kernels": True, "temperature": 1.0}
    for ours, theirs in zip(log_probs(fused, [0, 1, 2, 3], **as_fused), before, strict=True):
        assert torch.equal(ours, theirs), f"fused: {(ours - theirs).abs().max()}"

    def head(model):
        return dict(type(model).get_per_tensor_param.__wrapped__(model)[0])["lm_head.weight"].detach().clone()

    untrained = head(fused)
    with fused.train_mode(disable_auto_offload=True):
        for _ in range(2):
            fused.train_batch(batch([2 * (rank % 2), 2 * (rank % 2) + 1], **as_fused), loss)
    moved = (head(actor) - untrained).abs().mean()  # FSDP2 reduces the gradient of a head that it never ran
    apart = (head(actor) - head(fused)).abs().mean()
    assert apart < 0.1 * moved, f"the fused path trains the head differently: {apart} of {moved}"

    if rank == 0:
        names = sorted(type(m).__name__ for m in actor.module.modules() if isinstance(m, Fp8Linear))
        shards = [
            sum(isinstance(getattr(p, "_local_tensor", None), Fp8Shard) for p in model.module.parameters())
            for model in (actor, reference)
        ]
        facts = {"digests": digests, "layers": len(names), "tensors": len(sent) - 2, "gathered": shards}
        print("FACTS " + json.dumps(facts))
    destroy_global_process_group()
