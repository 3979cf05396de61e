"""Status of every node: one small task per node, through the same hook as the user's tasks."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jetrl_patch import runtime
from jetrl_patch._versions import VERSION
from jetrl_patch.adapters.ray.hook import make_probe
from jetrl_patch.adapters.ray.merge import HOOK_VARIABLE
from jetrl_patch.config import Config
from jetrl_patch.errors import ConflictError, JetrlError, NotPatchedError, differences, explain

__all__ = ["NodeStatus", "collect_status", "require_nodes"]

logger = logging.getLogger(__name__)

#: seconds that every node has to answer; a worker starts in one or two, on a busy machine ten
LIMIT = 120.0
#: seconds that a silent node then has to report why
_REASON_LIMIT = 60.0
#: fields of a runtime environment that each node builds first; Ray allows ten minutes for it
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
    """Ask a worker on every alive node of this connection for its status; a node that cannot answer has ``error``.

    Args:
        config: the settings that the workers should have; by default this process's.
        timeout: seconds to wait for the slowest node.

    Raises NotPatchedError if there is no connection, or no config and this process is not patched.
    """
    import ray

    config = runtime.active_config() if config is None else config
    if not ray.is_initialized():
        raise NotPatchedError("collect_status() needs a connection to Ray. Call ray.init() first.")
    nodes = [node for node in ray.nodes() if node["Alive"]]
    answers = _ask(nodes, config, timeout, attempt=False)
    silent = [node for node in nodes if isinstance(answers[node["NodeID"]], str)]
    # a worker whose hook fails dies before it can report why; one without a hook can
    reasons = _ask(silent, config, min(timeout, _REASON_LIMIT), attempt=True) if silent else {}
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]} if silent else set(answers)
    return [
        _status(node, answers[node["NodeID"]], reasons.get(node["NodeID"]))
        for node in nodes
        if node["NodeID"] in alive  # a node that has left has no workers to patch
    ]


def require_nodes(config: Config, installs: Mapping[str, Any]) -> list[NodeStatus]:
    """Check that all nodes are patched as this driver is, or raise and name those that are not.

    Args:
        config: the driver's settings.
        installs: the job's runtime environment, which each node may take time to build.

    Raises NotPatchedError for a node where the plugin is missing, fails or does not answer; ConflictError if only
    versions or settings differ.
    """
    start = time.monotonic()
    limit = LIMIT + (_INSTALL_LIMIT if any(installs.get(name) for name in _INSTALLS) else 0.0)
    found = collect_status(config, limit)
    wrong = [problem for node in found if (problem := judge(node, config)) is not None]
    if wrong:
        kind = ConflictError if all(isinstance(problem, ConflictError) for problem in wrong) else NotPatchedError
        raise kind("; ".join(str(problem) for problem in wrong))
    logger.info("jetrl_patch: %d Ray nodes answered in %.1f s, all patched", len(found), time.monotonic() - start)
    return found


def judge(node: NodeStatus, config: Config) -> JetrlError | None:
    """Return the error for a node, or None if it is patched."""
    version = node.report.get("version")
    settings = node.report.get("settings")
    if node.report and version is not None and version != VERSION:
        asked, fix = f"jetrl_patch {VERSION}, as in the driver", "install the same version on every node"
        return ConflictError(explain(node.where, required=asked, found=version, fix=fix))
    if node.report and version is None:
        asked, python = f"jetrl_patch {VERSION}", node.report["python"]
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
    """Return node id -> report, or the reason why there is none. With ``attempt`` the workers start without any hook."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    probe = ray.remote(make_probe(VERSION, config.to_env(), attempt))
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
        except Exception as error:  # whatever kept the worker from answering is the result
            answers[asked[task]] = f"{type(error).__name__}: {_first_line(error)}"
    return answers


def _status(node: Mapping[str, Any], answer: Any, reason: Any) -> NodeStatus:
    """Combine ``answer`` of a worker with the hook and, if it gave none, ``reason`` of one without."""
    report = answer if isinstance(answer, dict) else reason if isinstance(reason, dict) else {}
    error = report.get("error", "")
    if not isinstance(answer, dict) and not error:
        error = answer  # the worker without the hook reported no error: nothing more is known
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


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"
