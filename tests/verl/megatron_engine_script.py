"""Run under torchrun: verl's real Megatron engine, patched, on the CPU, beside the exact Hugging Face model.

    torchrun --nproc_per_node=N megatron_engine_script.py MODEL_DIR '{"tp": 2, ...}'

Before the first and after each of some updates it compares log-probs with those of the Hugging Face model of the same weights,
whose bits are the rollout's, and gradients with that model's. It also reads what a weight sync sends.
Prints a JSON line of facts on rank 0.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jetrl_patch

LENGTHS = (19, 24, 13, 33, 7, 28)
#: of the tokens' log-probs in the loss, so that gradients do not vanish
SIGNS = (1.0, -1.0, 0.5)


def engine_of(folder: str, given: dict[str, Any]) -> Any:
    """verl's engine of a checkpoint. ``given``: tp, pp, settings of its configuration's sections, and who it is."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.engine import EngineRegistry

    from jetrl_patch.adapters.verl.megatron import NEEDS_TE

    engine = {"use_mbridge": True, **given.get("engine", {})}
    engine["override_transformer_config"] = {**dict.fromkeys(NEEDS_TE, False), **engine.get("override_transformer_config", {})}
    sizes = {"tensor_model_parallel_size": given.get("tp", 1), "pipeline_model_parallel_size": given.get("pp", 1)}
    return EngineRegistry.new(
        model_type="language_model",
        backend="megatron",
        model_config=HFModelConfig(path=folder, use_remove_padding=True, enable_gradient_checkpointing=False),
        engine_config=McoreEngineConfig(**sizes, **engine),
        optimizer_config=McoreOptimizerConfig(
            **{"lr": 1e-3, "total_training_steps": 10, "lr_warmup_steps": 0, **given.get("optimizer", {})}
        ),
        checkpoint_config=CheckpointConfig(),
    )


def supports_of(rows: list[Any]) -> list[Any]:
    """What the tokens [T] of each row after the first were drawn from; every third one from all tokens."""
    import torch

    from jetrl_patch.exact.support import Support

    generator = torch.Generator().manual_seed(4)

    def drawn(place: int, token: int) -> list[int]:
        others = torch.randint(0, 259, (place % 9 * 3,), generator=generator).tolist()
        return sorted({token, *others}) if place % 3 else []

    return [Support.of([drawn(place, int(token)) for place, token in enumerate(row[1:])]) for row in rows]


def batch_of(rows: list[Any], temperature: list[float], micro: int, supports: list[Any]) -> Any:
    """verl's batch of token ids [T] each, with a temperature each, and what they were drawn from, as V1 has it."""
    import torch
    from verl.utils import tensordict_utils as tu

    from jetrl_patch.trainer.support import KEY

    def nested(parts: list[Any]) -> Any:
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    drawn = {"responses": nested([row[1:] for row in rows]), "extra_fields": [{KEY: one.pack()} for one in supports]}
    return tu.get_tensordict(
        (drawn if supports else {}) | {
            "input_ids": nested(rows), "position_ids": nested([torch.arange(len(row)) for row in rows]),
            "loss_mask": nested([torch.ones(len(row)) for row in rows]), "temperature": torch.tensor(temperature),
        },
        {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": micro, "use_remove_padding": True, "calculate_entropy": True},
    )  # fmt: skip


def signs(count: int) -> Any:
    import torch

    return torch.tensor(SIGNS).repeat(-(-count // len(SIGNS)))[:count]


def loss_of(rows: list[Any]) -> float:
    """What a sum over the batch is divided by."""
    return float(sum(map(len, rows)))


def fused(state: dict[str, Any]) -> dict[str, Any]:
    """The tensors of a checkpoint under transformers' names, which keeps the experts of a block in two parameters."""
    import torch

    found, experts = {}, {}
    for name, tensor in state.items():
        block, inside, rest = name.partition(".mlp.experts.")
        if not inside:
            found[name] = tensor
            continue
        expert, part, _weight = rest.split(".")
        experts.setdefault(f"{block}.mlp.experts", {})[int(expert), part] = tensor
    for block, parts in experts.items():
        count = len(parts) // 3
        gate, up, down = (torch.stack([parts[e, f"{part}_proj"] for e in range(count)]) for part in ("gate", "up", "down"))
        found |= {f"{block}.gate_up_proj": torch.cat((gate, up), 1), f"{block}.down_proj": down}
    return found


class Reference:
    """The exact Hugging Face model of some weights."""

    def __init__(self, folder: str, state: Any, pad_row: bool = True) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from jetrl_patch import session
        from jetrl_patch.adapters.verl.state import WORKER
        from jetrl_patch.trainer.prepare import prepare_model

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        if pad_row:
            self.model.get_input_embeddings().padding_idx = None  # Megatron's embedding trains every row
        if state is not None:
            self.model.load_state_dict(fused(state), strict=not self.model.config.tie_word_embeddings)
        ranks = {"rollout_tp": WORKER.rollout_tp, "rollout_ep": WORKER.rollout_ep}
        prepare_model(self.model, session.active_config(), device_type="cpu", **ranks)

    def log_probs(self, rows: list[Any], temperature: list[float], vocabulary: int, supports: list[Any]) -> list[Any]:
        """FP32 [T - 1] of each row."""
        import torch

        from jetrl_patch.adapters.verl.logprob import ban, banned_columns
        from jetrl_patch.exact import ops
        from jetrl_patch.exact.logprob import chained

        found = []
        for row, t, support in zip(rows, temperature, supports or [None] * len(rows), strict=True):
            logits = self.model(input_ids=row[None], use_cache=False).logits[0, :-1]
            outside = banned_columns(logits, vocabulary, [])

            def banned(block: Any, _rows: slice, outside: Any = outside) -> Any:
                return ban(block, outside)

            edit = banned if support is None else chained(banned, support.edit)
            found.append(ops.token_log_probs(logits, row[1:], torch.tensor([[t]]), edit=edit))
        return found

    def gradients(self, rows: list[Any], temperature: list[float], vocabulary: int, supports: list[Any]) -> dict[str, Any]:
        """FP32 gradients of the batch's loss."""
        for found in self.log_probs(rows, temperature, vocabulary, supports):
            (-(found * signs(len(found))).sum() / loss_of(rows)).backward()
        return self.taken()

    def taken(self) -> dict[str, Any]:
        """FP32 gradients so far."""
        return {name: p.grad.float() for name, p in self.model.named_parameters() if p.grad is not None}

    def balance(self, rows: list[Any], layers: dict[str, Any], micro: int) -> dict[str, Any]:
        """Add the gradients of the routers' losses, which are a mean over micro-batches, and return all.

        The load-balancing loss of the Switch Transformer (arXiv 2101.03961, eq. 4 to 6), for k experts of each token, and the
        z-loss of ST-MoE (arXiv 2202.08906, eq. 5), for each layer.
        """
        import torch

        config, batches = self.model.config, [rows[at : at + micro] for at in range(0, len(rows), micro)]
        chosen, experts = config.num_experts_per_tok, config.num_experts
        logits: dict[Any, list[Any]] = {}
        routers = [module for name, module in self.model.named_modules() if name.endswith("mlp.gate")]
        hooks = [router.register_forward_hook(lambda at, _, out: logits[at].append(out[0].float())) for router in routers]
        for batch in batches:
            logits.update((router, []) for router in routers)
            for row in batch:
                self.model(input_ids=row[None], use_cache=False)
            total = torch.zeros(())
            for every in map(torch.cat, logits.values()):
                probabilities = every.softmax(-1)
                counts = torch.bincount(probabilities.topk(chosen).indices.flatten(), minlength=experts)
                share = counts / (chosen * len(every))
                total = total + layers["moe_aux_loss_coeff"] * experts * (share * probabilities.mean(0)).sum()
                total = total + layers["moe_z_loss_coeff"] * every.logsumexp(-1).square().mean()
            (total / len(batches)).backward()
        for hook in hooks:
            hook.remove()
        return self.taken()


def norm_of(gradients: dict[str, Any]) -> float:
    return float(sum(float(g.pow(2).sum()) for g in gradients.values()) ** 0.5)


def loss_function(count: float) -> Any:
    """The same loss from verl's output, whose rows have a last value without meaning. ``count``: what sums are divided by."""

    def loss(model_output: Any, data: Any, dp_group: Any = None) -> Any:
        found = model_output["log_probs"]
        total = sum(-(row[:-1] * signs(len(row) - 1)).sum() for row in found.unbind()) / count
        return total, {"loss": total.detach().item()}

    return loss


def weights_of(engine: Any) -> dict[str, Any]:
    """The whole BF16 tensors that the bridge exports."""
    export = engine.bridge.export_weights if engine.vanilla_bridge else engine.bridge.export_hf_weights
    return {name: tensor.detach().clone() for name, tensor in export(engine.module)}


def update(engine: Any, batch: Any, loss: Any) -> float:
    """One optimizer step. Returns the norm of the gradients."""
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch, loss)
        norm = engine.optimizer_step()
        engine.lr_scheduler_step()
    return float(norm)


def refused(engine: Any, saved: Path) -> bool:
    """Whether the engine refuses a checkpoint of other settings."""
    import torch.distributed as dist

    from jetrl_patch.errors import ConfigError

    record = saved / "jetrl.json"
    text = record.read_text()
    dist.barrier()
    if dist.get_rank() == 0:
        record.write_text(text.replace('"pow2"', '"fp32"'))
    dist.barrier()
    try:
        engine.load_checkpoint(str(saved))
    except ConfigError as error:
        found = "scale_format='pow2'" in str(error)
    else:
        found = False
    dist.barrier()
    if dist.get_rank() == 0:
        record.write_text(text)
    dist.barrier()
    return found


def _equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    import torch

    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def round_each_part() -> None:
    """Let the ranks of a row-parallel layer round their sums before they are added, as stock Megatron and vLLM do."""
    import functools

    import torch

    from jetrl_patch.fp8 import parallel

    parallel.added = lambda parts: functools.reduce(torch.add, parts.bfloat16().unbind())


def add_exponentials() -> None:
    """Let ranks add their exponentials of the vocabulary, as Megatron's cross entropy does."""
    from verl.utils.megatron import tensor_parallel

    from jetrl_patch.exact import logprob

    logprob.token_log_probs = lambda logits, labels, *_, **__: tensor_parallel.vocab_parallel_log_probs_from_logits(
        logits.float(), labels
    )


CONTROLS = {"rounded parts": round_each_part, "added exponentials": add_exponentials}


def main(folder: str, given: dict[str, Any]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from safetensors.torch import load_file
    from verl.utils.distributed import initialize_global_process_group

    from jetrl_patch.adapters.verl.state import WORKER
    from jetrl_patch.backends.quantize import quantize_weight
    from jetrl_patch.session import active_config
    from jetrl_patch.sync.protocol import Manifest

    torch.set_num_threads(1)
    initialize_global_process_group()
    WORKER.rollout_tp = given.get("rollout_tp", given.get("tp", 1))
    WORKER.rollout_ep = given.get("rollout_ep", 1)
    engine = engine_of(folder, given)
    engine.initialize()
    ranks = engine.get_data_parallel_size()
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, 300, (n,), generator=generator) for n in LENGTHS]
    if given.get("pad"):  # a token in the middle of a sequence whose embedding is all zeros
        rows[0][5] = rows[3][9] = 0
    temperature = given.get("temperature", [1.0] * len(rows))
    share = len(rows) // ranks
    mine = slice(engine.get_data_parallel_rank() * share, (engine.get_data_parallel_rank() + 1) * share)
    vocabulary = len(engine.model_config.tokenizer)
    supports = supports_of(rows) if given.get("limits") else []
    own_batch = batch_of(rows[mine], temperature[mine], given.get("micro", 2), supports[mine])
    facts: dict[str, Any] = {"equal": [], "tokens": [], "norms": []}
    state, stored = weights_of(engine), load_file(f"{folder}/model.safetensors")
    facts["loaded"] = all(torch.equal(state[name], tensor) for name, tensor in stored.items())
    for _step in range(given.get("steps", 2)):
        with engine.eval_mode():
            output = engine.forward_backward_batch(own_batch, None, forward_only=True)
        reference = Reference(folder, state)
        own = (torch.zeros(2), torch.zeros(1))
        if engine.is_mp_src_rank_with_outputs():
            with torch.no_grad():
                wanted = reference.log_probs(rows[mine], temperature[mine], vocabulary, supports[mine])
            found = [row[:-1].float() for row in output["model_output"]["log_probs"].unbind()]
            pairs = list(zip(found, wanted, strict=True))
            own = (torch.tensor([float(sum((a == b).sum() for a, b in pairs)), float(sum(map(len, wanted)))]), own[1])
            facts["finite"] = bool(all(row.isfinite().all() for row in output["model_output"]["entropy"].unbind()))
        dist.all_reduce(own[0])
        facts["equal"].append(int(own[0][0]))
        facts["tokens"].append(int(own[0][1]))
        # verl averages over data-parallel ranks
        norm = update(engine, own_batch, loss_function(loss_of(rows) / ranks))
        theirs = reference.gradients(rows, temperature, vocabulary, supports)
        layers = given.get("engine", {}).get("override_transformer_config", {})
        if layers.get("moe_aux_loss_coeff"):
            facts.setdefault("unbalanced", []).append(norm_of(theirs))
            theirs = reference.balance(rows, layers, given.get("micro", 2))
        facts["norms"].append([norm, norm_of(theirs)])
        if given.get("pad"):
            theirs = Reference(folder, state, pad_row=False).gradients(rows, temperature, vocabulary, supports)
            facts.setdefault("without pad row", []).append(norm_of(theirs))
        state = weights_of(engine)
        sent = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    manifest = Manifest.decode(sent["jetrl.manifest"])
    form = active_config().scale_format
    quantized = {layer: quantize_weight(state[f"{layer}.weight"].bfloat16(), form) for layer in manifest.layers}
    facts |= {
        "layers": len(manifest.layers),
        "bytes": all(torch.equal(sent[f"{n}.weight"].view(torch.uint8), w.q.view(torch.uint8)) for n, w in quantized.items()),
        "scales": all(torch.equal(sent[f"{n}.weight_scale_inv"], w.s) for n, w in quantized.items()),
        "rest": all(torch.equal(sent[n], state[n]) for n in manifest.tensors if n.rpartition(".")[0] not in quantized),
        "complete": set(manifest.expected()) == set(sent) - {"jetrl.manifest", "jetrl.commit"},
        "fraction": WORKER.stats.quantized / WORKER.stats.quantized_as_bf16,
    }
    if given.get("save"):
        engine.save_checkpoint(given["save"])
        again = engine_of(folder, given)
        again.initialize()
        facts["refused"] = refused(again, Path(given["save"]))
        again.load_checkpoint(given["save"])
        facts["resumed"] = _equal(weights_of(again), state)
        for each in (engine, again):
            update(each, own_batch, loss_function(loss_of(rows) / ranks))
        facts["continued"] = _equal(weights_of(again), weights_of(engine))
    return facts


if __name__ == "__main__":
    from verl.utils.distributed import destroy_global_process_group

    asked = json.loads(sys.argv[2])
    jetrl_patch.enable(precision="fp8-unified", platform="cpu", **asked.get("plugin", {}))
    if "control" in asked:
        CONTROLS[asked["control"]]()
    found = main(sys.argv[1], asked)
    import torch.distributed as dist

    if dist.get_rank() == 0:
        print("FACTS", json.dumps(found))
    destroy_global_process_group()
