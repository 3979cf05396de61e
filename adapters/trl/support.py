"""Log-probs under top-k, top-p and min-p: bring what the rollout drew from to the batch, and from there to TRL's head.

The engine's outputs have it, TRL's trainers drop it, and a model's forward takes nothing but token ids.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from jetrl_patch.adapters.trl import compat
from jetrl_patch.errors import ConfigError, explain
from jetrl_patch.patching.patch import replacement
from jetrl_patch.trainer.support import Select, Turn, limits
from jetrl_patch.trainer.support import of_turns as of_response

if TYPE_CHECKING:
    from torch import Tensor

    from jetrl_patch.adapters.trl.state import Call, Run
    from jetrl_patch.exact.support import Support

#: keys of a batch: the sizes of its completions' supports [B, C], and the token ids in them [B, most]
SIZES, IDS = "jetrl_support_sizes", "jetrl_support_ids"


#: vLLM's name -> TRL's
_OWN = {"structured_outputs": "vllm_structured_outputs_regex"}


def select_of(args: Any) -> Select:
    """The settings of a configuration for its rollout, by vLLM's name; None for those of a rollout without vLLM."""

    def select(name: str) -> Any:
        return (getattr(args, "generation_kwargs", None) or {}).get(name, getattr(args, _OWN.get(name, name), None))

    return select if getattr(args, "use_vllm", False) else lambda name: None


def names_of(args: Any, configuration: str) -> Callable[[str], str]:
    """The user's name of a setting, by vLLM's."""

    def name(key: str) -> str:
        given = key in (args.generation_kwargs or {})
        return f"{configuration}'s " + (f"generation_kwargs[{key!r}]" if given else _OWN.get(key, key))

    return name


def lacking(args: Any) -> dict[str, bool]:
    """What exact mode needs for them -> whether it is missing."""
    return {
        "vllm_mode='colocate'": args.vllm_mode != "colocate",
        "trl>=1.15": not compat.has_fused_head(),
    }


# ---- From the engine to the batch ----------------------------------------------------------------

@replacement
def extract_logprobs(original: Any, all_outputs: Sequence[Any]) -> Any:
    """Wrap ``extract_logprobs``: in place of each completion's token ids, which GRPO and RLOO drop, return its ``Support``."""
    from jetrl_patch.exact.support import Support

    log_probs, ids = original(all_outputs)
    masks: list[Any] = [getattr(completion, "sampling_mask", None) for output in all_outputs for completion in output.outputs]
    return log_probs, ids if None in masks else [Support.of(mask.token_ids) for mask in masks]


def of_completions(run: Run, completion_ids: Sequence[Sequence[int]], returned: Sequence[Any]) -> list[Support] | None:
    """The supports that the engine returned in place of token ids; None if its requests may draw every token.

    Raises ConfigError if they may not and it returned none, AuditError if they are those of other tokens.
    """
    import torch

    from jetrl_patch.exact.support import Support

    if not (found := limits(select_of(run.args))):
        return None
    if not all(isinstance(one, Support) for one in returned):
        what, required = f"{' and '.join(found)} in exact mode", "an engine that returns the tokens that it draws from"
        fix = "build the engine after enable(), or drop these settings"
        raise ConfigError(explain(what, required=required, found="none in its outputs", fix=fix))
    return [one.require(torch.tensor(ids), "TRL's completions") for one, ids in zip(returned, completion_ids, strict=True)]


def of_turns(
    calls: Sequence[Call], prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], mask: Sequence[Sequence[int]]
) -> list[Support]:
    """The supports of completions between whose turns are tokens of tools, for which ``mask`` is 0.

    The turns of a completion are found by their tokens and those before them: equal ones were drawn from the same tokens.
    """

    def turns(whole: list[int]) -> Iterator[Turn]:
        for call in calls:
            for asked, tokens, drawn in zip(*call, strict=True):
                if not tokens or whole[: len(asked)] != asked:
                    continue
                rest = whole[len(asked) :]
                if rest[: len(tokens)] == tokens[: len(rest)]:
                    yield tokens, drawn
                    break

    return [
        of_response(completion, own, turns([*prompt, *completion]))
        for prompt, completion, own in zip(prompts, completions, mask, strict=True)
    ]


def add_to(batch: dict[str, Any], drawn: Sequence[Support] | None) -> None:
    """Add the supports of a batch's completions, as tensors that TRL shuffles and splits with the others."""
    if drawn is not None:
        from jetrl_patch.exact.support import to_batch

        ids = batch["completion_ids"]
        batch[SIZES], batch[IDS] = (tensor.to(ids.device) for tensor in to_batch(drawn, ids.shape[1]))


# ---- From the batch to the head ------------------------------------------------------------------

class Drawn:
    """The supports of a batch, for the head, which gets the positions of a few samples at a time.

    Args:
        sizes, ids: as ``exact.support.to_batch`` makes them, for completions [B, C].
        mask: which of their tokens count [B, C].
        positions: of a sample, all but its last one.
    """

    def __init__(self, sizes: Tensor, ids: Tensor, mask: Tensor, positions: int) -> None:
        self._sizes, self._ids, self._mask, self._positions = sizes, ids, mask.bool(), positions
        self._tokens = mask.sum(1).tolist()
        self._at = 0

    def take(self, rows: int, compact: bool) -> Support:
        """Those of the head's next ``rows`` rows: every position of some samples or, if ``compact``, the tokens that count."""
        from jetrl_patch.exact.support import Support, of_batch

        start, left = self._at, rows
        while left > 0:
            left -= self._tokens[self._at] if compact else self._positions
            self._at += 1
        part = slice(start, self._at)
        if not compact:
            return of_batch(self._sizes[part], self._ids[part], self._positions - self._sizes.shape[1])
        found = of_batch(self._sizes[part], self._ids[part])
        return Support(found.counts[self._mask[part].reshape(-1)], found.ids)


_drawn: ContextVar[Drawn | None] = ContextVar("jetrl_trl_drawn", default=None)


@contextlib.contextmanager
def drawn_from(run: Run, input_ids: Tensor, mask: Tensor, completion: int, rows: Any = slice(None)) -> Iterator[None]:
    """While it lasts, a model's head leaves out the tokens that the rollout left out.

    Args:
        input_ids: of the samples ``rows`` [B, T], which end with ``completion`` tokens. ``mask`` [B, T] says which count.
        rows: which samples of the batch of an update, or of the one that is being made.
    """
    from jetrl_patch.exact.support import to_batch

    if run.batch is not None and SIZES in run.batch:
        packed = run.batch[SIZES], run.batch[IDS]
    elif run.drawn is not None:
        packed = to_batch(run.drawn, completion)
    else:
        yield
        return
    sizes, ids = (tensor.to(input_ids.device)[rows] for tensor in packed)
    token = _drawn.set(Drawn(sizes, ids, mask[:, -completion:], input_ids.shape[1] - 1))
    try:
        yield
    finally:
        _drawn.reset(token)


def edit_of(hidden: Tensor) -> Any:
    """The edit of the logits of hidden states [N, H] for ``chunked_log_probs``; None outside ``drawn_from``."""
    drawn = _drawn.get()
    return None if drawn is None else drawn.take(len(hidden), compat.is_compact(hidden.device)).edit
