"""Rollouts that leave out tokens by top-k, top-p or min-p: which do, and what else then has to be so.

The rollout returns log-probs over the tokens that were left. In exact mode the trainer computes these too (``exact.support``), if
it learns which tokens they were. Otherwise it computes them over the whole vocabulary: a ratio of both would then compare two
distributions, whatever the precision, so a correction by it is refused; a metric of their difference is marked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jetrl_patch import registry
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, JetrlError, explain

#: setting -> the values with which it leaves out nothing
_OFF: Mapping[str, tuple[float | None, ...]] = {"top_p": (None, 1), "top_k": (None, 0, -1), "min_p": (None, 0)}
#: how to leave out nothing
ALL = "set top_p to 1, top_k to 0 and min_p to 0"


def limits(select: Callable[[str], Any]) -> dict[str, Any]:
    """The settings that leave out tokens, with their values. ``select`` returns that of a name in ``_OFF``, None without one."""
    return {name: value for name, off in _OFF.items() if (value := select(name)) not in off}


def marks(found: Mapping[str, Any], config: Config) -> dict[str, float]:
    """The metric of a step whose compared log-probs are those of different distributions; empty for any other."""
    return {"jetrl/support_mismatch": 1.0} if found and not config.exact else {}


def problems(
    found: Mapping[str, Any], config: Config, name: Callable[[str], str], lacking: Mapping[str, bool], corrected: str = ""
) -> Iterator[JetrlError]:
    """Yield the errors about a run whose rollout leaves out tokens; without such settings there are none.

    Args:
        found: as from ``limits``.
        name: the user's name of a setting.
        lacking: what else exact mode asks for -> whether it is missing.
        corrected: the user's setting that corrects by the ratio of both log-probs; empty without one.
    """
    if not found:
        return
    what = " and ".join(name(key) for key in found) + f" with precision={config.precision!r}, align={config.resolved_align!r}"
    values = ", ".join(f"{key.rpartition('.')[2]}={value!r}" for key, value in found.items())
    if config.exact:
        if missing := [words for words, is_missing in lacking.items() if is_missing]:
            fix = f"change that, {ALL}, or use align='linear' without a correction"
            yield ConfigError(explain(what, required=" and ".join(missing), found=values, fix=fix))
        elif (error := registry.rollout().masks_error(what)) is not None:
            yield error
    elif corrected:
        required = f"a rollout that may draw every token, as the trainer assumes, for the ratios of {corrected}"
        fix = f"{ALL}, turn the correction off, or use align='exact'"
        yield ConfigError(explain(what, required=required, found=values, fix=fix))
