"""``precision="fp16"``, ``kv_cache`` and ``head_dtype`` in OpenRLHF: arguments that are refused or completed, and the loss scale.

OpenRLHF's ``--ds.param_dtype fp16`` loads all models in FP16 and switches on DeepSpeed's own mixed precision: FP32 masters in its
optimizer, a dynamic loss scale from 2^16 on, doubled after 1000 good steps, halved at an overflow after a first one that is
let pass. Its vLLM engines stay in BF16 (the dtype is written into the code); the vLLM adapter sets them to FP16. Added here: what
does not fit FP16 is an error, skipped steps are counted, and a run that skips all of them stops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jetrl_patch import registry, runtime
from jetrl_patch.adapters.openrlhf.state import WORKER
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, JetrlError, SyncError, explain
from jetrl_patch.precision.loss_scale import at_smallest
from jetrl_patch.trainer.rules import Rule, broken, is_set, more_than_one

__all__ = ["check_model", "check_weights", "complete", "figures", "optimizer_step", "problems", "scales_loss"]

RULES: tuple[Rule, ...] = (
    Rule("ds.load_in_4bit", is_set, "weights in FP16", "leave it out", "all"),
    Rule("ds.tensor_parallel_size", more_than_one, "1: OpenRLHF's tensor parallelism is BF16 only", "set it to 1", "all"),
)

HEAD_RULES: tuple[Rule, ...] = (
    Rule("ds.tensor_parallel_size", more_than_one, "a trainer that holds a whole lm_head", "set it to 1", "all"),
    Rule("ds.use_liger_kernel", is_set, "logits from lm_head's forward", "leave it out", "all"),
)


def problems(select: Callable[[str], Any], config: Config) -> Iterator[JetrlError]:
    """What cannot be kept with these three settings, as the errors to raise."""

    def name(path: str) -> str:
        return f"OpenRLHF's --{path}"

    if config.mode.scales_loss:
        yield from broken(RULES, select, config, name)
    elif config.mode.only_measures and select("ds.param_dtype") == "fp16":
        fix = "use precision='fp16', which sets both sides: OpenRLHF leaves its vLLM engines in BF16"
        what = "OpenRLHF's --ds.param_dtype with precision='bf16'"
        yield ConfigError(explain(what, required="BF16 on both sides", found="'fp16'", fix=fix))
    if config.fp32_head:
        yield from broken(HEAD_RULES, select, config, name)
    if config.kv_cache == "fp8":
        error = registry.rollout().kv_cache_error()
        if error is not None:
            yield error


def complete(args: Any, config: Config) -> list[str]:
    """Write into the arguments what FP16 needs; gives the changes in words."""
    if not config.mode.scales_loss or args.ds.param_dtype == "fp16":
        return []
    args.ds.param_dtype = "fp16"
    return ["--ds.param_dtype fp16: precision='fp16' is FP16 on both sides"]


def scales_loss() -> bool:
    """Whether this process trains with a loss scale."""
    return runtime.is_active() and runtime.active_config().mode.scales_loss


def _pieces(module: Any) -> Iterator[tuple[str, Any]]:
    """Each parameter, or this rank's part of it where ZeRO-3 has split it."""
    for name, parameter in module.named_parameters():
        yield name, getattr(parameter, "ds_tensor", parameter)


def check_model(module: Any, path: str) -> None:
    """Raise ModelError for a checkpoint that does not fit FP16; loaded in FP16, such weights are Inf by now."""
    if not scales_loss():
        return
    from jetrl_patch.precision.fp16 import check_fits

    check_fits(_pieces(module), f"the checkpoint {path}")


def check_weights(module: Any) -> None:
    """Before a weight sync, on every rank: all weights must be finite in FP16.

    Raises SyncError on all ranks, naming the weights of this one, so that none waits for another in a collective.
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
            f"the weights do not fit FP16, so nothing was synced: {'; '.join(found[:10]) or 'another rank names them'}; look "
            f"at the last optimizer steps (gradient norm, learning rate), or use precision='bf16'"
        )


def optimizer_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``DeepspeedStrategy.optimizer_step``: was the step skipped, and how often lately?

    Calls between the boundaries of gradient accumulation are no steps. Raises PrecisionError when none comes through any more.
    """

    def optimizer_step(self: Any, optimizer: Any, model: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        if not scales_loss():
            return original(self, optimizer, model, scheduler, *args, **kwargs)
        engine = model if hasattr(model, "skipped_steps") else model.model  # an Actor holds its engine
        steps, skipped = engine.global_steps, engine.skipped_steps
        try:
            result = original(self, optimizer, model, scheduler, *args, **kwargs)
        except Exception as error:  # DeepSpeed raises a bare Exception there
            if "loss scale already at minimum" in str(error):
                raise at_smallest(WORKER.loss_scale.in_a_row + 1) from error
            raise
        if engine.global_steps > steps:
            WORKER.loss_scale.note(skipped=engine.skipped_steps > skipped, scale=float(engine.optimizer.loss_scale))
        return result

    return optimizer_step


def figures() -> dict[str, float]:
    """For the report of an actor: the loss scale and the skipped steps; nothing in another precision."""
    return WORKER.loss_scale.figures() if scales_loss() else {}
