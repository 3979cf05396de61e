"""verl's own FSDP engine around a tiny model, for scripts that run it without Ray and vLLM."""

from __future__ import annotations

from typing import Any


def build(
    strategy: str, model_dir: str, *, optimizer: dict[str, Any] | None = None, checkpoint: Any = None,
    model: dict[str, Any] | None = None, **engine: Any,
):  # fmt: skip
    """Return an engine whose model and optimizer are not built yet.

    Args:
        strategy: ``fsdp`` or ``fsdp2``.
        optimizer: settings of ``FSDPOptimizerConfig`` besides a constant learning rate of 1e-3.
        model: further settings of ``HFModelConfig``.
        engine: settings of ``FSDPEngineConfig``.
    """
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    return EngineRegistry.new(
        model_type="language_model",
        backend=strategy,
        model_config=HFModelConfig(
            path=model_dir, use_remove_padding=True, override_config={"attn_implementation": "sdpa"},
            **{"load_tokenizer": False, "enable_gradient_checkpointing": False, **(model or {})},
        ),
        engine_config=FSDPEngineConfig(strategy=strategy, use_torch_compile=False, **engine),
        optimizer_config=FSDPOptimizerConfig(**{"lr": 1e-3, "total_training_steps": 10, **(optimizer or {})}),
        checkpoint_config=checkpoint,
    )  # fmt: skip


def batch_of(sequences: list[Any], **settings: Any):
    """Return verl's batch of token ids [T] each, in which every token counts, one sequence a micro-batch."""
    import torch
    from verl.utils import tensordict_utils as tu

    def nested(rows: list[Any]) -> Any:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    return tu.get_tensordict(
        {
            "input_ids": nested(sequences),
            "position_ids": nested([torch.arange(len(s)) for s in sequences]),
            "loss_mask": nested([torch.ones(len(s)) for s in sequences]),
        },
        {"temperature": 1.0, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1, "use_remove_padding": True} | settings,
    )
