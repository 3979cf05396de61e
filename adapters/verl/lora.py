"""LoRA in verl's FSDP engines, and the FP8 all-gather of FSDP2. Imports no torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from jetrl_patch import session
from jetrl_patch.adapters.verl import megatron
from jetrl_patch.adapters.verl.yaml_settings import ACTOR, MODEL, REF, Select, named, runs
from jetrl_patch.config import Config
from jetrl_patch.errors import UNQUANTIZED, ConflictError, JetrlError, explain
from jetrl_patch.models.structure import require_attention
from jetrl_patch.patching.patch import replacement
from jetrl_patch.trainer import record
from jetrl_patch.trainer.rules import Rule, adapter_problems, broken, is_set, other_than, positive

# ---- LoRA: the trainer computes with merged weights, and the sync sends them as full weights ----
# By default verl serves the adapters in vLLM. With ``model.lora.merge``, which the driver sets, its sync sends merged weights
# under plain names. verl merges the FP32 parameters in place and restores them from a copy, and the merged values differ from
# those that the trainer's layers compute with. The plugin only reads the state dict, and merges each weight with
# ``fp8.lora.merged_weight`` as it is sent. The reference model of such a run is the actor with its adapters disabled.

_RANK, _PATH, _MERGE = f"{MODEL}.lora_rank", f"{MODEL}.lora_adapter_path", f"{MODEL}.lora.merge"

RULES: tuple[Rule, ...] = (
    Rule(
        f"{MODEL}.lora.rank", positive, "0 (Megatron reads it, and the plugin does not merge Megatron's layers)",
        "set it to 0, and with FSDP set lora_rank", "quantized", ConflictError,
    ),
)  # fmt: skip

#: checked only with adapters
WITH_ADAPTERS: tuple[Rule, ...] = (
    Rule(
        f"{MODEL}.target_parameters", is_set, "adapters of linear layers", "set it to null, and use target_modules", "quantized",
    ),
    Rule(
        f"{ACTOR}.fsdp_config.wrap_policy.min_num_params", positive, "0 (FSDP1 must gather a block's weights together)",
        "set it to 0, and let verl wrap whole blocks", "quantized",
    ),
)  # fmt: skip

#: of the error about a model
_WORDS = ("LoRA with a quantized rollout", f"remove {_RANK} and {_PATH}, or use {UNQUANTIZED}")


def _is_used(select: Select) -> bool:
    return positive(select(_RANK)) or is_set(select(_PATH))


def problems(select: Select, config: Config) -> Iterator[JetrlError]:
    """Yield an error for each setting that is unsupported with adapters."""
    yield from broken(RULES, select, config, named)
    if not config.quantized_rollout or not _is_used(select):
        return
    yield from broken(WITH_ADAPTERS, select, config, named)
    used = named(_RANK if positive(select(_RANK)) else _PATH)
    if runs(megatron.STRATEGY, select, config):
        found = "an adapter with Megatron"
        yield ConflictError(explain(used, required="full weights", found=found, fix="remove it, or set strategy=fsdp2"))
    yield from adapter_problems(config, used)


def check_model(hf_config: Any, select: Select, config: Config) -> None:
    """Raise ModelError for adapters of a model with delta nets, which were never compared with the rollout."""
    if config.quantized_rollout and _is_used(select):
        require_attention(hf_config, *_WORDS)


def wanted(select: Select, config: Config) -> Mapping[str, Any]:
    """Return the verl settings that adapters need: path -> value; empty without adapters.

    verl 0.9 loads ``lora_adapter_path`` only if ``lora_rank`` is positive, but then uses the adapter's own rank.
    """
    if not config.quantized_rollout or not _is_used(select):
        return {}
    if positive(select(_RANK)):
        return {_MERGE: True}
    file = os.path.join(os.path.expanduser(str(select(_PATH))), "adapter_config.json")
    saved = record.read_adapters(file) or {}  # the workers will download an adapter that is not here
    return {_MERGE: True, _RANK: int(saved.get("lora_rank") or 1)}


@replacement
def build_lora_module(original: Any, self: Any, module: Any) -> Any:
    """Wrap ``FSDPEngine._build_lora_module``: check the adapters, and make FP8 layers compute with merged weights.

    Raises ConfigError for adapters other than plain LoRA, ModelError as ``check_model``.
    """
    from jetrl_patch.adapters.verl.state import RECORD

    config, prepared = session.active_config(), RECORD.get(self)
    if prepared is None or not config.quantized_rollout:
        return original(self, module)
    from jetrl_patch.fp8.lora import adopt

    require_attention(module.config, *_WORDS)
    built = original(self, module)
    prepared.adapters = adopt(built, merge=config.fp8_train)
    return built


@replacement
def merged_lora_per_tensor_param(original: Any, self: Any) -> Any:
    """Replace ``FSDPEngine._merged_lora_per_tensor_param``: the same names, with the weights that the layers compute with."""
    from jetrl_patch.adapters.verl.state import RECORD

    adapters = getattr(RECORD.get(self), "adapters", None)
    return original(self) if adapters is None else _merged(self, adapters)


def _merged(engine: Any, adapters: Mapping[str, float]) -> Iterator[tuple[str, Any]]:
    from torch.distributed.tensor import DTensor
    from verl.utils.device import get_device_id
    from verl.utils.fsdp_utils import normalize_peft_param_name, offload_fsdp_model_to_cpu
    from verl.utils.model import convert_weight_keys

    from jetrl_patch.fp8.lora import merged_tensors

    def full(tensor: Any) -> Any:
        return tensor.to(get_device_id()).full_tensor() if isinstance(tensor, DTensor) else tensor.detach()

    def gathered(parts: list[Any]) -> Any:
        return contextlib.nullcontext([full(part) for part in parts])

    try:
        tensors = engine.module.state_dict()
        names = normalize_peft_param_name({name: name for name in tensors})
        names = convert_weight_keys(names, getattr(engine.module, "_fsdp_wrapped_module", engine.module))
        yield from merged_tensors(tensors, names, adapters, gathered)
    finally:
        if engine._is_offload_param:  # verl has loaded the model to the device for this
            offload_fsdp_model_to_cpu(engine.module)


def check_resumed(folder: Any, model: Any, config: Config) -> None:
    """Raise ConfigError as ``record.check_adapters``."""
    saved = record.read_adapters(os.path.join(str(folder), record.ADAPTERS))
    record.check_adapters(str(folder), getattr(model, "_fsdp_wrapped_module", model), saved, config)


# ---- The FP8 all-gather of verl's FSDP2 engine: mark the weights, and refuse what cannot gather them ----

_RULES = (
    Rule(f"{ACTOR}.strategy", other_than("fsdp2"), "fsdp2 for fp8_all_gather", "set it to fsdp2", "all"),
    Rule(f"{REF}.strategy", other_than("fsdp2"), "fsdp2 for fp8_all_gather", "set it to fsdp2", "all"),
    # verl's offload tells weights from activations by their address, which bytes and scales do not have
    Rule(f"{MODEL}.enable_activation_offload", is_set, "activations on the device for fp8_all_gather", "set it to false", "all"),
)


def gather_problems(select: Select, config: Config) -> Iterator[JetrlError]:
    """Yield an error for each strategy other than FSDP2, and for offloaded activations."""
    if config.fp8_all_gather:
        yield from broken(_RULES, select, config, named)


def mark_layers(engine: Any, module: Any, layers: list[str], config: Config) -> None:
    """Mark the weights that ``engine``, always FSDP2, gathers in FP8, between conversion and ``fully_shard``."""
    if not config.fp8_all_gather:
        return
    from jetrl_patch.fp8.convert import gather_in_fp8

    gather_in_fp8(module, layers, engine.device_mesh.size(-1))
