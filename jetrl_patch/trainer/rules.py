"""Framework settings that conflict with the plugin: rules, and the ones that a configuration breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, JetrlError, explain

__all__ = [
    "LEAST_TEMPERATURE", "REQUIRED_TEMPERATURE", "Rule", "broken", "is_set", "more_than_one", "other_than", "positive", "raised",
    "temperature",
]  # fmt: skip

#: vLLM samples at this temperature where a lower one, but not zero, is asked for (``_MAX_TEMP`` in ``vllm.sampling_params``)
LEAST_TEMPERATURE = 0.01
#: the same, as an error says it
REQUIRED_TEMPERATURE = f"at least {LEAST_TEMPERATURE}, the lowest temperature at which vLLM samples"


@dataclass(frozen=True)
class Rule:
    """One setting that is refused.

    Attributes:
        path: dotted path in the framework's configuration.
        bad: whether a value is refused.
        required: what the plugin needs, as a noun phrase or a value.
        fix: what to do, as an imperative.
        scope: the modes it holds in: "all", "changed" (all that do more than measure), "quantized" (rollout linears) or
            "exact".
        error: ConflictError if another component does the same job, ConfigError if the plugin cannot support it.
        absent: whether ``bad`` also judges ``None`` (the setting is missing); otherwise it is never refused.
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
    rules: Iterable[Rule], select: Callable[[str], Any], config: Config, name: Callable[[str], str], beside: str | None = None
) -> Iterator[JetrlError]:
    """Yield an error for each rule that a configuration breaks.

    Args:
        select: returns the value at a path, None if there is none.
        name: returns the user's name of a path.
        beside: what of the plugin's settings the rules stand beside in a message; by default the mode.
    """
    mode = beside or f"precision={config.precision!r}, align={config.resolved_align!r}"
    for rule in rules:
        if not rule.applies(config):
            continue
        value = select(rule.path)
        if (value is not None or rule.absent) and rule.bad(value):
            what = f"{name(rule.path)} with {mode}"
            yield rule.error(explain(what, required=rule.required, found=repr(value), fix=rule.fix))


def raised(check: Callable[[], object]) -> Iterator[JetrlError]:
    """Yield the ``JetrlError`` that a check raises, if any."""
    try:
        check()
    except JetrlError as error:
        yield error


def temperature(path: str) -> Rule:
    """The rule for the temperature of the rollout, by which the trainer divides as well: vLLM must take it as it is."""
    return Rule(path, lambda value: float(value) < LEAST_TEMPERATURE, REQUIRED_TEMPERATURE, "set it to 1.0", "exact")


def is_set(value: Any) -> bool:
    """Whether a value is anything but false, empty or zero."""
    return bool(value)


def more_than_one(value: Any) -> bool:
    """Whether a count is above one."""
    return int(value) > 1


def positive(value: Any) -> bool:
    """Whether a count is above zero."""
    return int(value) > 0


def other_than(*allowed: Any) -> Callable[[Any], bool]:
    """Return a predicate: whether a value is none of these."""
    return lambda value: value not in allowed
