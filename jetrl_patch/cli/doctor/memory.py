"""An estimate, before a run starts, of the memory that it takes per rank. docs/memory.md has the formulas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jetrl_patch import registry
from jetrl_patch.config import Config
from jetrl_patch.config.launches import Storage
from jetrl_patch.models.structure import key_heads
from jetrl_patch.trainer.preflight import built
from jetrl_patch.trainer.rules import Memory

NOT_COUNTED = (
    "not counted: activations and logits, critic, reference and reward models, sync buffers, CUDA graphs, fragmentation; "
    "docs/memory.md says what they take"
)

#: bytes of AdamW's two moments per parameter
MOMENTS = {"fp32": 8.0, "8bit": 2.03, "fp8": 2.03}


@dataclass(frozen=True)
class Counted:
    """Counts of a model: ``parameters`` in all, ``quantized`` of them in ``blocks`` transformer blocks; KV values per token."""

    parameters: int
    quantized: int
    blocks: int
    kv: int
    kv_heads: int


def count(path: Any, storage: Storage, config: Config) -> Counted | None:
    """The counts of the model in a folder or, under its name, in the hub's cache.

    None if it is not here, or wrong in a way that a check reports. ``storage`` says where the framework keeps the policy.
    """
    try:
        found = built(path, config, storage.tensor_parallel, storage.expert_parallel)
    except Exception:  # transformers raises anything for a broken config.json, which check_settings reports
        return None
    return None if found is None else _counted(*found[:2])


def estimate(model: Counted, storage: Storage, config: Config) -> list[Memory]:
    """Rows of the table, in bytes."""
    return [*_trainer(model, storage, config), *_rollout(model, storage, config, _gpu(config))]


def _counted(model: Any, quantized: Any) -> Counted:
    from jetrl_patch.fp8.convert import share_of

    text = model.config.get_text_config()
    heads = key_heads(text)
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kinds = getattr(text, "layer_types", None) or ["attention"] * text.num_hidden_layers
    cached = sum("linear" not in kind for kind in kinds)  # a delta net keeps a state of one size
    latent = getattr(text, "kv_lora_rank", None)
    kv = cached * (latent + text.qk_rope_head_dim if latent else 2 * heads * width)
    total = sum(parameter.numel() for parameter in model.parameters())
    small = round(share_of(model, quantized).parameters * total)
    return Counted(total, small, text.num_hidden_layers, kv, 1 if latent else heads)


def _trainer(model: Counted, storage: Storage, config: Config) -> Iterator[Memory]:
    """Weights, gradients and optimizer as the framework shards them, and the FP8 copies of the weights."""
    parts = {"weights": storage.weights, "gradients": storage.gradients, "optimizer": storage.optimizer}
    if storage.weights is None or None in parts.values():
        yield Memory("trainer", "not estimated", None, storage.trainer)
        return
    for what, part in parts.items():
        assert part is not None
        each = part.bytes + (MOMENTS[config.optimizer_states] if what == "optimizer" else 0)
        how = f"{each:g} bytes x {_billions(model.parameters)}" + (f" / {part.ranks} ranks" if part.ranks > 1 else "")
        how += ", in CPU memory" if what in storage.offloaded else ""
        how += f", {storage.trainer}" if what == "weights" and storage.trainer else ""
        yield Memory("trainer", what, each * model.parameters / part.ranks, how)
    if config.fp8_train:
        yield Memory("trainer", "FP8 weights held", *_held(model, storage, config, storage.weights.ranks))


def _held(model: Counted, storage: Storage, config: Config, ranks: int) -> tuple[float, str]:
    """Bytes of the FP8 weights that a rank holds, and the formula: the table of quantized weights in docs/memory.md."""
    p = model.quantized
    if ranks == 1:
        return 2.0 * p, f"2 x {_billions(p)}, as they are and transposed, until the last backward of a step"
    if config.fp8_all_gather:
        return p / ranks, f"{_billions(p)} / {ranks} ranks (fp8_all_gather)"
    if not storage.reshards:
        return 4.0 * p, f"(2 FP8 + 2 gathered BF16) x {_billions(p)}"
    return 2.0 * p / model.blocks, f"2 x one of {model.blocks} blocks at a time"


def _rollout(model: Counted, storage: Storage, config: Config, gpu: float) -> Iterator[Memory]:
    """Weights on one rank of an engine, a token's KV cache, and what is left for the cache of ``gpu`` bytes."""
    tp = storage.tensor_parallel
    small = model.quantized if config.quantized_rollout else 0
    fp8 = 1 + 4 / (config.scales.block * config.scales.height)  # with an FP32 scale per block
    weights = (small * fp8 + (model.parameters - small) * 2) / tp
    how = f"1 byte x {_billions(small)} + 2 bytes x {_billions(model.parameters - small)}"
    yield Memory("rollout", "weights", weights, f"({how}) / {tp} ranks" if tp > 1 else how)
    each = 1 if config.kv_cache == "fp8" else 2
    token = model.kv * each / min(tp, model.kv_heads)
    split = f" / {min(tp, model.kv_heads)} ranks" if token < model.kv * each else ""
    yield Memory("rollout", "KV cache of one token", token, f"{each} x {model.kv} values{split}")
    if not gpu or storage.utilization is None:
        yield Memory("rollout", "KV cache", None, "no GPU here, so what gpu_memory_utilization leaves is not known")
        return
    left = gpu * storage.utilization - weights
    of = f"gpu_memory_utilization={storage.utilization:g} of {gpu / 2**30:.0f} GiB, less the weights"
    yield Memory("rollout", "KV cache, at most", left, f"{of}: {max(0, int(left / token)):,} tokens" if token else of)


def _gpu(config: Config) -> float:
    """Bytes of one GPU's memory; 0 without a GPU, and in a run on the CPU."""
    import torch

    if registry.platform().is_cpu_run(config) or not torch.cuda.is_available():
        return 0.0
    return float(torch.cuda.get_device_properties(0).total_memory)


def size(count: float) -> str:
    """A number of bytes, for people."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if abs(count) >= 1 << shift:
            return f"{count / (1 << shift):.1f} {unit}"
    return f"{count:.0f} B"


def _billions(count: float) -> str:
    return f"{count / 1e9:.2f}B" if count >= 1e7 else f"{count:,.0f}"
