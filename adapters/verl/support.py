"""Log-probs under top-k, top-p and min-p: bring what the rollout drew from to the engines' micro-batches, and leave out the rest.

The server puts it into a sample's ``extra_fields``. verl's V0 trainer makes columns of these, V1 keeps them as one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jetrl_patch.adapters.verl.correction import CORRECTION
from jetrl_patch.adapters.verl.yaml_settings import ACTOR, ENGINE, MODEL, ROLLOUT, Select, named
from jetrl_patch.errors import AuditError, explain
from jetrl_patch.patching.patch import replacement
from jetrl_patch.trainer import support

if TYPE_CHECKING:
    from jetrl_patch.config import Config
    from jetrl_patch.errors import JetrlError
    from jetrl_patch.exact.support import Support


#: the key of a sample that brings its temperature
TEMPERATURE = "jetrl_temperature"


def select_of(select: Select) -> support.Select:
    """The rollout's settings, by vLLM's names."""
    return lambda name: select(f"{ROLLOUT}.{name}")


def unfollowed(select: Select) -> dict[str, bool]:
    """What the trainer needs to follow how each sample was drawn -> whether it is missing."""
    return {
        f"{ACTOR}.strategy=fsdp, fsdp2 or megatron": select(f"{ACTOR}.strategy") not in ("fsdp", "fsdp2", "megatron"),
        f"{MODEL}.use_fused_kernels=False": bool(select(f"{MODEL}.use_fused_kernels")),
    }


def problems(select: Select, config: Config) -> Iterator[JetrlError]:
    """Yield an error for such settings where the trainer does not compute the same distribution, and where a ratio needs it."""
    section = select(CORRECTION) or {}
    corrects = config.correction != "none" or any(section.get(name) for name in ("rollout_is", "rollout_rs", "bypass_mode"))
    lacking = {
        **unfollowed(select),
        f"no {ENGINE}.speculative_config": select(f"{ENGINE}.speculative_config") is not None,
        "a trainer without async_training": select("async_training") is not None,
    }
    corrected = CORRECTION if corrects else ""
    yield from support.problems(select_of(select), config, lambda name: named(f"{ROLLOUT}.{name}"), lacking, corrected)


@replacement
def extract_prompt_logprobs(original: Any, output: Any, num_prompt_logprobs: Any, result_dict: dict[str, Any]) -> None:
    """Wrap ``extract_prompt_logprobs``, which gets a request's output and its extra fields: add the supports of its tokens."""
    original(output=output, num_prompt_logprobs=num_prompt_logprobs, result_dict=result_dict)
    (completion,) = output.outputs
    if (masks := getattr(completion, "sampling_mask", None)) is not None and any(masks.token_ids):
        import torch

        from jetrl_patch.exact.support import Support

        found = Support.of(masks.token_ids).require(torch.tensor(completion.token_ids), "vLLM's responses")
        result_dict[support.KEY] = found.pack()


def of_rows(micro_batch: Any, shape: Sequence[int]) -> Support | None:
    """What the tokens that the rows of logits predict were drawn from; None if every one was drawn from all tokens.

    Args:
        shape: of the logits: [B, T, V] if samples are padded, else [1, T, V] or [T, V] with padding behind the last sample. Of
            ranks that share sequences each has T of all rows.

    Raises AuditError if a sample has fewer supports than tokens of its response, or brings an error of its agent loop.
    """
    from verl.utils.ulysses import get_ulysses_sequence_parallel_rank, get_ulysses_sequence_parallel_world_size

    from jetrl_patch.exact.support import placed

    given = _given(micro_batch, support.KEY)
    if not any(one is not None for one in given):
        return None
    *batch, width, _ = shape
    padded = batch and batch[0] > 1
    pieces = _pieces(given, _lengths(micro_batch), width if padded else None)
    rows, ranks = math.prod(shape[:-1]), get_ulysses_sequence_parallel_world_size()
    found = placed(pieces, rows * ranks)
    if ranks > 1:
        first = rows * get_ulysses_sequence_parallel_rank()
        found = found.part(first, first + rows)
    return found.to(micro_batch["input_ids"].device)


def _pieces(given: Sequence[Any], lengths: Iterable[tuple[int, int]], rows: int | None) -> Iterator[tuple[int, Support]]:
    """The supports of each response, and the row of logits that predicts its first token.

    ``rows``: of each sample, where samples are padded.
    """
    from jetrl_patch.exact.support import Support

    start = 0
    for one, (tokens, response) in zip(given, lengths, strict=True):
        if isinstance(one, str):
            raise AuditError(one)
        if one is not None:
            found = Support.unpack(one)
            if len(found.counts) < response:
                what, fix = "the sampling supports of a response", f"return all of it in response_ids, or {support.ALL}"
                required = f"one for each of {response} tokens"
                raise AuditError(explain(what, required=required, found=str(len(found.counts)), fix=fix))
            yield start + tokens - response - 1, found.part(0, response)
        start += rows or tokens


def with_temperatures(micro_batch: Any) -> Any:
    """The micro-batch with each sample's temperature, which verl supports, in place of one for all, if the samples bring others.

    Rows of the data that ask for greedy decoding have log-probs at temperature 1, and an agent loop may choose its own.
    """
    import torch

    own = _given(micro_batch, TEMPERATURE)
    if not own or None in own:
        return micro_batch
    shared = micro_batch["temperature"]
    if isinstance(shared, torch.Tensor) or set(own) == {shared}:
        return micro_batch
    return micro_batch.copy().set("temperature", torch.tensor(own, device=micro_batch["input_ids"].device))


def _given(micro_batch: Any, key: str) -> Sequence[Any]:
    """What each sample brings under a key; empty if nobody does."""
    if key in micro_batch.keys():  # noqa: SIM118  # a TensorDict's own test
        return [getattr(one, "data", one) for one in micro_batch[key]]
    if "extra_fields" in micro_batch.keys():  # noqa: SIM118
        return [getattr(one, "data", one).get(key) for one in micro_batch["extra_fields"]]
    return ()


def _lengths(micro_batch: Any) -> Iterator[tuple[int, int]]:
    """The numbers of tokens of each sample, and of its response."""
    tokens, responses = micro_batch["input_ids"].offsets().diff(), micro_batch["responses"]
    if responses.is_nested:
        response = responses.offsets().diff()
    else:
        response = micro_batch["attention_mask"][:, -responses.shape[1] :].sum(1)
    return zip(tokens.tolist(), response.tolist(), strict=True)
