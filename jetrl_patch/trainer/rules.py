"""Settings of a framework that cannot stand beside ours: a table of rules, and what it comes to for one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, JetrlError, explain

__all__ = ["Rule", "broken", "is_set", "more_than_one", "other_than", "positive", "raised"]


@dataclass(frozen=True)
class Rule:
    """One setting that is refused.

    Attributes:
        path: where in the framework's configuration, dotted.
        bad: whether a value is refused.
        required: what the plugin needs there, as a noun phrase or a value.
        fix: what to do.
        scope: "all", "changed" (a mode that does more than measure), "quantized" (the rollout's linears are) or "exact".
        error: ConflictError where something else wants to do the same, ConfigError where we cannot do it.
        absent: whether ``None`` (the setting is not there) is judged by ``bad`` too; else it is never refused.
    """

    path: str
    bad: Callable[[Any], bool]
    required: str
    fix: str
    scope: Literal["all", "changed", "quantized", "exact"]
    error: type[JetrlError] = ConfigError
    absent: bool = False

    def applies(self, config: Config) -> bool:
        """Whether the rule holds in this mode."""
        if self.scope == "changed":
            return not config.mode.only_measures
        return self.scope == "all" or (self.scope == "quantized" and config.quantized_rollout) or config.exact


def broken(
    rules: Iterable[Rule], select: Callable[[str], Any], config: Config, name: Callable[[str], str]
) -> Iterator[JetrlError]:
    """The rules that a configuration breaks, as the errors to raise.

    Args:
        select: gives the value at a path, None where there is none.
        name: how a path is called to the user.
    """
    mode = f"precision={config.precision!r}, align={config.resolved_align!r}"
    for rule in rules:
        if not rule.applies(config):
            continue
        value = select(rule.path)
        if (value is not None or rule.absent) and rule.bad(value):
            what = f"{name(rule.path)} with {mode}"
            yield rule.error(explain(what, required=rule.required, found=repr(value), fix=rule.fix))


def raised(check: Callable[[], object]) -> Iterator[JetrlError]:
    """What a check raises, for a list of problems; its first error alone."""
    try:
        check()
    except JetrlError as error:
        yield error


def is_set(value: Any) -> bool:
    """Anything but false, empty and zero."""
    return bool(value)


def more_than_one(value: Any) -> bool:
    """A count above one."""
    return int(value) > 1


def positive(value: Any) -> bool:
    """A count above zero."""
    return int(value) > 0


def other_than(*allowed: Any) -> Callable[[Any], bool]:
    """Whether a value is none of these."""
    return lambda value: value not in allowed
