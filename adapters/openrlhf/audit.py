"""Before the first step is computed: does every actor of the run stand as the driver does?"""

from __future__ import annotations

import logging
from typing import Any

from jetrl_patch import runtime
from jetrl_patch.config import Config
from jetrl_patch.errors import ConflictError, NotPatchedError, explain

__all__ = ["ask_actors", "audit", "check_report"]

logger = logging.getLogger(__name__)


def audit(maker: Any) -> None:
    """Ask the actors that compute log-probs (policy, reference) and compare.

    The vLLM workers were compared by the first weight sync.

    Args:
        maker: OpenRLHF's ``RemoteExperienceMaker``.

    Raises:
        NotPatchedError: an actor is not patched, or has no FP8 layers. ConflictError: it has other settings.
    """
    config = runtime.active_config()
    groups = {"policy": maker.actor_model_group, "reference": maker.initial_model_group}
    for role, group in groups.items():
        for report in ask_actors(group, None) if group is not None else []:
            check_report(role, report, config)
            logger.info(
                "jetrl_patch: %s actor %s on %s: %s",
                role,
                report["pid"],
                report["node"],
                f"{report['layers']} FP8 layers",
            )


def check_report(role: str, report: dict[str, Any], config: Config) -> None:
    """Compare one actor's report with the settings of this process."""
    where = f"the {role} actor (pid {report['pid']} on {report['node']})"
    if not report["config"]:
        raise NotPatchedError(f"{where} is not patched; {_HOW}")
    if report["config"] != config.to_env():
        raise ConflictError(
            explain(f"settings of {where}", asked=config.to_env(), found=report["config"], fix="make them the same")
        )
    if config.fp8_train and not report["layers"]:
        raise NotPatchedError(f"{where} built its model before it was patched, and has no FP8 layers; {_HOW}")


def ask_actors(group: Any, item: Any) -> list[dict[str, Any]]:
    """``jetrl_report(item)`` of every actor of a ``RayActorGroup``. Raises NotPatchedError if one does not know it."""
    import ray

    calls = group.async_run_method("execute_batch", "jetrl_report", {"item": [item]}, 0, 1)
    try:
        return [found[0] for found in ray.get(calls)]
    except AttributeError as error:
        raise NotPatchedError(f"an actor of OpenRLHF is not patched; {_HOW}") from error


_HOW = "start the driver with `jetrl run`, or call jetrl_patch.enable() in it before ray.init"
