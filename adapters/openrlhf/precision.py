"""``precision="fp16"``, ``kv_cache`` and ``head_dtype`` in OpenRLHF: check and complete the arguments, and watch the loss scale.

OpenRLHF's ``--ds.param_dtype fp16`` loads all models in FP16 and enables DeepSpeed's mixed precision: FP32 masters in its
optimizer, and a dynamic loss scale that starts at 2^16, doubles after 1000 good steps and halves at every overflow but the
first. OpenRLHF hard-codes BF16 for its vLLM engines; the vLLM adapter sets them to FP16. This module raises on values that
do not fit FP16, counts skipped steps, and stops a run that skips all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jetrl_patch import registry
from jetrl_patch.adapters.openrlhf.state import WORKER
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, JetrlError, SyncError, explain
from jetrl_patch.precision.loss_scale import at_smallest
from jetrl_patch.trainer.precision import scales_loss
from jetrl_patch.trainer.rules import Rule, broken, is_set, more_than_one

__all__ = ["check_model", "check_weights", "complete", "figures", "optimizer_step", "problems"]

_WHOLE = "whole sequences on each rank (where a response begins is looked up in them)"

RULES: tuple[Rule, ...] = (
    Rule("ds.ring_attn_size", more_than_one, _WHOLE, "set it to 1", "all"),
    Rule("ds.load_in_4bit", is_set, "weights in FP16", "remove the flag", "all"),
    Rule("ds.tensor_parallel_size", more_than_one, "1 (OpenRLHF's tensor parallelism supports only BF16)", "set it to 1", "all"),
)

HEAD_RULES: tuple[Rule, ...] = (
    Rule("ds.tensor_parallel_size", more_than_one, "a whole lm_head on each rank", "set it to 1", "all"),
    Rule("ds.use_liger_kernel", is_set, "logits from lm_head's forward", "remove the flag", "all"),
)


def problems(select: Callable[[str], Any], config: Config) -> Iterator[JetrlError]:
    """Yield an error for each argument that contradicts these three settings."""

    def name(path: str) -> str:
        return f"OpenRLHF's --{path}"

    if config.mode.scales_loss:
        yield from broken(RULES, select, config, name)
    elif config.mode.only_measures and select("ds.param_dtype") == "fp16":
        fix = "set precision='fp16' (JETRL_PRECISION=fp16), which uses FP16 on both sides"
        what = "OpenRLHF's --ds.param_dtype with precision='bf16'"
        required = "bf16, because OpenRLHF's vLLM engines stay in BF16"
        yield ConfigError(explain(what, required=required, found="'fp16'", fix=fix))
    if config.fp32_head:
        yield from broken(HEAD_RULES, select, config, name)
    if config.kv_cache == "fp8":
        error = registry.rollout().kv_cache_error()
        if error is not None:
            yield error


def complete(args: Any, config: Config) -> list[str]:
    """Set what FP16 needs in the arguments; return a description of each change."""
    if not config.mode.scales_loss or args.ds.param_dtype == "fp16":
        return []
    args.ds.param_dtype = "fp16"
    return ["--ds.param_dtype fp16: precision='fp16' uses FP16 on both sides"]


def _pieces(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield each parameter, or this rank's partition of it under ZeRO-3."""
    for name, parameter in module.named_parameters():
        yield name, getattr(parameter, "ds_tensor", parameter)


def check_model(module: Any, path: str) -> None:
    """Raise ModelError if the checkpoint does not fit FP16: its weights were loaded in FP16, so too large ones are Inf."""
    if not scales_loss():
        return
    from jetrl_patch.precision.fp16 import check_fits

    check_fits(_pieces(module), f"the checkpoint {path}")


def check_weights(module: Any) -> None:
    """Check before a weight sync, on every rank, that all weights are finite in FP16.

    Raises SyncError on all ranks, so that none waits in a collective. Each rank names its own weights.
    """
    if not scales_loss():
        return
    import torch
    import torch.distributed as dist

    from jetrl_patch.precision.fp16 import misfit

    found = [f"{name} has {why}" for name, weight in _pieces(module) if (why := misfit(weight))]
    anywhere = torch.tensor([len(found)], device=next(module.parameters()).device)
    dist.all_reduce(anywhere)
    if int(anywhere):
        raise SyncError(
            f"the weights do not fit FP16, so nothing was synced: {_first_of(found) or 'another rank names them'}. "
            "Check the last optimizer steps (gradient norm, learning rate), or use precision='bf16'."
        )


def _first_of(found: list[str]) -> str:
    rest = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return "; ".join(found[:3]) + rest


def optimizer_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``DeepspeedStrategy.optimizer_step``: count skipped steps.

    Calls within gradient accumulation are not steps. Raises PrecisionError once every step is skipped.
    """

    def optimizer_step(self: Any, _optimizer: Any, model: Any, _scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        if not scales_loss():
            return original(self, _optimizer, model, _scheduler, *args, **kwargs)
        engine = model if hasattr(model, "skipped_steps") else model.model  # an Actor holds its engine
        steps, skipped = engine.global_steps, engine.skipped_steps
        try:
            result = original(self, _optimizer, model, _scheduler, *args, **kwargs)
        except Exception as error:  # DeepSpeed raises a bare Exception there
            if "loss scale already at minimum" in str(error):
                raise at_smallest(WORKER.loss_scale.in_a_row + 1) from error
            raise
        if engine.global_steps > steps:
            WORKER.loss_scale.note(skipped=engine.skipped_steps > skipped, scale=float(engine.optimizer.loss_scale))
        return result

    return optimizer_step


def figures() -> dict[str, float]:
    """Return the loss scale and the skipped steps for an actor's report; empty in other precisions."""
    return WORKER.loss_scale.figures() if scales_loss() else {}
