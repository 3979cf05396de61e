"""Check a framework's settings: findings, rules for conflicting settings, and the mark that processes compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jetrl_patch import registry
from jetrl_patch._versions import EXTRAS
from jetrl_patch.config import Config, environment
from jetrl_patch.errors import ConfigError, ConflictError, JetrlError, NotPatchedError, differences, explain, split_fix
from jetrl_patch.patching.guards import is_installed
from jetrl_patch.snapshot import PatchStatus

# ---- Findings as data, and the verdict on all of them --------------------------------------------

State = Literal["ok", "warning", "unknown", "problem", "skipped"]
#: verdict -> exit status
STATUS = {True: 0, False: 1, None: 2}
#: how the finding about a command ends that enables nothing
NOTHING = "nothing would be patched"


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: what was checked, in a word or two.
        state: "problem" stops a run; "unknown" could not be checked and may stop it; "warning" and "skipped" do not.
        finding: what was found.
        to_do: what to do about it; empty if nothing.
    """

    name: str
    state: State
    finding: str
    to_do: str = ""


@dataclass(frozen=True)
class Memory:
    """One row of the memory estimate.

    Attributes:
        side: "trainer" or "rollout".
        what: what takes the memory.
        bytes: on one rank; None if unknown.
        how: how the number was computed, or why there is none.
    """

    side: str
    what: str
    bytes: float | None
    how: str


@dataclass
class Report:
    """All results.

    Attributes:
        config: the plugin's settings.
        framework: the framework that the command starts, whose runs the checks judge; None without a command.
        stopped: without a command: framework -> the check that stops only its runs.
        memory: the estimated memory of the run on each rank.
    """

    config: Config | None = None
    checks: list[Check] = field(default_factory=list)
    patches: list[PatchStatus] = field(default_factory=list)
    framework: str | None = None
    stopped: dict[str, str] = field(default_factory=dict)
    memory: list[Memory] = field(default_factory=list)

    @property
    def starts(self) -> bool | None:
        """Whether a run would start; None if unknown. A problem outweighs an unknown."""
        states = {check.state for check in self.checks}
        return False if "problem" in states else None if "unknown" in states else True

    @property
    def status(self) -> int:
        """The exit status: 0 if a run would start, 1 if not or not patched, 2 if unknown."""
        return STATUS[self.starts]

    @property
    def verdict(self) -> str:
        """Whether a run would start, in one line."""
        if self.starts:
            return "a run would start" + "".join(f", but not one of {name}: see {why}" for name, why in self.stopped.items())
        if self.starts is None:
            number = sum(check.state == "unknown" for check in self.checks)
            return f"cannot tell whether a run would start: {number} thing{_s(number)} could not be checked"
        problems = [check for check in self.checks if check.state == "problem"]
        if len(problems) == 1 and problems[0].finding.endswith(NOTHING):
            return f"{NOTHING}: the command would run without jetrl_patch"
        return f"a run would NOT start: {len(problems)} problem{_s(len(problems))}"

    def as_dict(self) -> dict[str, Any]:
        """Plain lists and dicts, for JSON."""
        return {
            "verdict": self.verdict,
            "starts": self.starts,
            "config": None if self.config is None else dataclasses.asdict(self.config),
            "checks": [dataclasses.asdict(check) for check in self.checks],
            "patches": [dataclasses.asdict(patch) for patch in self.patches],
            "memory": [dataclasses.asdict(row) for row in self.memory],
        }


def from_error(name: str, error: BaseException) -> Check:
    """A JetrlError as a problem (see ``errors.split_fix``)."""
    return Check(name, "problem", *split_fix(str(error)))


def _s(number: int) -> str:
    return "" if number == 1 else "s"


# ---- Rules for framework settings that conflict with the plugin ----------------------------------

#: vLLM raises lower temperatures, except zero, to this one (``_MAX_TEMP`` in ``vllm.sampling_params``)
LEAST_TEMPERATURE = 0.01
#: ``required`` of an error about it
REQUIRED_TEMPERATURE = f"at least {LEAST_TEMPERATURE}, the lowest temperature at which vLLM samples"
#: vLLM rejects each request with a higher temperature (``SamplingParams``)
MOST_TEMPERATURE = 2.0


@dataclass(frozen=True)
class Rule:
    """One setting that some modes do not support.

    Attributes:
        path: dotted path in the framework's configuration.
        bad: whether a value breaks the rule.
        required: what the plugin needs, as a noun phrase or a value.
        fix: what to do, as an imperative.
        scope: its modes: "all", "changed" (all but measure-only), "quantized" (rollout linears) or "exact".
        error: ConflictError if another component does the same job, ConfigError if the plugin cannot support the setting.
        absent: whether ``bad`` also judges a missing setting (``None``), which otherwise breaks no rule.
    """

    path: str
    bad: Callable[[Any], bool]
    required: str
    fix: str
    scope: Literal["all", "changed", "quantized", "exact"]
    error: type[JetrlError] = ConfigError
    absent: bool = False

    def applies(self, config: Config) -> bool:
        if self.scope == "changed":
            return not config.mode.only_measures
        return self.scope == "all" or (self.scope == "quantized" and config.quantized_rollout) or config.exact


def broken(
    rules: Iterable[Rule], select: Callable[[str], Any], config: Config, name: Callable[[str], str], mode: str = ""
) -> Iterator[JetrlError]:
    """Yield an error for each rule that a configuration breaks.

    Args:
        select: returns the value at a path, None if there is none.
        name: returns the user's name of a path.
        mode: the plugin's setting that the message names; by default precision and align.
    """
    mode = mode or f"precision={config.precision!r}, align={config.resolved_align!r}"
    for rule in rules:
        if not rule.applies(config):
            continue
        value = select(rule.path)
        if (value is not None or rule.absent) and rule.bad(value):
            fix = f"{rule.fix}, or use align='linear'" if rule.scope == "exact" else rule.fix
            yield rule.error(explain(f"{name(rule.path)} with {mode}", required=rule.required, found=repr(value), fix=fix))


def raised(check: Callable[[], object]) -> Iterator[JetrlError]:
    """Yield the ``JetrlError`` that a check raises, if any."""
    try:
        check()
    except JetrlError as error:
        yield error


def kv_cache_problems(config: Config) -> Iterator[JetrlError]:
    """Yield an error if the rollout is to have an FP8 KV cache, and this machine has none."""
    if config.kv_cache == "fp8":
        yield from raised(lambda: registry.rollout().check_kv_cache(config.exact))


def adapter_problems(config: Config, used: str) -> Iterator[JetrlError]:
    """Yield an error for each of the plugin's settings that LoRA does not support. ``used`` is the framework's setting of it."""
    reasons = {
        "fp8_all_gather": "FSDP2 would gather W as FP8 bytes, which cannot be merged with the adapters",
        "invariant_scale": "a saved adapter would fit only the scaled model",
    }
    for name, why in reasons.items():
        if value := getattr(config, name):
            required, fix = f"no {name} ({why})", f"leave {name} unset"
            yield ConfigError(explain(f"{name} with {used}", required=required, found=f"{value!r}", fix=fix))


def route_setting(config: Config) -> str:
    """The setting that needs routes, for messages."""
    return "measure_routes=True" if config.router_replay == "none" else f"router_replay={config.router_replay!r}"


def temperature(path: str) -> tuple[Rule, Rule]:
    """The rules for the rollout's temperature: the trainer divides by it too, so vLLM must not change it, and must accept it."""
    most, fix = f"at most {MOST_TEMPERATURE}, the highest temperature that vLLM accepts", "set it to 1.0"
    return (
        Rule(path, lambda value: not (is_number(value) and value >= LEAST_TEMPERATURE), REQUIRED_TEMPERATURE, fix, "all"),
        Rule(path, lambda value: is_number(value) and value > MOST_TEMPERATURE, most, fix, "all"),
    )


#: whether a value is anything but false, empty or zero
is_set = bool


def deterministic(config: Config, *paths: str) -> tuple[Rule, ...]:
    """The rules for torch's deterministic mode. The frameworks' code for it shrinks cuBLAS's workspace, in the trainer alone.

    cuBLASLt takes no more workspace than cuBLAS, and chooses its kernel, and so the order of its sums, among those that fit.
    """
    required, fix = "the rollout's cuBLAS workspace for backend='cublaslt'", "set it to false, use another backend"
    return tuple(Rule(path, is_set, required, fix, "exact") for path in paths) if config.backend == "cublaslt" else ()


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def more_than_one(value: Any) -> bool:
    return is_number(value) and value > 1


def positive(value: Any) -> bool:
    return is_number(value) and value > 0


def other_than(*allowed: Any) -> Callable[[Any], bool]:
    """Return a predicate: whether a value is none of these."""
    return lambda value: value not in allowed


# ---- The optimizers of ``optimizer_states``, by name: the module that holds them imports torchao --

OPTIMIZER_MODULE = "jetrl_patch.trainer.optimizer"
#: ``Config.optimizer_states`` -> the class in ``OPTIMIZER_MODULE``
OPTIMIZERS = {"8bit": "AdamW8bit", "fp8": "AdamWFp8"}
#: options of these classes besides lr, betas and weight_decay
OPTIMIZER_OPTIONS = ("eps", "block_size", "bf16_stochastic_round")


def check_torchao(states: str) -> None:
    """Raise ConfigError if torchao, which ``optimizer_states=states`` needs, is not installed."""
    if not is_installed("torchao"):
        needed = EXTRAS["optim"][0]
        fix = f"install it with `pip install '{needed}'`, or leave optimizer_states at 'fp32'"
        raise ConfigError(explain(f"optimizer_states={states!r}", required=needed, found="no installed torchao", fix=fix))


# ---- The mark: the plugin's settings, which the driver puts into the framework's and every process compares with its own

#: key of the plugin's settings in a framework's settings and in reports
MARK = "jetrl"


def check(mark: Mapping[str, str] | None, config: Config, where: str, unpatched: str) -> None:
    """Compare the settings that the driver wrote with those of this process.

    Args:
        where: names this process in errors.
        unpatched: the error message if the driver wrote none.

    Raises NotPatchedError if there is no mark, ConflictError if it differs.
    """
    if not mark:
        raise NotPatchedError(unpatched)
    require_same(where, required=mark, found=config.to_env())


def require_same(where: str, *, required: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Raise ConflictError if the settings of a process (``Config.to_env``) differ from those of the run."""
    if required != found:
        theirs, ours = environment.by_field(required), environment.by_field(found)
        fix = "give every process of the run the same settings"
        raise ConflictError(differences(f"settings of {where}", required=theirs, found=ours, fix=fix))
