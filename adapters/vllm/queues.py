"""The shared memory of vLLM's queues between an engine and its workers: nothing of it is left behind.

A queue's memory has a name in ``/dev/shm`` that its writer removes when it ends, which a killed process never does. The name is
needed only until every reader has mapped the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jetrl_patch.gate import while_active

__all__ = ["wait_until_ready"]


@while_active
def wait_until_ready(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap ``MessageQueue.wait_until_ready``: once it returns in the writer, all readers on this machine have the memory."""

    def wait_until_ready(self: Any) -> None:
        original(self)
        if self._is_writer and self.buffer is not None and self.buffer.is_creator:
            self.buffer.shared_memory.unlink()
            self.buffer.is_creator = False  # so that nobody removes the name again

    return wait_until_ready
