"""``precision="fp16"``, ``kv_cache``, ``head_dtype`` and ``optimizer_states`` in verl: check and complete the settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jetrl_patch.adapters.verl.yaml_settings import ACTOR, ENGINE, MODEL, REF, ROLLOUT, Select, named
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, ConflictError, JetrlError, NotPatchedError, explain
from jetrl_patch.patching.patch import replacement
from jetrl_patch.trainer.precision import GROWTH_INTERVAL, scales_loss
from jetrl_patch.trainer.rules import (
    OPTIMIZER_MODULE,
    OPTIMIZER_OPTIONS,
    OPTIMIZERS,
    Rule,
    broken,
    check_torchao,
    is_set,
    kv_cache_problems,
    other_than,
    positive,
    raised,
)

# ---- FP16, the KV cache and the head: check and complete the settings, and watch the loss scale ----
# verl 0.9.1 trains in FP16 with FSDP's ``mixed_precision.param_dtype=fp16``, as in Precision-RL: autocast, FP32 parameters,
# reduction and buffers, and a ``ShardedGradScaler(growth_interval=400)`` that unscales before the clip. The plugin makes actor,
# reference and rollout agree, replaces a disabled scaler, counts skipped steps, raises if a value does not fit FP16, and sends
# FP16 in the sync. ``logprob.py`` computes FP32 log-probs; verl's own are rounded to FP16.

FP16 = ("float16", "fp16", "half")

_FSDP = "fsdp or fsdp2 (other engines are untested)"
_MASTERS = "fp32 (the forward pass casts FP32 parameters)"

RULES: tuple[Rule, ...] = (
    Rule(f"{ACTOR}.strategy", other_than("fsdp", "fsdp2"), _FSDP, "set it to fsdp2", "all"),
    Rule(f"{REF}.strategy", other_than("fsdp", "fsdp2"), _FSDP, "set it to fsdp2", "all"),
    Rule(f"{ACTOR}.fsdp_config.model_dtype", other_than("fp32", "float32"), _MASTERS, "set it to fp32", "all"),
    *(
        Rule(f"{MODEL}.{name}", bad, "full weights (verl merges adapters in BF16)", f"set it to {off}", "all")
        for name, bad, off in (("lora_rank", positive, 0), ("lora.rank", positive, 0), ("lora_adapter_path", is_set, "null"))
    ),
    Rule(f"{ROLLOUT}.checkpoint_engine.backend", other_than("naive"), "naive (the others send BF16)", "set it to naive", "all"),
    Rule(f"{ENGINE}.dtype", lambda value: not _is_half(value), "float16", "remove it", "all", ConflictError),
)
KV_RULES: tuple[Rule, ...] = (
    Rule(f"{ENGINE}.kv_cache_dtype", other_than("auto", "fp8", "fp8_e4m3"), "fp8 or auto", "remove it", "all", ConflictError),
)

HEAD_RULES: tuple[Rule, ...] = (
    Rule(f"{ACTOR}.strategy", other_than("fsdp", "fsdp2"), _FSDP, "set it to fsdp2, or leave head_dtype at 'auto'", "all"),
)

#: with ``head_dtype="float32"``; in exact mode the plugin's fused forward computes with the same head (``logprob.py``)
FUSED_RULES: tuple[Rule, ...] = (
    Rule(
        f"{MODEL}.use_fused_kernels", is_set, "logits from lm_head's forward, which fused kernels bypass",
        "set it to false, or leave head_dtype at 'auto'", "all",
    ),
)  # fmt: skip

#: with a quantized rollout outside exact mode, which computes rotary angles without the model's buffers. verl casts a model to
#: ``model_dtype`` with its buffers, and FSDP1 casts them to ``buffer_dtype``
BUFFER_RULES: tuple[Rule, ...] = tuple(
    Rule(
        f"{ACTOR}.fsdp_config.{name}", other_than("fp32", "float32"),
        "fp32 (16 bits would also round the trainer's rotary frequencies, which vLLM keeps in FP32)",
        "set it to fp32, or use align='exact', which reads no such buffers", "all",
    )
    for name in ("model_dtype", "mixed_precision.buffer_dtype")
)  # fmt: skip

#: the settings that may name a 16-bit dtype
DTYPES = (
    f"{ACTOR}.fsdp_config.mixed_precision.param_dtype", f"{REF}.fsdp_config.mixed_precision.param_dtype", f"{ROLLOUT}.dtype",
    f"{ENGINE}.dtype", f"{ACTOR}.megatron.dtype",
)  # fmt: skip


def _is_half(value: Any) -> bool:
    return str(value).removeprefix("torch.") in FP16


def problems(select: Select, config: Config) -> Iterator[JetrlError]:
    """Yield an error for each setting of verl that contradicts ``precision``, ``head_dtype`` or ``kv_cache``."""
    if config.mode.scales_loss:
        yield from broken(RULES, select, config, named)
    elif config.mode.only_measures:
        found = [f"{path}={select(path)}" for path in DTYPES if _is_half(select(path))]
        if found:
            what, fix = "verl settings with precision='bf16'", "set precision='fp16' (JETRL_PRECISION=fp16), FP16 on both sides"
            yield ConfigError(explain(what, required="BF16 on both sides", found=", ".join(found), fix=fix))
    if config.quantized_rollout and not config.exact:
        yield from broken(BUFFER_RULES, select, config, named)
    if config.fp32_head:
        yield from broken(HEAD_RULES + (() if config.exact else FUSED_RULES), select, config, named)
    if config.kv_cache == "fp8":
        yield from broken(KV_RULES, select, config, named, "kv_cache='fp8'")
    yield from kv_cache_problems(config)


def wanted(config: Config) -> dict[str, Any]:
    """Return the verl settings that FP16 needs: path -> value. The critic's stay unchanged."""
    if not config.mode.scales_loss:
        return {}
    values: dict[str, Any] = {f"{ROLLOUT}.dtype": "float16"}
    for path in (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config"):
        values |= {
            f"{path}.dtype": "float16",
            f"{path}.mixed_precision": {"param_dtype": "fp16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        }
    return values


@replacement
def build_fsdp_module(original: Any, self: Any, module: Any) -> Any:
    """Wrap ``FSDPEngine._build_fsdp_module``, which creates the loss scaler: replace one that torch disables without CUDA.

    Raises ConflictError if a language model was built for another dtype.
    """
    wrapped = original(self, module)
    if scales_loss() and self.model_config.model_type == "language_model":
        if str(self._autocast_dtype) != "torch.float16":
            what, found = "verl's FSDP engine with precision='fp16'", str(self._autocast_dtype)
            fix = "remove fsdp_config.mixed_precision"
            raise ConflictError(explain(what, required="torch.float16", found=found, fix=fix))
        self.scaler = None if self.engine_config.forward_only else scaling(self.scaler)
    return wrapped


def scaling(scaler: Any) -> Any:
    """Return verl's loss scaler if it is enabled, else a new one for this device."""
    if scaler is not None and scaler.is_enabled():
        return scaler
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
    from verl.utils.device import get_device_name

    scaler = ShardedGradScaler(get_device_name(), growth_interval=GROWTH_INTERVAL)
    if not scaler.is_enabled():
        found = f"none on {get_device_name()!r}"
        raise ConfigError(explain("precision='fp16'", required="a loss scale", found=found, fix="use precision='bf16'"))
    return scaler


@replacement
def optimizer_step(original: Any, self: Any) -> Any:
    """Wrap ``FSDPEngine.optimizer_step``: count skipped steps. ``LossScale.note`` raises PrecisionError if all are skipped."""
    if not scales_loss() or self.model_config.model_type != "language_model":
        return original(self)
    if getattr(self, "scaler", None) is None:
        raise NotPatchedError(
            "the trainer's model was built before this process was patched, so it has no loss scale. "
            "Call jetrl_patch.enable() before the model is built."
        )
    from jetrl_patch.adapters.verl.state import WORKER

    before = self.scaler.get_scale()
    norm = original(self)
    after = self.scaler.get_scale()
    WORKER.loss_scale.note(skipped=after < before, scale=after)
    return norm


# ---- Optimizer states: verl's setting for the optimizer class names the plugin's class. FSDP only ----

_CRITIC = "critic"
_STRATEGIES = ("fsdp", "fsdp2")


def optimizer_problems(select: Select, config: Config) -> Iterator[JetrlError]:
    """Yield an error for each setting of verl that contradicts ``optimizer_states``."""
    states = config.optimizer_states
    if states == "fp32":
        return
    yield from raised(lambda: check_torchao(states))
    for section in _sections(select):
        strategy = select(f"{section}.strategy")
        if strategy not in _STRATEGIES:
            what, required = f"{named(section)}.strategy with optimizer_states={states!r}", " or ".join(_STRATEGIES)
            fix = "set it to fsdp2, or leave optimizer_states at 'fp32' (Megatron has its own exp_avg_dtype)"
            yield ConfigError(explain(what, required=required, found=repr(strategy), fix=fix))
            continue
        chosen = (select(f"{section}.optim.optimizer_impl"), select(f"{section}.optim.optimizer"))
        if chosen not in ((None, None), ("torch.optim", "AdamW"), (OPTIMIZER_MODULE, OPTIMIZERS[states])):
            what, required = f"{named(section)}.optim with optimizer_states={states!r}", "verl's default, torch.optim.AdamW"
            fix = "remove optimizer and optimizer_impl, or leave optimizer_states at 'fp32'"
            yield ConflictError(explain(what, required=required, found=".".join(map(str, chosen)), fix=fix))
        path = f"{section}.optim.override_optimizer_config"
        strange = sorted(set(select(path) or {}) - set(OPTIMIZER_OPTIONS))
        if strange:
            required = f"options of torchao's AdamW ({', '.join(OPTIMIZER_OPTIONS)})"
            what = f"{named(path)} with optimizer_states={states!r}"
            yield ConfigError(explain(what, required=required, found=", ".join(strange), fix="remove them"))


def optimizer_wanted(select: Select, config: Config) -> Mapping[str, Any]:
    """Return the verl settings that the states need: path -> value; empty for FP32 states."""
    if config.optimizer_states == "fp32":
        return {}
    names = {"optimizer_impl": OPTIMIZER_MODULE, "optimizer": OPTIMIZERS[config.optimizer_states]}
    return {f"{section}.optim.{name}": value for section in _sections(select) for name, value in names.items()}


def _sections(select: Select) -> list[str]:
    """Return the actor's section, and the critic's unless it is disabled."""
    critic = select(f"{_CRITIC}.optim") is not None and select(f"{_CRITIC}.enable") is not False
    return [ACTOR, _CRITIC] if critic else [ACTOR]
