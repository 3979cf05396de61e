"""Merge the plugin's part of a job's ``runtime_env`` with the user's, and check the status of every node."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jetrl_patch import session
from jetrl_patch.adapters.ray.hook import make_probe
from jetrl_patch.config import Config, environment
from jetrl_patch.errors import ConfigError, ConflictError, JetrlError, NotPatchedError, differences, explain
from jetrl_patch.patching.identity import identity

# ---- Merge the plugin's part of a job's ``runtime_env`` with the user's: pure functions on plain data, without Ray ----

HOOK = "worker_process_setup_hook"
#: name of the plugin's hook, as ``get_runtime_context().runtime_env`` returns it
HOOK_NAME = "jetrl_patch_setup_hook"
#: where Ray stores the hook's name or key in the workers' environment (``ray_constants``; a test compares)
HOOK_VARIABLE = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
#: prefix of a hook that Ray keeps in its own store, under a key of one job
_BY_KEY = "ray_runtime_env_func::"
#: fields that Ray does not allow together with a hook
_WITHOUT_HOOK = ("container", "image_uri")

Hook = Callable[[], Any] | str | None


def merge_runtime_env(given: Mapping[str, Any] | None, config: Config) -> tuple[dict[str, Any], Hook]:
    """Return a copy of the user's ``runtime_env`` with the plugin's variables, and the user's hook, which the caller replaces.

    ``given`` is a dict (``RuntimeEnv`` is one) or an OmegaConf container.
    Raises ConflictError if a ``JETRL_*`` variable of the user contradicts ``config``; ConfigError for an unknown ``JETRL_*``
    variable, or a field that Ray does not allow together with a hook.
    """
    merged = _plain(given or {})
    for name in _WITHOUT_HOOK:
        if merged.get(name):
            required, found = "a setup hook, which patches the workers", f"{name!r}, which Ray does not allow with a hook"
            fix = "drop it and start the nodes themselves in that image"
            raise ConfigError(explain("runtime_env of ray.init", required=required, found=found, fix=fix))
    variables = dict(merged.get("env_vars") or {})
    hook = take_hook(merged, variables)
    check_variables(variables, config)
    merged["env_vars"] = {**variables, **config.to_env()}
    return merged, hook


def take_ours(injected: Mapping[str, Any] | None, config: Config) -> tuple[dict[str, Any], Hook]:
    """Split the ``runtime_env`` of ``ray job submit`` into its hook and what stays there.

    Ray refuses a key that is both there and in ``ray.init``. So this removes the ``JETRL_*`` settings, which must agree with
    ``config``, and the hook, which the caller chains.
    """
    rest = _plain(injected or {})
    variables = dict(rest.pop("env_vars", None) or {})
    check_variables(variables, config)
    hook = take_hook(rest, variables)
    variables = {name: value for name, value in variables.items() if name not in config.to_env()}
    if variables:
        rest["env_vars"] = variables
    return rest, hook


def take_hook(runtime_env: dict[str, Any], variables: dict[str, Any]) -> Hook:
    """Remove the user's hook from both places where it can be, and return it.

    A process that passes on its own environment (as vLLM does to its Ray workers) passes on the plugin's hook too, by name or by
    its job's key. That hook does not count: the caller makes a new one.
    """
    hook: Hook = runtime_env.pop(HOOK, None)
    inherited = variables.pop(HOOK_VARIABLE, None)
    if hook == HOOK_NAME:
        return None
    if hook is None and inherited:
        if inherited.startswith(_BY_KEY):
            required, other = "a setup hook that this job can run", f"{HOOK_VARIABLE}, which refers to another job's function"
            fix = "pass the hook by its dotted path"
            raise ConflictError(explain("runtime_env of ray.init", required=required, found=other, fix=fix))
        hook = inherited
    return hook


def check_variables(variables: Mapping[str, Any], config: Config) -> None:
    """Raise ConflictError if a ``JETRL_*`` variable among these contradicts ``config``."""
    ours = config.to_env()
    given = {name: str(value) for name, value in variables.items() if name.startswith(environment.PREFIX) and str(value).strip()}
    wrong = []
    for name, value in given.items():
        changed = {**ours, name: value}
        if not environment.opted_in(changed) or Config.from_env(changed).resolved() != config.resolved():
            wrong.append(name)
    if wrong:
        required, found = {name: ours.get(name, "") for name in wrong}, {name: given[name] for name in wrong}
        what, fix = "JETRL_* variables in the runtime_env of the Ray job", "remove them: the driver sets them for every worker"
        raise ConflictError(differences(what, required=required, found=found, fix=fix))


def _plain(value: Any) -> Any:
    """Return a copy in which every mapping is a dict, as Ray requires. OmegaConf's containers are not dicts."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return copy.deepcopy(value) if isinstance(value, list) else value


# ---- The status of every node: one small task per node, through the same hook as the user's tasks ----

logger = logging.getLogger(__name__)

#: seconds within which every node must answer; a worker starts in one or two, on a busy machine in ten
LIMIT = 120.0
#: seconds within which a node without an answer must then say why
_REASON_LIMIT = 60.0
#: fields of a runtime environment that each node builds first; Ray allows ten minutes
_INSTALLS = ("pip", "uv", "conda", "working_dir", "py_modules")
_INSTALL_LIMIT = 600.0


@dataclass(frozen=True)
class NodeStatus:
    """One node and what a worker on it reported.

    Attributes:
        node_id, ip, hostname, name: as Ray knows the node; ``name`` is the ip unless the node was given one.
        error: why there is no report, or what the worker reports as wrong; "" if the worker is patched.
        report: ``worker.report`` with ``pid``, ``python`` and ``version``; empty without an answer.
    """

    node_id: str
    ip: str
    hostname: str
    name: str
    error: str = ""
    report: Mapping[str, Any] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """Describe the node for messages."""
        name = "" if self.name in ("", self.ip) else f", named {self.name}"
        return f"node {self.ip} ({self.hostname}{name})"


def collect_status(config: Config | None = None, timeout: float = LIMIT) -> list[NodeStatus]:
    """Ask a worker on every live node of this connection for its status. A node silent for ``timeout`` seconds has an ``error``.

    ``config`` has the settings that the workers should have; by default this process's.
    Raises NotPatchedError if there is no connection, or no config and this process is not patched.
    """
    import ray

    config = session.active_config() if config is None else config
    if not ray.is_initialized():
        raise NotPatchedError("collect_status() needs a connection to Ray. Call ray.init() first.")
    nodes = [node for node in ray.nodes() if node["Alive"]]
    answers = _ask(nodes, config, timeout, attempt=False)
    silent = [node for node in nodes if isinstance(answers[node["NodeID"]], str)]
    # a worker whose hook fails dies before it can say why; a worker without the hook can
    reasons = _ask(silent, config, min(timeout, _REASON_LIMIT), attempt=True) if silent else {}
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]} if silent else set(answers)
    return [
        _status(node, answers[node["NodeID"]], reasons.get(node["NodeID"]))
        for node in nodes
        if node["NodeID"] in alive  # a node that has left the cluster runs no workers
    ]


def require_nodes(config: Config, installs: Mapping[str, Any]) -> list[NodeStatus]:
    """Check that all nodes are patched as this driver is, or raise and name those that are not.

    ``installs`` is the job's runtime environment, which may take each node time to build.
    Raises NotPatchedError if the plugin is missing on a node, fails or does not answer; ConflictError if only versions or
    settings differ.
    """
    start = time.monotonic()
    limit = LIMIT + (_INSTALL_LIMIT if any(installs.get(name) for name in _INSTALLS) else 0.0)
    found = collect_status(config, limit)
    wrong = [problem for node in found if (problem := judge(node, config)) is not None]
    if wrong:
        kind = ConflictError if all(isinstance(problem, ConflictError) for problem in wrong) else NotPatchedError
        raise kind("; ".join(str(problem) for problem in wrong))
    logger.info("jetrl_patch: Ray nodes answered in %.1f s, all patched (%d)", time.monotonic() - start, len(found))
    return found


def judge(node: NodeStatus, config: Config) -> JetrlError | None:
    """Return the error for a node, or None if it is patched."""
    version = node.report.get("version")
    settings = node.report.get("settings")
    if node.report and version is not None and version != identity():
        asked, fix = f"jetrl_patch {identity()}, as in the driver", "install the same sources on every node"
        return ConflictError(explain(node.where, required=asked, found=version, fix=fix))
    if node.report and version is None:
        asked, python = f"jetrl_patch {identity()}", node.report["python"]
        found, fix = f"{node.error} in {python}", "install that version on the node"
        return NotPatchedError(explain(node.where, required=asked, found=found, fix=fix))
    if node.error:
        asked, fix = "a patched worker", "check the worker's log on that node"
        return NotPatchedError(explain(node.where, required=asked, found=node.error, fix=fix))
    if settings != config.to_env():
        fix = "remove the JETRL_* variables of that node"
        return ConflictError(differences(node.where, required=config.to_env(), found=settings or {}, fix=fix))
    return None


def _ask(nodes: Sequence[Mapping[str, Any]], config: Config, timeout: float, attempt: bool) -> dict[str, Any]:
    """Return node id -> report, or why there is none. With ``attempt`` the workers start without any hook."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    probe = ray.remote(make_probe(identity(), config.to_env(), attempt))
    options: dict[str, Any] = {"num_cpus": 0, "max_retries": 0}
    if attempt:
        options["runtime_env"] = {"env_vars": {HOOK_VARIABLE: ""}}
    asked = {
        probe.options(
            **options, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(): node["NodeID"]
        for node in nodes
    }
    ready, late = ray.wait(list(asked), num_returns=len(asked), timeout=timeout)
    answers: dict[str, Any] = {asked[task]: f"no answer within {timeout:g} s" for task in late}
    for task in late:
        ray.cancel(task, force=True)
    for task in ready:
        try:
            answers[asked[task]] = ray.get(task)
        except Exception as error:  # the reason why the worker did not answer is the result
            lines = str(error).strip().splitlines()
            answers[asked[task]] = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    return answers


def _status(node: Mapping[str, Any], answer: Any, reason: Any) -> NodeStatus:
    """Combine the ``answer`` of a worker with the hook and, failing that, the ``reason`` of a worker without it."""
    report = answer if isinstance(answer, dict) else reason if isinstance(reason, dict) else {}
    error = report.get("error", "")
    if not isinstance(answer, dict) and not error:
        error = answer  # the worker without the hook reported no error, so nothing more is known
    elif not error and not report.get("enabled"):
        error = report.get("failure") or "the worker is not patched, although its setup hook ran"
    return NodeStatus(
        node_id=node["NodeID"],
        ip=node["NodeManagerAddress"],
        hostname=node["NodeManagerHostname"],
        name=node.get("NodeName") or "",
        error=error,
        report=report,
    )
