"""Run under torchrun on 2 or 4 ranks: verl's FSDP engines whose ranks share sequences in pairs, against engines that do not.

    torchrun --nproc_per_node=N ulysses_script.py fsdp|fsdp2 MODEL_DIR exact|linear

Actor and reference score the same packed batches, the actor trains, and what it sends is scored by a model of one rank.
Prints one JSON line of facts on rank 0.
"""

import json
import sys

import jetrl_patch

if __name__ == "__main__":
    strategy, model_dir, align = sys.argv[1:]
    jetrl_patch.enable(precision="fp8-unified", align=align)

    import torch
    from fsdp_engine import build  # in this folder
    from verl.utils import tensordict_utils as tu
    from verl.utils.distributed import destroy_global_process_group, initialize_global_process_group

    from jetrl_patch.config import Config
    from jetrl_patch.exact.ops import token_log_probs
    from jetrl_patch.trainer.prepare import prepare_model

    torch.set_num_threads(1)
    _, rank, world = initialize_global_process_group()
    generator = torch.Generator().manual_seed(1)
    SEQUENCES = [torch.randint(2, 384, (n,), generator=generator) for n in (9, 33, 17, 26)]
    TEMPERATURES = torch.tensor([1.0, 0.7, 1.3, 1.0])
    nested = lambda ts: torch.nested.as_nested_tensor(ts, layout=torch.jagged)  # noqa: E731

    def engine(forward_only: bool, size: int):
        built = build(strategy, model_dir, forward_only=forward_only, ulysses_sequence_parallel_size=size)
        built._build_model_optimizer()
        return built

    def batch(rows: list[int], together: int):
        chosen = [SEQUENCES[i] for i in rows]
        return tu.get_tensordict(
            {
                "input_ids": nested(chosen),
                "position_ids": nested([torch.arange(len(s)) for s in chosen]),
                "loss_mask": nested([torch.ones(len(s)) for s in chosen]),
                "temperature": TEMPERATURES[rows],
            },
            {
                "use_dynamic_bsz": False,
                "micro_batch_size_per_gpu": together,
                "use_remove_padding": True,
                "calculate_entropy": True,
            },
        )

    def scores(model, together: int, what: str = "log_probs"):
        """The log-probs of every sequence; the last one of a sequence comes from its neighbour and has no meaning."""
        with model.eval_mode(disable_auto_offload=True):
            output = model.infer_batch(batch([0, 1, 2, 3], together))
        return torch.cat([t[:-1] for t in output["model_output"][what].unbind()])

    def loss(model_output, data, dp_group=None):
        return -model_output["log_probs"].values().mean(), {}

    def one_rank(weights: dict) -> torch.Tensor:
        """The log-probs of a model of one rank with these weights, one sequence at a time."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="sdpa")
        model.load_state_dict(weights)
        prepare_model(model, Config(precision="fp8-unified", align=align).resolved())
        found = []
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            for ids, temperature in zip(SEQUENCES, TEMPERATURES, strict=True):
                logits = model(input_ids=ids[None], use_cache=False).logits[0]
                found.append(token_log_probs(logits, ids.roll(-1), temperature)[:-1])
        return torch.cat(found)

    facts = {}

    def compare(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        facts[name] = {"unequal": int((ours != theirs).sum()), "max": float((ours - theirs).abs().max())}

    actor, whole = engine(False, 2), engine(False, 1)
    assert actor.get_data_parallel_size() == world // 2
    for together in (1, 4):  # 85 tokens together: one more is needed to cut them in two
        compare(f"actor {together}", scores(actor, together), scores(whole, together))
    compare("entropy", scores(actor, 4, "entropy"), scores(whole, 4, "entropy"))
    del whole
    reference, whole = engine(True, 2), engine(True, 1)
    for together in (1, 4):
        compare(f"reference {together}", scores(reference, together), scores(whole, together))
    first = scores(reference, 4)
    pair = rank // 2
    with actor.train_mode(disable_auto_offload=True):
        for _ in range(2):
            actor.train_batch(batch([2 * pair, 2 * pair + 1], 1), loss)
    sent = {n: t.detach().clone() for n, t in type(actor).get_per_tensor_param.__wrapped__(actor)[0]}
    compare("trained", scores(actor, 4), one_rank(sent))
    compare("learned", scores(actor, 4), first)
    everybody = [None] * world
    torch.distributed.all_gather_object(everybody, facts)
    if rank == 0:
        print("FACTS " + json.dumps(everybody))
    destroy_global_process_group()
