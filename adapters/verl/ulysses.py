"""Ulysses sequence parallelism, for which actor and reference have settings of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jetrl_patch.adapters.verl.paths import ACTOR, REF
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, JetrlError, explain

__all__ = ["problems"]

#: verl reads the engine's setting, and copies that of the model into it if it is above 1
_PATHS = tuple(
    f"{model}{engine}.ulysses_sequence_parallel_size" for model in (ACTOR, REF) for engine in ("", ".fsdp_config")
)


def problems(select: Callable[[str], Any], config: Config) -> Iterator[JetrlError]:
    """Yield one error that names every model with split sequences: exact mode's attention sees whole ones only.

    With ranks that hold parts of a sequence the log-probs of the other ranks' tokens are wrong. The reference's never meet
    the rollout's, so no metric shows it.

    Args:
        select: returns verl's setting at a dotted path, None where it is missing.
    """
    found = {path: value for path in _PATHS if (value := select(path)) is not None and int(value) > 1}
    if config.exact and found:
        what = f"verl setting {' and '.join(found)} with align='exact'"
        values = " and ".join(str(value) for value in found.values())
        fix = "set it to 1, or use align='linear'"
        yield ConfigError(explain(what, required="whole sequences on each rank", found=values, fix=fix))
