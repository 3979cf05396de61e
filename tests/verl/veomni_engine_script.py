"""Run under torchrun on two ranks: verl's real VeOmni engine and VeOmni's real model on the CPU, compared with transformers'.

    torchrun --nproc_per_node=2 veomni_engine_script.py FAMILY MODEL_DIR plain|fused|shared|fp8|fp8-shared

``plain`` and ``fused`` compare log-probs and gradients in FP32, where a wrong position, mask or image stands out from rounding;
``shared`` does so on two ranks that share each sequence (Ulysses). ``fp8`` compares FP8 training with transformers' model in FP8,
and the bytes of a sync with a direct quantization. Only VeOmni's flash attention is replaced, because it needs a GPU.
"""

import functools
import sys
import types

import jetrl_patch

#: between sums in FP32 in another order: 3.4e-6 was seen
CLOSE, GRADIENTS_CLOSE = 2e-5, 1e-4
#: mean of the differences between sums in BF16 in another order, and the norm of a gradient's difference: seen were 0.05,
#: 0.003 without images and 0.18 with
NOISE, STEEP, STEEP_WITH_IMAGES = 0.15, 0.02, 0.4


def stand_in_for_flash_attention() -> None:
    """Give VeOmni's own slot for flash attention the same formula, with the boundaries that it gets."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    def attend(q, k, v, attention_mask, *, is_causal, cu_seq_lens_q=None, softmax_scale=None, **_):  # [1, T, H, D]
        assert attention_mask is None and q.shape[0] == 1 and cu_seq_lens_q[-1] == q.shape[1], "not packed sequences"
        sizes = cu_seq_lens_q.diff().tolist()
        parts = zip(*(t.transpose(1, 2).split(sizes, 2) for t in (q, k, v)), strict=True)
        each = [
            scaled_dot_product_attention(*part, is_causal=is_causal, scale=softmax_scale, enable_gqa=True) for part in parts
        ]
        return torch.cat(each, 2).transpose(1, 2)

    def never(*_, **__):
        raise AssertionError("transformers asks for the names alone")

    flash_attn = types.ModuleType("flash_attn")
    flash_attn.flash_attn_func = flash_attn.flash_attn_varlen_func = never
    sys.modules["flash_attn"] = flash_attn
    from veomni.ops.kernels.attention import flash

    flash._flash_attention_forward = attend


if __name__ == "__main__":
    family, model_dir, mode = sys.argv[1:]
    fp8, shared, fused = mode.startswith("fp8"), mode.endswith("shared"), mode == "fused"
    settings = {"precision": "fp8-unified", "align": "linear"} if fp8 else {"precision": "bf16", "upstream_fixes": True}
    jetrl_patch.enable(**settings)

    import torch
    from fsdp_engine import batch_of  # in this folder
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from verl.utils.distributed import destroy_global_process_group, initialize_global_process_group
    from verl.utils.torch_functional import logprobs_from_logits
    from verl.workers.config import HFModelConfig, VeOmniEngineConfig, VeOmniOptimizerConfig
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.veomni import transformer_impl

    from jetrl_patch.trainer.prepare import prepare_model
    from tests import vision_models

    torch.set_num_threads(1)
    _, rank, world = initialize_global_process_group()
    sees = family in vision_models.FAMILIES
    auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    reference = auto.from_pretrained(model_dir, dtype=torch.bfloat16 if fp8 else torch.float32)
    if sees:  # verl has the numbers of Qwen's own vocabulary
        places = {"IMAGE_INPUT_INDEX": reference.config.image_token_id, "VIDEO_INPUT_INDEX": reference.config.video_token_id}
        transformer_impl.VL_TYPE2INDEX[family] = places
    if not fp8:  # the engine passes on no dtypes
        make = transformer_impl.MixedPrecisionConfig
        transformer_impl.MixedPrecisionConfig = functools.partial(make, param_dtype="float32")
    if shared:
        stand_in_for_flash_attention()

    def build(forward_only: bool):
        made = EngineRegistry.new(
            model_type="language_model",
            backend="veomni",
            model_config=HFModelConfig(
                path=model_dir, use_remove_padding=True, enable_gradient_checkpointing=True, load_tokenizer=False,
                use_fused_kernels=fused,
            ),
            engine_config=VeOmniEngineConfig(
                mixed_precision=True, enable_full_shard=True, use_torch_compile=False, forward_only=forward_only,
                attn_implementation="flash_attention_2" if shared else "sdpa", moe_implementation="eager",
                ulysses_parallel_size=world if shared else 1, param_offload=True, optimizer_offload=True,
            ),
            optimizer_config=VeOmniOptimizerConfig(lr=1e-3, total_training_steps=10),
            checkpoint_config=None,
        )  # fmt: skip
        if not fp8:
            made._autocast_dtype = torch.float32
        made._build_model_optimizer()
        assert type(made.module).__module__.startswith("torch.distributed")  # FSDP2's class, over VeOmni's
        assert made.is_mp_src_rank_with_outputs() == (rank == 0 or not shared)
        return made

    engine = build(forward_only=False)
    if fp8:  # transformers' model with the same layers in FP8
        prepare_model(reference, jetrl_patch.session.active_config(), device_type="cpu", rollout_tp=1)
    generator = torch.Generator().manual_seed(3)

    def log_probs_of(ids, **inputs):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=fp8):
            logits = reference(input_ids=ids[None], use_cache=False, **inputs).logits[0, :-1]
        return logprobs_from_logits(logits, ids[1:])

    def sample(length: int, grids: list[tuple[int, int]]):
        """Token ids [length], with an image of each grid's patches if the model takes images, verl's position ids, the images."""
        if not sees:
            ids = torch.randint(3, 250, (length,), generator=generator)
            return ids, torch.arange(length), {}, {}
        tower = reference.config.vision_config
        width = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
        ids = []
        for height, across in grids:
            ids += [7, vision_models.FIRST, *[vision_models.FIRST + 2] * (height * across // 4), vision_models.FIRST + 1]
        ids = torch.tensor(ids + torch.randint(8, 250, (length - len(ids),), generator=generator).tolist())
        images = {}
        grid = torch.tensor([[1, *one] for one in grids]) if grids else None
        if grids:
            pixels = torch.randn(sum(h * w for h, w in grids), width, generator=generator)
            images = {"pixel_values": pixels, "image_grid_thw": grid}
        kinds = (ids == vision_models.FIRST + 2).long()[None]
        seen, _ = reference.model.get_rope_index(ids[None], kinds, grid)
        return ids, torch.cat([torch.arange(length)[None], seen[:, 0]]), images, {"mm_token_type_ids": kinds}

    small, large = [(4, 4)], [(4, 8)]
    rows = [sample(20, small), sample(31, []), sample(25, large), sample(40, small + large)]

    def batch_from(rows, size: int):
        from tensordict.tensorclass import NonTensorData, NonTensorStack

        ids, positions, images, _ = zip(*rows, strict=True)
        batch = batch_of(list(ids), micro_batch_size_per_gpu=size, use_fused_kernels=fused)
        if sees:
            batch["position_ids"] = torch.nested.as_nested_tensor(list(positions), layout=torch.jagged)
            batch["multi_modal_inputs"] = NonTensorStack.from_list([NonTensorData(one) for one in images])
        return batch

    def without_last(found):  # the last label of a sequence comes from its neighbour and has no meaning
        return [t[:-1] for t in found.unbind()]

    def log_probs(engine, rows, size: int):
        with engine.eval_mode():
            return without_last(engine.infer_batch(batch_from(rows, size))["model_output"]["log_probs"])

    def loss(model_output, data, dp_group=None):
        return torch.cat(without_last(model_output["log_probs"])).sum(), {}

    def full(engine):
        return {n: t.detach().clone() for n, t in type(engine).get_per_tensor_param.__wrapped__(engine)[0]}

    expected = [log_probs_of(ids, **images, **kinds) for ids, _, images, kinds in rows]
    worst = 0.0
    for size in (1, 2, 4):
        for i, (ours, theirs) in enumerate(zip(log_probs(engine, rows, size), expected, strict=True)):
            apart = (ours - theirs).detach().abs().float()
            if not fp8:
                assert apart.max() < CLOSE, (size, i, float(apart.max()))
            elif size == 1 and not rows[i][2] and not shared:  # transformers' mask of one sequence, and no image
                assert torch.equal(ours, theirs), (i, float(apart.max()))
            else:
                assert apart.mean() < NOISE, (size, i, float(apart.mean()))
            worst = max(worst, float(apart.max() if not fp8 else apart.mean()))
    torch.cat(expected).sum().backward()
    gradients = {name: tensor.grad for name, tensor in reference.named_parameters()}
    steepest, limit = 0.0, (STEEP_WITH_IMAGES if sees else STEEP) if fp8 else GRADIENTS_CLOSE
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch_from(rows, 1), loss, forward_only=False)
        for name, tensor in engine.module.named_parameters():
            ours, theirs = tensor.grad.full_tensor(), gradients[name]
            off = float((ours - theirs).norm() / theirs.norm())
            assert off < limit, (name, off)
            steepest = max(steepest, off)
        engine.optimizer_step()
    print("WORST", worst, steepest)
    if fp8:
        from jetrl_patch.backends.quantize import quantize_weight
        from jetrl_patch.fp8.convert import per_expert
        from jetrl_patch.fp8.linear import Fp8Linear
        from jetrl_patch.sync.protocol import COMMIT, MANIFEST, SCALE_SUFFIX, decode_json

        layers = set(engine._jetrl.layers)
        stream, peft = engine.get_per_tensor_param(layered_summon=True, base_sync_done=True)  # as verl's worker calls it
        sent = {name: tensor.clone() for name, tensor in stream}
        weights = full(engine)
        assert peft is None
        for name, weight in weights.items():
            own = weight.to(torch.bfloat16)
            if name.removesuffix(".weight") in layers:
                q, s = quantize_weight(own, "pow2")
                assert torch.equal(sent[name].view(torch.uint8), q.view(torch.uint8)), name
                assert torch.equal(sent[name + SCALE_SUFFIX], s), name
            else:
                assert torch.equal(sent[name], own), name
        names = {one for item in reference.state_dict().items() for one, _ in per_expert(*item)}
        assert set(weights) == names
        assert set(sent) == {*names, *(f"{layer}.weight{SCALE_SUFFIX}" for layer in layers), MANIFEST, COMMIT}
        everybody = [None] * world
        torch.distributed.all_gather_object(everybody, decode_json(sent[COMMIT], COMMIT)["digests"])
        assert everybody[0] == everybody[1], "ranks send different bytes"
        swapped = {name for name, module in engine.module.named_modules() if isinstance(module, Fp8Linear)}
        assert swapped == {name for name in layers if ".experts." not in name}
        print("LAYERS", len(layers), len(swapped))
    destroy_global_process_group()
