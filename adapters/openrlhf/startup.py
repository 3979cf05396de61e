"""The start of a run: renew Ray's copies of methods, wait for engines, reject stale build locks, and compare all processes."""

from __future__ import annotations

import itertools
import os
import re
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from jetrl_patch import session
from jetrl_patch.adapters.openrlhf.state import START
from jetrl_patch.adapters.openrlhf.transport import RayOrders
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, JetrlError, NotPatchedError, explain
from jetrl_patch.patching.patch import replacement
from jetrl_patch.registry import Journal
from jetrl_patch.trainer.rules import require_same

# ---- Renew Ray's copies of inherited methods -----------------------------------------------------
# ``@ray.remote`` copies every method of a class, also inherited ones, into the class that it exports. A subclass decorated in its
# base's module therefore holds copies from before the patch. A renewed copy is the patched function itself, which Ray pickles by
# name, so each worker uses its own.

REASON = (
    "@ray.remote copied the base class's methods into this class before they were patched, so actors would run the originals"
)


def renew(module: ModuleType, journal: Journal, *, base: str, names: Sequence[str]) -> None:
    """Copy the current methods ``names`` of ``base`` into the module's remote classes that derive from it."""
    parent = getattr(module, base)
    for remote in vars(module).values():
        exported = getattr(getattr(remote, "__ray_metadata__", None), "modified_class", None)
        if exported is None or not issubclass(exported, parent):
            continue
        for name in names:
            if name in vars(exported.__ray_actor_class__):
                continue  # an override, which calls the base's method by name
            target = f"{module.__name__}.{exported.__name__}.{name}"
            journal.set_attr(exported, name, vars(parent)[name], target=target, reason=REASON)


# ---- Wait for vLLM's engines before a policy actor opens the process group that it shares with them
# The group waits for every member without a timeout. An engine that failed to start never joins, so the run would hang, with the
# engine's error somewhere in the log.

@replacement
def init_vllm_sync_group(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``ActorPPOTrainer._init_vllm_sync_group``: wait until every engine answers."""
    require_running(self.vllm_engines)
    return original(self, *args, **kwargs)


def require_running(engines: Sequence[Any]) -> None:
    """Wait until Ray has built all engines. Raises JetrlError with the cause as soon as one is dead."""
    import ray
    from ray.exceptions import RayActorError

    waiting = {engine.get_num_unfinished_requests.remote(): number for number, engine in enumerate(engines)}
    while waiting:
        (call,), _ = ray.wait(list(waiting), num_returns=1)
        number = waiting.pop(call)
        try:
            ray.get(call)
        except RayActorError as error:
            required, fix = "a running engine", "fix the cause, which the engine's output shows in full, and start again"
            raise JetrlError(explain(f"vLLM engine {number}", required=required, found=_cause(str(error)), fix=fix)) from error


def _cause(text: str) -> str:
    """The last exception in a traceback from Ray, and what follows it, in one line."""
    lines = text.strip().splitlines()
    starts = [number for number, line in enumerate(lines) if re.match(r"[A-Za-z_][\w.]*: ", line)]
    return textwrap.shorten(" ".join(lines[starts[-1] if starts else -1 :]), 300, placeholder=" …").rstrip(".")


# ---- Stale locks of PyTorch's builds of C++ extensions -------------------------------------------
# DeepSpeed builds its operators when an actor starts, and ``torch.utils.cpp_extension`` excludes other processes with a lock
# file. A killed process leaves the file behind, and every later run then waits for it forever, silently.

#: seconds without a change in its folder after which a build counts as dead; compiling one file takes far less
LIMIT = 600.0


def abandoned() -> Iterator[ConfigError]:
    """Yield an error for each lock in PyTorch's extension folder whose build changed no file for ``LIMIT`` seconds."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")  # without it, one folder for each version of Python and CUDA
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "torch_extensions"
    for lock in sorted(Path(root).glob("*/lock") if root else cache.glob("*/*/lock")):
        age = time.time() - _last_change(lock)
        if age > LIMIT:
            yield _dead(lock, age)


@replacement
def wait(original: Any, self: Any) -> None:
    """Replace ``FileBaton.wait``: wait while the build that holds the lock makes progress.

    A shared file system's clock may differ from this machine's, so the time since this process last saw a change counts.
    """
    lock = Path(self.lock_file_path)
    seen, since = 0.0, time.monotonic()
    while lock.exists():
        changed = _last_change(lock)
        if changed != seen:
            seen, since = changed, time.monotonic()
        elif time.monotonic() - since > LIMIT:
            raise _dead(lock, time.monotonic() - since)
        time.sleep(self.wait_seconds)


def _last_change(lock: Path) -> float:
    """Time of the last change in the folder of ``lock``; 0 once the folder is gone."""
    times = [0.0]
    for path in (lock.parent, *lock.parent.glob("*")):
        try:
            times.append(path.stat().st_mtime)
        except FileNotFoundError:  # a compiler's temporary file
            continue
    return max(times)


def _dead(lock: Path, seconds: float) -> ConfigError:
    found = f"{lock}, the lock of a build that changed no file for {seconds / 60:.0f} minutes"
    fix = "delete this file, which a killed process left behind, and start again"
    what = f"PyTorch's C++ extension {lock.parent.name}"
    return ConfigError(explain(what, required="a build that finishes", found=found, fix=fix))


# ---- Before the first training step, check that every process of the run is patched like the driver

def require_patched(trainer: Any) -> list[dict[str, Any]]:
    """Compare the reports of the vLLM workers and of the actors that compute log-probs, and log each.

    Raises NotPatchedError if a process is not patched or has no FP8 layers, ConflictError if it has other settings.
    """
    from openrlhf.utils.logging_utils import init_logger

    config = session.active_config()
    groups = {"policy actor": trainer.actor_model_group, "reference actor": trainer.reference_model_group}
    reports = [{"role": role, **found} for role, group in groups.items() if group for found in ask_actors(group, None)]
    if config.quantized_rollout:
        for worker in itertools.chain.from_iterable(RayOrders(trainer.vllm_engines, config.sync_timeout).ask("status")):
            layers = len(worker["layers"]) + len(worker["guarded"])
            reports.append({"role": "vLLM worker", **worker, "layers": layers})
    logger = init_logger(__name__)
    for report in reports:
        check_report(report, config)
        words = "jetrl_patch: %s pid %s on %s: %s, %d FP8 layers, %d patches applied"
        applied = sum(state == "applied" for _, state in report["patches"])
        logger.info(words, report["role"], report["pid"], report["node"], config.precision, report["layers"], applied)
    return reports


def check_report(report: dict[str, Any], config: Config) -> None:
    """Compare a process's report with the settings of this process."""
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
