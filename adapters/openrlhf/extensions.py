"""Locks of PyTorch's builds of C++ extensions, which a killed process leaves behind.

DeepSpeed builds its operators when an actor starts, and ``torch.utils.cpp_extension`` keeps other processes out with a lock
file. It stays if the process is killed, and every later run then waits for it forever and without a word.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jetrl_patch.errors import ConfigError, explain
from jetrl_patch.gate import while_active

__all__ = ["abandoned", "wait"]

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
