"""Convert the trainer's models (policy, reference, EMA) after loading, before DeepSpeed wraps them."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from jetrl_patch import session
from jetrl_patch.adapters.openrlhf import settings
from jetrl_patch.adapters.openrlhf.settings import check_mark, model_problems
from jetrl_patch.adapters.openrlhf.state import WORKER
from jetrl_patch.config import Config
from jetrl_patch.models.structure import placeholders
from jetrl_patch.patching.patch import replacement
from jetrl_patch.trainer.source import Source, convert

# ---- Tell the FP8 layers that their weights do not change between two of DeepSpeed's updates ------

@replacement
def ppo_train(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``ActorPPOTrainer.ppo_train``, which runs all micro-batches and updates on the samples of a step.

    ZeRO-3 is excluded: its ranks free the gathered weights after each layer.
    """
    from jetrl_patch.fp8.unchanged import unchanged_weights

    whole = self.strategy.stage < 3
    with unchanged_weights(self.actor) if whole else contextlib.nullcontext():
        return original(self, *args, **kwargs)


@replacement
def optimizer_step(original: Any, self: Any, _optimizer: Any, model: Any, _scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``DeepspeedStrategy.optimizer_step``, which changes the weights unless it only counts a micro-batch."""
    from jetrl_patch.fp8.unchanged import written_weights

    with contextlib.nullcontext() if _only_counts(model) else written_weights(model):
        return original(self, _optimizer, model, _scheduler, *args, **kwargs)


def _only_counts(model: Any) -> bool:
    """Whether DeepSpeed's ``step`` leaves the weights unchanged, by DeepSpeed's own conditions. False if unknown."""
    engine = model if hasattr(model, "is_gradient_accumulation_boundary") else getattr(model, "model", None)
    boundary = getattr(engine, "is_gradient_accumulation_boundary", None)
    if boundary is None or getattr(engine, "zenflow", False):
        return False
    managed = getattr(engine, "managed_gradient_accumulation", None)
    return (managed is None or managed()) and not boundary()


# ---- Convert the trainer's models (policy, reference, EMA) after loading, before DeepSpeed wraps them

@replacement
def setup_distributed(original: Any, self: Any, strategy: Any) -> Any:
    """Wrap ``BaseModelActor._setup_distributed``, which every actor calls before it builds its model."""
    check_mark(strategy.args, f"{type(self).__name__} (pid {os.getpid()})")
    WORKER.args = strategy.args
    WORKER.reference = any(kind.__name__ == "ReferenceModelActor" for kind in type(self).__mro__)
    return original(self, strategy)


@replacement
def actor_init(
    original: Any, self: Any, pretrain_or_model: Any, attn_implementation: Any = "flash_attention_2", *args: Any, **kwargs: Any
) -> None:
    """Wrap ``Actor.__init__``. Critics and reward models have another class and stay unchanged."""
    if WORKER.args is None:
        original(self, pretrain_or_model, attn_implementation, *args, **kwargs)
        return
    config = session.active_config()
    if config.exact:
        attn_implementation = "sdpa"  # replaced below; flash attention may not be installed
    if config.same_log_probs:
        WORKER.stop_tokens = stop_tokens(str(pretrain_or_model))
    original(self, pretrain_or_model, attn_implementation, *args, **kwargs)
    if config.exact:
        WORKER.placeholders = tuple(placeholders(self.model.config))
    settings.check_model(self.model, str(pretrain_or_model))
    adapted = self.model in WORKER.sources  # by ``get_peft_model``
    source = WORKER.sources[self] = WORKER.sources.pop(self.model) if adapted else prepare(self.model, config, self)
    WORKER.followers.add(source)


@replacement
def get_peft_model(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap peft's ``get_peft_model`` in ``Actor.__init__``: convert the model before it gets adapters, which then merge.

    Raises ConfigError for adapters other than plain LoRA, and as ``prepare``.
    """
    config = session.active_config()
    if WORKER.args is None or not config.quantized_rollout:
        return original(model, *args, **kwargs)
    from jetrl_patch.fp8.lora import adopt

    source = prepare(model, config, None)
    built = original(model, *args, **kwargs)
    source.adapters = adopt(built, merge=config.fp8_train)
    WORKER.sources[built] = source  # until its ``Actor`` is complete
    return built


def prepare(model: Any, config: Config, actor: Any) -> Source:
    """Convert the loaded model of an ``Actor``, also if ZeRO-3 has partitioned it. Return what weight syncs send."""
    import torch

    if config.quantized_rollout:
        for problem in model_problems(WORKER.args, model.config, config):  # the driver has only checked local folders
            raise problem
    return convert(
        model,
        config,
        {name: tuple(getattr(parameter, "ds_shape", parameter.shape)) for name, parameter in model.named_parameters()},
        rollout_tp=int(WORKER.args.vllm.tensor_parallel_size),
        device_type="cuda" if torch.cuda.is_available() else "cpu",
        reference=WORKER.reference,
    )


def stop_tokens(path: str) -> tuple[int, ...]:
    """Return the tokens that end a response in vLLM: the tokenizer's EOS, and those of ``generation_config.json``.

    ``SamplingParams.update_from_generation_config`` collects the same ones (vLLM 0.30).
    """
    from transformers import AutoTokenizer, GenerationConfig

    found: list[Any] = [AutoTokenizer.from_pretrained(path, trust_remote_code=True).eos_token_id]
    try:
        listed = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # without this file, vLLM derives one from config.json
        from transformers import AutoConfig

        listed = getattr(AutoConfig.from_pretrained(path, trust_remote_code=True), "eos_token_id", None)
    found += listed if isinstance(listed, list) else [listed]
    return tuple(dict.fromkeys(int(token) for token in found if token is not None))
