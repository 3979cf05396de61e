"""Before the first training step, check that every process of the run is patched like the driver."""

from __future__ import annotations

from typing import Any

from jetrl_patch import session
from jetrl_patch.adapters.openrlhf.settings import START
from jetrl_patch.adapters.openrlhf.transport import Orders
from jetrl_patch.config import Config
from jetrl_patch.errors import NotPatchedError
from jetrl_patch.trainer.rules import require_same

__all__ = ["ask_actors", "ask_engines", "audit", "check_report"]


def audit(trainer: Any) -> list[dict[str, Any]]:
    """Compare the reports of the vLLM workers and of the actors that compute log-probs, and log a line for each.

    Args:
        trainer: OpenRLHF's ``BasePPOTrainer``.

    Raises:
        NotPatchedError: a process is not patched, or has no FP8 layers.
        ConflictError: a process has other settings.
    """
    from openrlhf.utils.logging_utils import init_logger

    config = session.active_config()
    groups = {"policy actor": trainer.actor_model_group, "reference actor": trainer.reference_model_group}
    reports = [{"role": role, **found} for role, group in groups.items() if group for found in ask_actors(group, None)]
    if config.quantized_rollout:
        reports += [{"role": "vLLM worker", **found} for found in ask_engines(trainer.vllm_engines, config)]
    logger = init_logger(__name__)
    for report in reports:
        check_report(report, config)
        logger.info(
            "jetrl_patch: %s pid %s on %s: %s, %d FP8 layers, %d patches applied",
            report["role"],
            report["pid"],
            report["node"],
            config.precision,
            report["layers"],
            sum(state == "applied" for _, state in report["patches"]),
        )
    return reports


def check_report(report: dict[str, Any], config: Config) -> None:
    """Compare one process's report with the settings of this one."""
    where = f"the {report['role']} (pid {report['pid']} on {report['node']})"
    if not report["config"]:
        raise NotPatchedError(f"{where} is not patched. {START}")
    require_same(where, required=config.to_env(), found=report["config"])
    if config.fp8_train and not report["layers"]:
        raise NotPatchedError(f"{where} built its model before it was patched, so it has no FP8 layers. {START}")


def ask_actors(group: Any, item: Any) -> list[dict[str, Any]]:
    """Call ``jetrl_report(item)`` on every actor of a ``RayActorGroup``. Raises NotPatchedError if one lacks the method."""
    import ray

    calls = group.async_run_method("execute_batch", "jetrl_report", {"item": [item]}, 0, 1)
    try:
        return [found[0] for found in ray.get(calls)]
    except AttributeError as error:
        raise NotPatchedError(f"an actor of OpenRLHF is not patched. {START}") from error


def ask_engines(engines: Any, config: Config) -> list[dict[str, Any]]:
    """Return a report of every vLLM worker, in the form of the actors' reports."""
    found = Orders(engines, config.sync_timeout).ask("status")
    return [{**worker, "layers": len(worker["layers"]) + len(worker["guarded"])} for engine in found for worker in engine]
