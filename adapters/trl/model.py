"""Convert TRL's models before it wraps them, and compute their log-probs as the rollout does."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

from jetrl_patch import loop, session
from jetrl_patch.adapters.trl import compat, correction, settings, support
from jetrl_patch.adapters.trl.state import BUILDING, ENGINES, RUNS, Run
from jetrl_patch.config import environment
from jetrl_patch.config.following import end_with
from jetrl_patch.errors import ModelError, explain
from jetrl_patch.patching.patch import replacement
from jetrl_patch.trainer import source
from jetrl_patch.trainer.ranks import require_same_ranks

if TYPE_CHECKING:
    from torch import Tensor

    from jetrl_patch.config import Config


@replacement
def trainer_init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap a trainer's ``__init__``: check the settings before anything is built, and say which trainer is being built."""
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    config = session.active_config()
    if folder := environment.read_variable(environment.FOLLOW):
        end_with(folder, f"{type(self).__name__} with precision={config.precision!r}", settings.problems(bound.arguments, config))
    settings.check(bound.arguments, config)
    correction.apply(bound.arguments.get("args"), config)
    require_same_ranks(config, config.sync_timeout)
    loaded = bound.arguments.get("model")
    run = RUNS[self] = Run(args=bound.arguments.get("args"), tools=settings.tools_of(bound.arguments))
    before, BUILDING.trainer = BUILDING.trainer, self
    try:
        if config.quantized_rollout and not isinstance(loaded, str):
            run.source = convert(loaded, run, config)
        original(self, *args, **kwargs)
    except BaseException:
        del RUNS[self]
        raise
    finally:
        BUILDING.trainer = before


@replacement
def create_model(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``create_model_from_path``, by which a trainer's ``__init__`` loads its policy and then its reference model."""
    created, trainer = original(*args, **kwargs), BUILDING.trainer
    if trainer is not None:
        run, config = RUNS[trainer], session.active_config()
        if run.source is None:
            run.source = convert(created, run, config)
        else:
            run.followers.append(convert(created, run, config, reference=True))
    return created


@replacement
def get_peft_model(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap peft's ``get_peft_model`` in a trainer's ``__init__``: the converted model's adapters merge.

    Raises ConfigError for adapters other than plain LoRA.
    """
    if BUILDING.trainer is None:
        return original(model, *args, **kwargs)
    from jetrl_patch.fp8.lora import adopt

    converted = RUNS[BUILDING.trainer].source
    assert converted is not None, "the policy was converted as loaded"
    built = original(model, *args, **kwargs)
    converted.adapters = adopt(built, merge=session.active_config().fp8_train)
    return built


def return_log_probs_unrounded(accelerator: Any) -> None:
    """Let FSDP2 return FP32 log-probs as they are. accelerate's policy rounds everything that a model returns to BF16."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = dataclasses.replace(plugin.mixed_precision_policy, output_dtype=None)


def convert(model: Any, run: Run, config: Config, reference: bool = False) -> source.Source:
    """Convert a model as loaded, also if ZeRO-3 has partitioned it. Return what weight syncs send. Raises as ``check_loaded``."""
    settings.check_loaded(model, run.args, run.tools, config)
    shapes = {name: tuple(getattr(parameter, "ds_shape", parameter.shape)) for name, parameter in model.named_parameters()}
    found = source.convert(
        model, config, shapes,
        rollout_tp=run.args.vllm_tensor_parallel_size, device_type=run.args.device.type, reference=reference,
    )  # fmt: skip
    if config.exact:
        model.register_forward_pre_hook(add_positions, with_kwargs=True)
        if not compat.has_fused_head():
            model.register_forward_hook(return_fp32_logits)
    return found


@replacement
def generation_init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap ``VLLMGeneration.__init__``, which builds the engine. Raises ConfigError for an unknown trainer of an FP8 rollout."""
    trainer, config = BUILDING.trainer, session.active_config()
    if trainer is not None:
        run = ENGINES[self] = RUNS[trainer]
        settings.check_accelerator(trainer.accelerator, config, run.source is not None and run.source.adapters is not None)
        if config.changes_rollout:
            return_log_probs_unrounded(trainer.accelerator)
        if config.mode.scales_loss:
            from jetrl_patch.adapters.trl.loss_scale import watch

            watch(trainer, run.loss_scale)
        run.keeps_log_probs = kwargs.get("logprobs", 0) is None
        kwargs["logprobs"] = kwargs.get("logprobs") or 0
    elif config.changes_rollout:
        raise settings.unsupported(caller(), config)
    original(self, *args, **kwargs)


def caller() -> str:
    """The class whose constructor builds an engine or talks to a server, for a message."""
    frame = inspect.currentframe()
    while frame is not None:
        own = frame.f_locals.get("self")
        if frame.f_code.co_name == "__init__" and hasattr(own, "train"):
            return f"{type(own).__module__}.{type(own).__qualname__}"
        frame = frame.f_back
    return "trl.generation.VLLMGeneration"


def add_positions(model: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Add the positions that the rollout's tokens have. TRL pads prompts on the left and passes none.

    Beside images a model computes them itself.
    """
    mask, images = kwargs.get("attention_mask"), kwargs.get("image_grid_thw")
    if mask is not None and images is None and kwargs.get("position_ids") is None and kwargs.get("past_key_values") is None:
        kwargs["position_ids"] = loop.positions(mask)
    return args, kwargs


def return_fp32_logits(model: Any, args: Any, outputs: Any) -> Any:
    """Convert a model's logits before TRL divides them by the temperature, as vLLM's sampler does."""
    outputs.logits = outputs.logits.float()
    return outputs


@replacement
def selective_log_softmax(original: Any, logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Any = None) -> Tensor:
    """Replace a trainer's ``selective_log_softmax``: FP32 log-probs [B, C] of ``index`` [B, C] by vLLM's formula."""
    from jetrl_patch.exact.ops import token_log_probs

    found = token_log_probs(logits, index, temperature)
    return found if row_mask is None else found.masked_fill(row_mask == 0, 0.0)


@replacement
def selective_log_softmax_and_entropy(
    original: Any, logits: Tensor, index: Tensor, entropy_requires_grad: bool = True, temperature: float = 1.0,
    row_mask: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Replace a trainer's ``selective_log_softmax_and_entropy``. The entropies are TRL's."""
    found = selective_log_softmax(original)(logits, index, temperature, row_mask)
    return found, original(logits, index, entropy_requires_grad, temperature, row_mask)[1]


class ExactLogProbs:
    """Stands for TRL's ``ChunkedLogProbFunction``, whose tiles round otherwise than the rollout's head and log-softmax."""

    @staticmethod
    def apply(
        hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, chunk_size: int,
        softcapping: float | None = None, scale: float = 1.0, outputs: tuple[str, ...] = (),
    ) -> tuple[Tensor, Tensor | None, None, None, None]:  # fmt: skip
        """FP32 log-probs [N] of ``targets`` [N], and entropies [N] if asked for, from hidden states [N, H] and the head [V, H].

        Raises ModelError for a head that does more than one product, or for other outputs.
        """
        from trl.trainer.utils import maybe_gather_lm_head_ctx

        from jetrl_patch.exact import ops
        from jetrl_patch.exact.logprob import chunked_log_probs

        more = {"a bias": bias is not None, "final_logit_softcapping": softcapping is not None, "a scale of logits": scale != 1.0}
        more |= {name: True for name in outputs if name not in ("log_probs", "entropy")}
        if found := [name for name, is_there in more.items() if is_there]:
            required, fix = "logits that lm_head's weight alone computes", "use align='linear' for this model"
            raise ModelError(explain("align='exact' in TRL", required=required, found=", ".join(found), fix=fix))
        product = ops.head_linear_fp32 if session.active_config().fp32_head else ops.linear
        log_probs, entropy = chunked_log_probs(
            hidden, weight, targets, product, temperature, whole=maybe_gather_lm_head_ctx, edit=support.edit_of(hidden)
        )
        return log_probs, entropy if "entropy" in outputs else None, None, None, None
