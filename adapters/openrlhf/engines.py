"""Before a policy actor opens the process group that it shares with vLLM's engines, make sure that they exist.

The group waits for every member without a limit. An engine that could not be built is dead, never joins, and the run would hang
with the engine's error somewhere in the log.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from jetrl_patch.errors import JetrlError, explain
from jetrl_patch.gate import while_active

__all__ = ["init_vllm_sync_group", "require_running"]


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
