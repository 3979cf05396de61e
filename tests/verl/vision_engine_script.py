"""Run under torchrun: a vision-language model's log-probs in verl's real FSDP engine, compared with transformers' own forward.

    torchrun --nproc_per_node=N vision_engine_script.py fsdp|fsdp2 FAMILY MODEL_DIR [fused] [shared]

With ``shared`` all ranks share each sequence (Ulysses), which verl supports only for packed sequences.

Batches with and without images, of one length and of several, packed and padded, in micro-batches of every size, and the
gradients of one of them. All in FP32, so that a wrong position, mask or image stands out from rounding.
"""

import sys

import jetrl_patch

#: between sums in FP32 in another order: 1.1e-5 was seen, and 2.1e-5 of gradients, where states pass from token to token
CLOSE, GRADIENTS_CLOSE = 5e-5, 1e-4


def stand_in_for_flash_attention(family: str) -> None:
    """verl's packed attention of these families is flash attention's; here the same formula, with verl's own boundaries."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention
    from verl.models.transformers import glm4v, qwen2_vl

    module = {"qwen2_5_vl": qwen2_vl, "glm4v": glm4v}.get(family)
    if module is None:
        return

    def attend(q, k, v):  # [B, T, H, D]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, causal, **_):  # [T, H, D]
        assert causal
        sizes = cu_seqlens_q.diff().tolist()
        parts = zip(*(t.split(sizes) for t in (q, k, v)), strict=True)
        return torch.cat([attend(*(t[None] for t in part))[0] for part in parts])

    def _flash_attention_forward(q, k, v, attention_mask, query_length, is_causal, **_):
        assert is_causal  # so padding on the right, which the mask names, changes no token before it
        return attend(q, k, v)

    made = {
        "flash_attn_varlen_func": flash_attn_varlen_func, "_flash_attention_forward": _flash_attention_forward,
        "fa_peft_integration_check": lambda q, k, v, **_: (q, k, v), "_flash_supports_window_size": False,
        "_flash_supports_deterministic": False, "_flash_use_top_left_mask": False,
    }  # fmt: skip
    for name, value in made.items():
        setattr(module, name, value)


if __name__ == "__main__":
    strategy, family, model_dir, *more = sys.argv[1:]
    fused, shared = "fused" in more, "shared" in more
    jetrl_patch.enable(precision="bf16", upstream_fixes=True)

    import torch
    from fsdp_engine import batch_of, build  # in this folder
    from transformers import AutoModelForImageTextToText
    from verl.utils.distributed import destroy_global_process_group, initialize_global_process_group

    from tests import vision_models

    torch.set_num_threads(1)
    _, rank, world = initialize_global_process_group()
    generator = torch.Generator().manual_seed(3)
    reference = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32)
    tower = reference.config.vision_config
    width = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2

    def sample(length: int, grids: list[tuple[int, int]]):
        """Token ids [length] with an image of each grid's patches, verl's position ids [4, length], and the images."""
        ids = []
        for height, across in grids:
            ids += [7, vision_models.FIRST, *[vision_models.FIRST + 2] * (height * across // 4), vision_models.FIRST + 1]
        ids = torch.tensor(ids + torch.randint(8, 250, (length - len(ids),), generator=generator).tolist())
        grid = torch.tensor([[1, *grid] for grid in grids])
        images = {}
        if grids:
            pixels = torch.randn(sum(h * w for h, w in grids), width, generator=generator)
            images = {"pixel_values": pixels, "image_grid_thw": grid}
        kinds = (ids == vision_models.FIRST + 2).long()[None]
        seen, _ = reference.model.get_rope_index(ids[None], kinds, grid if grids else None)
        positions = torch.cat([torch.arange(length)[None], seen[:, 0]])
        # positions as transformers makes them
        logits = reference(input_ids=ids[None], mm_token_type_ids=kinds, use_cache=False, **images).logits[0, :-1]
        return ids, positions, images, logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]

    small, large = [(4, 4)], [(4, 8)]
    BATCHES = {
        "of several lengths": [sample(20, small), sample(31, []), sample(25, large), sample(40, small + large)],
        "of one length": [sample(24, small), sample(24, []), sample(24, large), sample(24, small)],
        "of one length, without images": [sample(16, []) for _ in range(4)],
        "of one": [sample(26, large)],
    }
    sum(row[-1].sum() for row in BATCHES["of several lengths"]).backward()
    expected = {name: tensor.grad for name, tensor in reference.named_parameters()}
    engine = build(
        strategy, model_dir, mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        model={"use_fused_kernels": fused, "fused_kernel_options": {"impl_backend": "torch"}}, forward_only=False,
        ulysses_sequence_parallel_size=world if shared else 1,
    )  # fmt: skip
    engine._build_model_optimizer()
    stand_in_for_flash_attention(family)

    def batch_from(rows, packed: bool, size: int):
        from tensordict.tensorclass import NonTensorData, NonTensorStack

        ids, positions, images, _ = zip(*rows, strict=True)
        settings = {"micro_batch_size_per_gpu": size, "use_remove_padding": packed, "use_fused_kernels": fused}
        batch = batch_of(list(ids), **settings)
        batch["position_ids"] = torch.nested.as_nested_tensor(list(positions), layout=torch.jagged)
        batch["multi_modal_inputs"] = NonTensorStack.from_list([NonTensorData(one) for one in images])
        return batch

    def without_last(found):  # the last label of a sequence comes from its neighbour and has no meaning
        return [t[:-1] for t in found.unbind()]

    def log_probs(*settings):
        with engine.eval_mode(disable_auto_offload=True):
            return without_last(engine.infer_batch(batch_from(*settings))["model_output"]["log_probs"])

    def loss(model_output, data, dp_group=None):
        return torch.cat(without_last(model_output["log_probs"])).sum(), {}

    worst = 0.0
    for name, rows in BATCHES.items():
        for packed in (True, False)[: 1 if shared else 2]:
            for size in (n for n in (1, 2, 4) if len(rows) % n == 0):
                found = log_probs(rows, packed, size)
                for i, (ours, row) in enumerate(zip(found, rows, strict=True)):
                    off = float((ours - row[-1].detach()).abs().max())
                    assert off < CLOSE, (name, "packed" if packed else "padded", size, i, off)
                    worst = max(worst, off)
    if strategy == "fsdp2":
        with engine.train_mode(disable_auto_offload=True):
            engine.optimizer_zero_grad()
            mine, parts = (slice(None), 1) if shared else (slice(rank, None, world), world)
            batch = batch_from(BATCHES["of several lengths"][mine], shared, 1)
            engine.forward_backward_batch(batch, loss, forward_only=False)
            for name, tensor in engine.module.named_parameters():
                ours, theirs = tensor.grad.full_tensor() * parts, expected[name]
                off = float((ours - theirs).abs().max() / theirs.abs().max())
                assert off < GRADIENTS_CLOSE, (name, off)
                worst = max(worst, off)
    print("WORST", worst)
    destroy_global_process_group()
