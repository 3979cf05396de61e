"""Which weights made a sample: the number of the weight sync that stood in the engine at its first and last token.

Runs in OpenRLHF's ``RolloutRayActor``, which hands weight syncs and requests to the same vLLM client: a sync that has
ended sets the version, and each request notes it as its tokens come. A sample whose two versions differ (a partial
rollout) was made by neither alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from jetrl_patch.adapters.openrlhf.state import ENGINE
from jetrl_patch.adapters.openrlhf.wire import decode
from jetrl_patch.gate import while_active

__all__ = ["FIRST", "LAST", "collective_rpc", "execute", "generate"]

#: keys of a sample's logs, and so of OpenRLHF's ``Experience.info``
FIRST, LAST = "jetrl/version_first", "jetrl/version_last"


@dataclass
class Seen:
    """Versions in which the requests of one sample were served; 0 until there is one."""

    first: int = 0
    last: int = 0

    def note(self, version: int) -> None:
        """A request began, or tokens of it came, under this version."""
        self.first = self.first or version
        self.last = version


_sample: ContextVar[Seen | None] = ContextVar("jetrl_sample", default=None)


@while_active
def collective_rpc(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``AsyncLLM.collective_rpc``: the end of a weight sync is the beginning of a version."""

    async def collective_rpc(self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
        result = await original(self, method, timeout, args, kwargs)
        order = decode(args[0]) if method == "update_weight" and args else None
        if order is not None and order["op"] == "end":
            ENGINE.version = int(order["version"])
        return result

    return collective_rpc


def generate(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``AsyncLLM.generate``: an output belongs to the version in force when it comes."""

    async def generate(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        seen = _sample.get()
        if seen is not None:
            seen.note(ENGINE.version)
        async for output in original(self, *args, **kwargs):
            if seen is not None:
                seen.note(ENGINE.version)
            yield output

    return generate


@while_active
def execute(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the agent executors' ``execute``: one sample, of one request or of several turns."""

    async def execute(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen = Seen()
        token = _sample.set(seen)
        try:
            sample = await original(self, *args, **kwargs)
        finally:
            _sample.reset(token)
        if seen.last:  # without a version the engine was never synced by us
            sample["extra_logs"] = {**(sample.get("extra_logs") or {}), FIRST: seen.first, LAST: seen.last}
        return sample

    return execute
