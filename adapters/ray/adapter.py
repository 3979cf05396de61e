"""The Ray adapter: ``ray.init`` adds the plugin to the job's runtime environment and checks every node before it returns."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from jetrl_patch import session
from jetrl_patch.adapters.ray.hook import make_hook
from jetrl_patch.adapters.ray.nodes import HOOK, HOOK_NAME, Hook, merge_runtime_env, require_nodes, take_ours
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, ConflictError, NotPatchedError, explain
from jetrl_patch.patching.identity import identity
from jetrl_patch.patching.patch import replacement
from jetrl_patch.registry import Adapter, Patch

#: where ``ray job submit`` leaves the runtime environment for the driver that it starts
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"


@replacement
def init(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``ray.init``. A call on an existing connection starts no workers and is passed on unchanged."""
    import ray

    if ray.is_initialized():
        return original(*args, **kwargs)
    config = session.active_config()
    _refuse_client(args[0] if args else kwargs.get("address"))
    with _submitted_job(config) as (job, hook):
        # like Ray, which reads ``job_config`` only without ``runtime_env``
        given = kwargs.get("runtime_env") or getattr(kwargs.get("job_config"), "runtime_env", None)
        kwargs["runtime_env"], own = merge_runtime_env(given, config)
        kwargs["runtime_env"][HOOK] = make_hook(identity(), config.to_env(), _one_of(own, hook))
        context = original(*args, **kwargs)
    try:
        require_nodes(config, installs={**job, **kwargs["runtime_env"]})
    except BaseException:
        ray.shutdown()  # nothing may run on the connection that this call opened
        raise
    return context


def require_hook(config: Config) -> None:
    """Raise NotPatchedError if the workers of this driver's connection are not patched with these settings.

    They cannot be patched later, and would run unpatched without an error.
    """
    import ray

    job = ray.get_runtime_context().runtime_env
    if job.get(HOOK) != HOOK_NAME or not config.to_env().items() <= job.get("env_vars", {}).items():
        required = "a call before ray.init, which passes these settings to the workers"
        fix = "call enable() before ray.init and before `from ray import init`, or close the connection with ray.shutdown()"
        raise NotPatchedError(
            explain("enable() in a Ray driver", required=required, found="a connection that was made without them", fix=fix)
        )


def _one_of(own: Hook, submitted: Hook) -> Hook:
    """Choose between two user hooks by Ray's own rule."""
    if own is None or submitted is None or own == submitted:
        return submitted if own is None else own
    if os.environ.get("RAY_OVERRIDE_JOB_RUNTIME_ENV") != "1":
        required, found = f"one hook, such as {own!r} in ray.init", f"another, {submitted!r}, in the job's runtime_env"
        fix = "pass only one of them, or set RAY_OVERRIDE_JOB_RUNTIME_ENV=1 to use the first"
        raise ConflictError(explain("worker_process_setup_hook", required=required, found=found, fix=fix))
    return own


@contextlib.contextmanager
def _submitted_job(config: Config) -> Iterator[tuple[dict[str, Any], Hook]]:
    """For a while, take what the plugin sets out of the variable of ``ray job submit``. Yields the rest and the user's hook.

    Ray merges the variable with the argument of ``ray.init``, and refuses a key that is in both.
    """
    text = os.environ.get(JOB_CONFIG)
    if text is None:
        yield {}, None
        return
    job = json.loads(text)
    job["runtime_env"], hook = take_ours(job.get("runtime_env"), config)
    os.environ[JOB_CONFIG] = json.dumps(job)
    try:
        yield job["runtime_env"], hook
    finally:
        os.environ[JOB_CONFIG] = text


def _refuse_client(address: Any) -> None:
    """Raise ConfigError for Ray Client (``ray://``), which does not support setup hooks. Ray falls back to RAY_ADDRESS."""
    found = os.environ.get("RAY_ADDRESS") or address if address in (None, "auto") else address
    if isinstance(found, str) and found.startswith("ray://"):
        required, client = "a driver inside the cluster, whose setup hook patches every worker", f"Ray Client ({found})"
        fix = "start the driver on a node of the cluster, for instance with `ray job submit`"
        raise ConfigError(explain("ray.init", required=required, found=f"{client}, which has no setup hook", fix=fix))


INIT = Patch(
    "ray", "init", init,
    reason="without it a job's workers stay unpatched and the driver does not notice. Ray Client (ray://) and a connection "
    "made before enable() are rejected",
    remove_when="Ray's workers load an entry-point group at start-up, without a worker_process_setup_hook in the runtime_env",
)


class RayAdapter(Adapter):
    """Patches the workers of a driver that connects after ``enable()``, or stops the driver."""

    name: ClassVar[str] = "ray"
    order: ClassVar[int] = 3
    requires: ClassVar[tuple[str, ...]] = ("ray",)

    def patches(self, config: Config) -> Sequence[Patch]:
        return (INIT,)

    def check(self, config: Config) -> None:
        """Raise NotPatchedError if the driver is already connected and its workers do not have these settings."""
        if is_connected_driver():
            require_hook(config)


def is_connected_driver() -> bool:
    """Whether this process is a connected driver. False in a worker, which its setup hook patches."""
    ray = sys.modules.get("ray")
    connected = getattr(ray, "is_initialized", None)
    if ray is None or connected is None or not connected():
        return False
    return bool(ray._private.worker.global_worker.mode == ray.SCRIPT_MODE)


ADAPTER = RayAdapter()
