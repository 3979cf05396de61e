"""For a training loop of your own: the steps that the adapters of verl and OpenRLHF are built from, as functions.

    jetrl_patch.enable()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    source = loop.convert(model)
    engine = vllm.LLM(path, logprobs_mode="processed_logprobs", ...)
    loop.send(source, model.state_dict(), engine)
    found = loop.log_probs(model, input_ids, attention_mask, temperature)
    loop.compare(found, sampled, mask)
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jetrl_patch import registry, session
from jetrl_patch.exact.logprob import token_log_probs
from jetrl_patch.exact.support import Support, placed
from jetrl_patch.measure.mismatch import mismatch
from jetrl_patch.sync.send import NamedTensor, SyncStats
from jetrl_patch.trainer import audit, source
from jetrl_patch.trainer.server import Server
from jetrl_patch.trainer.source import Source

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Server", "Source", "Support", "compare", "convert", "log_probs", "messages", "receive", "send"]


def convert(model: Any, *, rollout_tp: int = 1, rollout_ep: int = 1, reference: bool = False) -> Source:
    """Convert a loaded Hugging Face model in place, so that it computes as the rollout does. Wrap or shard it afterwards.

    Args:
        model: a causal language model in BF16, or in FP32 as master weights.
        rollout_tp: the engine's tensor-parallel size. The model adds the same partial sums in the same order.
        rollout_ep: its expert-parallel size.
        reference: whether the model is never trained.

    Returns what ``send`` and ``messages`` need. The model stays a Hugging Face model, with its parameters and their names.

    Raises:
        NotPatchedError: ``enable()`` has not been called.
        ModelError: the model cannot run in the chosen mode; nothing is changed then.
    """
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    device = next(model.parameters()).device.type
    return source.convert(
        model,
        session.active_config(),
        shapes,
        rollout_tp=rollout_tp,
        rollout_ep=rollout_ep,
        device_type=device,
        reference=reference,
    )


def messages(policy: Source, weights: Mapping[str, Tensor], stats: SyncStats | None = None) -> Iterator[NamedTensor]:
    """Begin a weight sync and yield it: bytes and scales of quantized layers, BF16 for the rest, a manifest first, digests last.

    For engines in other processes: move each pair as it is, and pass all of them to ``receive`` in every worker of the engine.
    Then ``policy.end_sync()`` returns the figures of the step, and raises PrecisionError if the monitor's thresholds say stop.

    Args:
        policy: what ``convert`` returned.
        weights: Hugging Face name -> full weight, of every parameter.
        stats: counts the bytes.

    Raises SyncError if a weight holds NaN or Inf, or has another shape than at ``convert``.
    """
    policy.begin_sync(weights.items)  # smoothing and the precision guard act here
    return policy.stream(((name, weight.detach()) for name, weight in weights.items()), stats or SyncStats())


def receive(worker: Any, pairs: Iterable[NamedTensor]) -> None:
    """Install what ``messages`` yields. Runs in a worker of vLLM, through ``collective_rpc``.

    Raises:
        SyncError: something is missing or damaged. The engine does not generate before a complete sync.
        AuditError: trainer and rollout do not compute alike.
    """
    for pair in pairs:
        worker.jetrl_receiver.on_bucket([pair])
    worker.jetrl_receiver.finish()


def send(policy: Source, weights: Mapping[str, Tensor], engine: Any) -> dict[str, float]:
    """Send the weights to an engine, and drop its cached prefixes.

    Args:
        weights: Hugging Face name -> full weight, such as ``model.state_dict()``.
        engine: a ``vllm.LLM`` with one rank, built under ``VLLM_ENABLE_V1_MULTIPROCESSING=0``, or a ``Server``.

    Returns the figures of the sync and of the step that it ends: ``jetrl/sync_bytes``, ``jetrl/scale/...``.

    Raises:
        ConfigError: the engine runs in other processes. ``messages`` and ``receive`` are for those.
        SyncError, AuditError: as ``messages`` and ``receive``.
        PrecisionError: the monitor's thresholds say that the run must stop.
    """
    start, stats = time.perf_counter(), SyncStats()
    found = messages(policy, weights, stats)
    if isinstance(engine, Server):
        engine.install(found)
    else:
        registry.rollout().install(engine, found)
    report = audit.sync_report(stats, start) | {"monitor": policy.end_sync()}
    return audit.sync_metrics([report])


def log_probs(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    last: int | None = None,
    supports: Sequence[Support] | None = None,
) -> Tensor:
    """FP32 log-probs [B, T - 1] of the tokens after the first, as the engine computes them. Differentiable.

    Args:
        model: a converted model, or what wraps it.
        input_ids: [B, T], padded on either side.
        attention_mask: [B, T], 1 for tokens and 0 for padding.
        temperature: as the engine sampled: a number, or a tensor that broadcasts against [B, T - 1, 1].
        last: compute only the last so many columns [B, last], such as the responses behind left-padded prompts.
        supports: if the engine samples with top-k, top-p or min-p, what it drew each sample's tokens from, beginning with the
            first of these columns: ``Support.of(output.sampling_mask.token_ids)`` of each of vLLM's ``CompletionOutput``.
    """
    count = input_ids.shape[1] - 1 if last is None else last
    logits = model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=positions(attention_mask),
        use_cache=False,
        logits_to_keep=count + 1,
    ).logits
    edit = None
    if supports is not None:
        pieces = ((row * count, support) for row, support in enumerate(supports))
        edit = placed(pieces, len(input_ids) * count).to(logits.device).edit
    return token_log_probs(logits[:, :-1], input_ids[:, -count:], temperature, edit=edit)


def positions(attention_mask: Tensor) -> Tensor:
    """The positions [B, T] that the engine gives the tokens of a mask [B, T], padded on either side."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def compare(trainer: Tensor, rollout: Tensor, mask: Tensor) -> dict[str, float]:
    """The figures of the mismatch, ``jetrl/logp_abs_diff_mean`` and others, for the log of a step.

    Args:
        trainer: ``log_probs`` with the weights that the engine had, [B, T].
        rollout: the engine's log-probs of the same tokens, FP32 [B, T].
        mask: [B, T], true where a sampled token counts.

    Raises AuditError if a token differs in exact mode and ``on_mismatch="stop"``.
    """
    config = session.active_config()
    if config.exact:
        audit.Audit().compare(trainer, rollout, mask, config)
    return mismatch(trainer.detach(), rollout, mask).as_metrics()
