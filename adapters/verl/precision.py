"""``precision="fp16"``, ``kv_cache`` and ``head_dtype`` in verl: settings that are refused or completed, and the loss scale.

verl 0.9.1 trains in FP16 by itself where FSDP's ``mixed_precision.param_dtype`` is fp16: autocast, FP32 parameters, reduction and
buffers, and a ``ShardedGradScaler(growth_interval=400)`` with unscale before the clip, as Precision-RL has it. Added here: that
actor, reference and rollout agree, that log-probs are FP32 (``logprob``; verl rounds them to FP16), that the scaler really
scales, that its skipped steps are counted, that what does not fit FP16 is an error, and that the sync sends FP16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from jetrl_patch import registry, runtime
from jetrl_patch.adapters.verl.paths import ACTOR, ENGINE, MODEL, REF, ROLLOUT, named
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, ConflictError, JetrlError, NotPatchedError, explain
from jetrl_patch.precision.loss_scale import GROWTH_INTERVAL
from jetrl_patch.trainer.rules import Rule, broken, is_set, other_than, positive

if TYPE_CHECKING:
    from jetrl_patch.sync.stream import SyncStats

__all__ = ["build_fsdp_module", "check_model", "figures", "optimizer_step", "problems", "scales_loss", "stream", "wanted"]

FP16 = ("float16", "fp16", "half")

_FSDP = "fsdp or fsdp2: with other engines it was not tried"
_MASTERS = "fp32: parameters are held in FP32 and cast for the forward"

RULES: tuple[Rule, ...] = (
    Rule(f"{ACTOR}.strategy", other_than("fsdp", "fsdp2"), _FSDP, "use one of them", "all"),
    Rule(f"{REF}.strategy", other_than("fsdp", "fsdp2"), _FSDP, "use one of them", "all"),
    Rule(f"{ACTOR}.fsdp_config.model_dtype", other_than("fp32", "float32"), _MASTERS, "set it so", "all"),
    *(
        Rule(f"{MODEL}.{name}", bad, "full weights: verl merges adapters in BF16", f"set it to {off}", "all")
        for name, bad, off in (("lora_rank", positive, 0), ("lora.rank", positive, 0), ("lora_adapter_path", is_set, "null"))
    ),
    Rule(f"{ROLLOUT}.checkpoint_engine.backend", other_than("naive"), "naive: the others send BF16", "use it", "all"),
)

HEAD_RULES: tuple[Rule, ...] = (
    Rule(f"{ACTOR}.strategy", other_than("fsdp", "fsdp2"), _FSDP, "use one of them, or leave head_dtype at 'auto'", "all"),
    Rule(
        f"{MODEL}.use_fused_kernels", is_set, "logits from lm_head: fused kernels read its weight and pass its forward by",
        "switch it off, or leave head_dtype at 'auto'", "all",
    ),
)  # fmt: skip

#: where a 16-bit dtype is said
DTYPES = (
    f"{ACTOR}.fsdp_config.mixed_precision.param_dtype", f"{REF}.fsdp_config.mixed_precision.param_dtype", f"{ROLLOUT}.dtype",
    f"{ENGINE}.dtype", f"{ACTOR}.megatron.dtype",
)  # fmt: skip

Select = Callable[[str], Any]


def _is_half(value: Any) -> bool:
    return str(value).removeprefix("torch.") in FP16


def problems(select: Select, config: Config) -> Iterator[JetrlError]:
    """What cannot be kept with these three settings, as the errors to raise."""
    if config.mode.scales_loss:
        yield from broken(RULES, select, config, named)
        asked = select(f"{ENGINE}.dtype")
        if asked is not None and not _is_half(asked):
            yield ConflictError(explain(named(f"{ENGINE}.dtype"), required="float16", found=repr(asked), fix="leave it out"))
    elif config.mode.only_measures:
        found = [f"{path}={select(path)}" for path in DTYPES if _is_half(select(path))]
        if found:
            yield ConfigError(
                explain(
                    "verl settings with precision='bf16'",
                    required="BF16 on both sides",
                    found=", ".join(found),
                    fix="FP16 on one side alone is worse than none: use precision='fp16', which sets both sides",
                )
            )
    if config.fp32_head:
        yield from broken(HEAD_RULES, select, config, named)
    if config.kv_cache == "fp8":
        other = select(f"{ENGINE}.kv_cache_dtype")
        if other not in (None, "auto", "fp8", "fp8_e4m3"):
            fix = "leave it out"
            yield ConflictError(explain(named(f"{ENGINE}.kv_cache_dtype"), required="kv_cache='fp8'", found=repr(other), fix=fix))
        error = registry.rollout().kv_cache_error()
        if error is not None:
            yield error


def wanted(config: Config) -> dict[str, Any]:
    """verl settings that FP16 needs: path -> value. The critic stays what it is."""
    if not config.mode.scales_loss:
        return {}
    values: dict[str, Any] = {f"{ROLLOUT}.dtype": "float16"}
    for path in (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config"):
        values |= {
            f"{path}.dtype": "float16",
            f"{path}.mixed_precision": {"param_dtype": "fp16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        }
    return values


def scales_loss() -> bool:
    """Whether this process trains with a loss scale."""
    return runtime.is_active() and runtime.active_config().mode.scales_loss


def check_model(module: Any) -> None:
    """Raise ModelError for a loaded checkpoint whose weights do not fit FP16; meta tensors are another rank's to check."""
    if not scales_loss():
        return
    from jetrl_patch.precision.fp16 import check_fits

    check_fits(module.named_parameters(), f"the checkpoint of {type(module).__name__}")


def stream(weights: Iterable[tuple[str, Any]], stats: SyncStats) -> Iterator[tuple[str, Any]]:
    """The weights of a sync in FP16; see ``fp16_stream``."""
    from jetrl_patch.precision.fp16 import fp16_stream

    return fp16_stream(weights, stats)


def build_fsdp_module(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``FSDPEngine._build_fsdp_module``, which makes the scaler: torch makes one that does nothing without CUDA.

    Raises ConflictError if a language model was built for another dtype.
    """

    def _build_fsdp_module(self: Any, module: Any) -> Any:
        wrapped = original(self, module)
        if scales_loss() and self.model_config.model_type == "language_model":
            if str(self._autocast_dtype) != "torch.float16":
                raise ConflictError(
                    explain(
                        "verl's FSDP engine with precision='fp16'",
                        required="torch.float16",
                        found=str(self._autocast_dtype),
                        fix="leave fsdp_config.mixed_precision unset",
                    )
                )
            self.scaler = None if self.engine_config.forward_only else scaling(self.scaler)
        return wrapped

    return _build_fsdp_module


def scaling(scaler: Any) -> Any:
    """verl's scaler if it scales, else one that does on this device."""
    if scaler is not None and scaler.is_enabled():
        return scaler
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
    from verl.utils.device import get_device_name

    ours = ShardedGradScaler(get_device_name(), growth_interval=GROWTH_INTERVAL)
    if not ours.is_enabled():
        raise ConfigError(
            explain("precision='fp16'", required="a loss scale", found=f"none on {get_device_name()!r}", fix="use 'bf16'")
        )
    return ours


def optimizer_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``FSDPEngine.optimizer_step``: was the step skipped, and how often lately?

    Raises PrecisionError (``LossScale.note``) when no step comes through any more.
    """

    def optimizer_step(self: Any) -> Any:
        if not scales_loss() or self.model_config.model_type != "language_model":
            return original(self)
        if getattr(self, "scaler", None) is None:
            raise NotPatchedError("the trainer's model was built before this process was patched; it trains without a loss scale")
        from jetrl_patch.adapters.verl.state import WORKER

        before = self.scaler.get_scale()
        norm = original(self)
        after = self.scaler.get_scale()
        WORKER.loss_scale.note(skipped=after < before, scale=after)
        return norm

    return optimizer_step


def figures() -> dict[str, float]:
    """For the report of a worker: the loss scale and the skipped steps; nothing in another precision."""
    from jetrl_patch.adapters.verl.state import WORKER

    return WORKER.loss_scale.figures() if scales_loss() else {}
