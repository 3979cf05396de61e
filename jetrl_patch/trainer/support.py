"""Rollouts that draw from another distribution than a temperature alone makes: which do, and what else then has to be so.

top-k, top-p, min-p and bans leave out tokens, and penalties change logits. The rollout returns log-probs after both. In exact
mode the trainer leaves out the same tokens (``exact.support``), if it learns which they were. Otherwise it computes log-probs
over the whole vocabulary: a ratio of both would then compare two distributions, whatever the precision, so a correction by it is
refused; a metric of their difference is marked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jetrl_patch.config import Config
from jetrl_patch.errors import AuditError, ConfigError, JetrlError, explain

if TYPE_CHECKING:
    from jetrl_patch.exact.support import Support

#: vLLM's name of a setting that bans tokens -> the values with which it changes nothing
BANS: Mapping[str, tuple[Any, ...]] = {
    "min_tokens": (None, 0), "bad_words": (None, []), "allowed_token_ids": (None,), "structured_outputs": (None,),
}  # fmt: skip
_LIMITS: Mapping[str, tuple[Any, ...]] = {"top_p": (None, 1), "top_k": (None, 0, -1), "min_p": (None, 0), **BANS}
#: the same of one that changes logits
_CHANGES: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (None, 1), "presence_penalty": (None, 0), "frequency_penalty": (None, 0), "logit_bias": (None, {}),
}  # fmt: skip
#: the key of a sample that brings what its tokens were drawn from, as ``exact.support.Support.pack`` makes it
KEY = "jetrl_support"
#: how to leave out nothing
ALL = "draw from all tokens (top_p=1, top_k=0, min_p=0, no bans)"

#: the value of a framework's setting by vLLM's name; None without one
Select = Callable[[str], Any]


def limits(select: Select) -> dict[str, Any]:
    """The settings that leave out tokens, with their values."""
    return {name: value for name, off in _LIMITS.items() if (value := select(name)) not in off}


def reshapes(select: Select) -> dict[str, Any]:
    """These, penalties and biases: all settings but the temperature that change the distribution of a token."""
    return limits(select) | {name: value for name, off in _CHANGES.items() if (value := select(name)) not in off}


def marks(select: Select, config: Config) -> dict[str, float]:
    """The metric of a step whose compared log-probs are those of different distributions; empty for any other."""
    return {"jetrl/support_mismatch": 1.0} if reshapes(select) and not config.exact else {}


def problems(
    select: Select, config: Config, name: Callable[[str], str], lacking: Mapping[str, bool], corrected: str = ""
) -> Iterator[JetrlError]:
    """Yield an error for such settings: what exact mode lacks to leave out tokens, and a correction by two distributions.

    Exact mode does not know penalties: each framework's rules refuse them.

    Args:
        name: the user's name of a setting.
        lacking: what else exact mode asks for -> whether it is missing.
        corrected: the user's setting that corrects by the ratio of both log-probs; empty without one.
    """
    found = limits(select) if config.exact else reshapes(select)
    if not found:
        return
    what = " and ".join(name(key) for key in found) + f" with precision={config.precision!r}, align={config.resolved_align!r}"
    values = ", ".join(f"{key}={value!r}" for key, value in found.items())
    if config.exact:
        if missing := [words for words, is_missing in lacking.items() if is_missing]:
            fix = f"change that, {ALL}, or use align='linear' without a correction"
            yield ConfigError(explain(what, required=" and ".join(missing), found=values, fix=fix))
    elif corrected:
        required = f"a rollout that draws by the temperature alone, as the trainer assumes, for the ratios of {corrected}"
        fix = f"{ALL} without penalties, or turn the correction off"
        yield ConfigError(explain(what, required=required, found=values, fix=fix))


# ---- Responses of several turns ------------------------------------------------------------------

#: the tokens that a model drew in a turn, and what from: None if from all tokens
Turn = tuple[Sequence[int], "Support | None"]


def of_turns(response: Sequence[int], mask: Sequence[int], turns: Iterator[Turn]) -> Support:
    """The supports of a response [C], none for a token of a tool or a user, where ``mask`` [C] is 0. Takes the turns it needs.

    Raises AuditError unless the model's tokens in the response are those of the turns, in order; the last turn may be cut.
    """
    from jetrl_patch.exact.support import placed

    own = [place for place, drawn in enumerate(mask) if drawn]
    pieces = []
    while own:
        tokens, drawn = next((turn for turn in turns if len(turn[0])), ((), None))
        here, own = own[: len(tokens)], own[len(tokens) :]
        found = [response[place] for place in here]
        if not found or found != list(tokens[: len(found)]) or here[-1] - here[0] != len(here) - 1:
            what, required = "the tokens of a response that are marked as the model's", "those that the engine returned, in order"
            fix = f"leave them as they are and mark the others, or {ALL}"
            raise AuditError(explain(what, required=required, found="other tokens", fix=fix))
        if drawn is not None:
            pieces.append((here[0], drawn.part(0, len(here))))
    return placed(pieces, len(response))
