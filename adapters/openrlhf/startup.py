"""The start of a run: Ray's copies of methods, engines that exist before a process group opens, and stale locks of builds."""

from __future__ import annotations

import os
import re
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from jetrl_patch.errors import ConfigError, JetrlError, explain
from jetrl_patch.registry import Journal
from jetrl_patch.session import while_active

__all__ = ["abandoned", "init_vllm_sync_group", "require_running", "wait"]


# ---- Renew Ray's copies of inherited methods -----------------------------------------------------
# ``@ray.remote`` sets every method of a class, including inherited ones, on the class that it exports. A subclass decorated in
# the module of its base therefore holds copies from before the patch. A renewed copy is the patched function itself, which Ray
# pickles by name, so each worker uses its own.

REASON = (
    "@ray.remote copied the base class's methods into this class before they were patched, so actors would run the originals"
)
REMOVE_WHEN = "Ray's ray.remote no longer copies inherited methods into the class it exports (modified_class)"


def renew(module: ModuleType, journal: Journal, *, base: str, names: Sequence[str]) -> None:
    """Set the current methods ``names`` of ``base`` on the module's remote classes that derive from it."""
    parent = getattr(module, base)
    for remote in vars(module).values():
        exported = getattr(getattr(remote, "__ray_metadata__", None), "modified_class", None)
        if exported is None or not issubclass(exported, parent):
            continue
        for name in names:
            if name in vars(exported.__ray_actor_class__):
                continue  # an override, which calls the base's method by name
            journal.set_attr(
                exported,
                name,
                vars(parent)[name],
                target=f"{module.__name__}.{exported.__name__}.{name}",
                reason=REASON,
            )


# ---- Before a policy actor opens the process group that it shares with vLLM's engines, make sure that they exist
# The group waits for every member without a limit. An engine that could not be built is dead, never joins, and the run would hang
# with the engine's error somewhere in the log.

@while_active
def init_vllm_sync_group(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``ActorPPOTrainer._init_vllm_sync_group``: wait until every engine answers."""

    def _init_vllm_sync_group(self: Any, *args: Any, **kwargs: Any) -> Any:
        require_running(self.vllm_engines)
        return original(self, *args, **kwargs)

    return _init_vllm_sync_group


def require_running(engines: Sequence[Any]) -> None:
    """Wait while Ray builds the engines, as long as that takes. Raises JetrlError with the cause as soon as one is dead."""
    import ray
    from ray.exceptions import RayActorError

    waiting = {engine.get_num_unfinished_requests.remote(): number for number, engine in enumerate(engines)}
    while waiting:
        (call,), _ = ray.wait(list(waiting), num_returns=1)
        number = waiting.pop(call)
        try:
            ray.get(call)
        except RayActorError as error:
            required, fix = "a running engine", "remove the cause, which the engine's own output tells in full, and start again"
            raise JetrlError(explain(f"vLLM engine {number}", required=required, found=_cause(str(error)), fix=fix)) from error


def _cause(text: str) -> str:
    """The last exception in a traceback that Ray passes on: its line and what follows, in one line."""
    lines = text.strip().splitlines()
    starts = [number for number, line in enumerate(lines) if re.match(r"[A-Za-z_][\w.]*: ", line)]
    return textwrap.shorten(" ".join(lines[starts[-1] if starts else -1 :]), 300, placeholder=" …").rstrip(".")


# ---- Locks of PyTorch's builds of C++ extensions, which a killed process leaves behind -----------
# DeepSpeed builds its operators when an actor starts, and ``torch.utils.cpp_extension`` keeps other processes out with a lock
# file. It stays if the process is killed, and every later run then waits for it forever and without a word.

#: seconds without a change in its folder after which a build counts as dead; compiling one file takes far less
LIMIT = 600.0


def abandoned() -> Iterator[ConfigError]:
    """Yield an error for each lock in PyTorch's folder of extensions whose build has not changed a file for ``LIMIT``."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")  # without it, one folder for each version of Python and CUDA
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "torch_extensions"
    for lock in sorted(Path(root).glob("*/lock") if root else cache.glob("*/*/lock")):
        age = time.time() - _last_change(lock)
        if age > LIMIT:
            yield _dead(lock, age)


@while_active
def wait(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``FileBaton.wait``: wait while the build that holds the lock makes progress.

    The clock of a shared file system may differ from this machine's, so the time since the last change *seen* counts.
    """

    def wait(self: Any) -> None:
        lock = Path(self.lock_file_path)
        seen, since = 0.0, time.monotonic()
        while lock.exists():
            changed = _last_change(lock)
            if changed != seen:
                seen, since = changed, time.monotonic()
            elif time.monotonic() - since > LIMIT:
                raise _dead(lock, time.monotonic() - since)
            time.sleep(self.wait_seconds)

    return wait


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
    return ConfigError(
        explain(
            f"PyTorch's C++ extension {lock.parent.name}",
            required="a build that ends",
            found=f"{lock}, the lock of a build that changed no file for {seconds / 60:.0f} minutes",
            fix="delete this file, which a killed process left behind, and start again",
        )
    )
