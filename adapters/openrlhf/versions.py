"""Record which weights made a sample: the number of the engine's last weight sync at the first and last token.

This runs in OpenRLHF's ``RolloutRayActor``, which passes weight syncs and requests to the same vLLM client. The end of a
sync sets the version, and each request records it as its tokens arrive. A sample whose two versions differ is a partial
rollout, made by more than one version.
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
    """First and last version that served the requests of one sample; 0 before the first sync."""

    first: int = 0
    last: int = 0

    def note(self, version: int) -> None:
        """Record that a request began, or received tokens, under this version."""
        self.first = self.first or version
        self.last = version


_sample: ContextVar[Seen | None] = ContextVar("jetrl_sample", default=None)


@while_active
def collective_rpc(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``AsyncLLM.collective_rpc``: the end of a weight sync starts a new version."""

    async def collective_rpc(self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
        result = await original(self, method, timeout, args, kwargs)
        order = decode(args[0]) if method == "update_weight" and args else None
        if order is not None and order["op"] == "end":
            ENGINE.version = int(order["version"])
        return result

    return collective_rpc


def generate(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``AsyncLLM.generate``: an output belongs to the version that is current when it arrives."""

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
    """Wrap the agent executors' ``execute``, which makes one sample from one or more requests."""

    async def execute(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen = Seen()
        token = _sample.set(seen)
        try:
            sample = await original(self, *args, **kwargs)
        finally:
            _sample.reset(token)
        if seen.last:  # 0 if the plugin has never synced this engine
            sample["extra_logs"] = {**(sample.get("extra_logs") or {}), FIRST: seen.first, LAST: seen.last}
        return sample

    return execute
