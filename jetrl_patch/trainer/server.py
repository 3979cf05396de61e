"""A vLLM server as the rollout: orders go through its ``/collective_rpc``, bytes over a group of the trainer and the workers."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterable
from typing import Any

from jetrl_patch import registry, session
from jetrl_patch.errors import ConfigError, JetrlError, NotPatchedError, explain
from jetrl_patch.sync.orders import POLL, Group, GroupWire, Task, encode, send_all
from jetrl_patch.sync.protocol import as_sync_error, silent
from jetrl_patch.sync.send import NamedTensor, pack
from jetrl_patch.trainer.ranks import require_same_workers

_START = "start it with `JETRL_PRECISION={} VLLM_SERVER_DEV_MODE=1 vllm serve ...`"


class Orders:
    """Calls of all workers of a server, by HTTP. One may take ``timeout`` seconds."""

    def __init__(self, url: str, timeout: float) -> None:
        self.url = url
        self.timeout = timeout

    def ask(self, op: str, **fields: Any) -> list[Any]:
        """The workers' answers to an order without data."""
        return self.wait(self.start(encode(op, **fields)))

    def start(self, order: str, size: int = 0) -> Task:
        """Post an order."""
        return Task(functools.partial(self._post, order))

    def wait(self, started: Task, moved: threading.Event | None = None) -> list[Any]:
        """As ``sync.orders.Orders.wait``."""
        end = time.monotonic() + self.timeout
        for event in (started.ended, *([] if moved is None else [moved])):
            while not event.wait(POLL):
                if time.monotonic() > end:
                    raise silent(f"the vLLM server at {self.url}", self.timeout)
            answers: list[Any] = started.result()  # a worker that has failed does not join the trainer's part
        return answers

    def world_size(self) -> int:
        """The ranks of all its engines."""
        return int(self._call("GET", "get_world_size")["world_size"])

    def drop_prefixes(self) -> None:
        """Have it drop its cached prefixes."""
        self._call("POST", "reset_prefix_cache")

    def _post(self, order: str) -> list[Any]:
        body = {"method": "jetrl_order", "args": [order], "timeout": self.timeout}
        answers = self._call("POST", "collective_rpc", json=body)["results"]
        for answer in answers:
            if "error" in answer:
                raise as_sync_error(RuntimeError(answer["error"]))
        return [answer["answer"] for answer in answers]

    def _call(self, method: str, endpoint: str, **body: Any) -> dict[str, Any]:
        """What a development endpoint replies; empty without a body. It is called once: an order must not come twice."""
        import requests

        reply = requests.request(method, f"{self.url}/{endpoint}", timeout=2 * self.timeout, **body)
        if reply.status_code != 200:
            raise self._refused(reply.status_code, reply.text)
        found: dict[str, Any] = reply.json() if reply.content else {}
        return found

    def _refused(self, status: int, text: str) -> JetrlError:
        what, fix = f"the vLLM server at {self.url}", _START.format(session.active_config().precision)
        if status == 404:
            return ConfigError(explain(what, required="its development endpoints", found="none", fix=fix))
        found = f"HTTP status {status} ({text.strip()[:200]})"
        return NotPatchedError(explain(what, required="workers with jetrl_patch", found=found, fix=fix))


class Server:
    """A ``vllm serve`` that was started with jetrl_patch, and the group that brings it weights.

    Args:
        url: where it listens, "http://host:8000" for instance.
        port: a free port of this machine, at which the server's workers join the trainer's group.
        rollout_tp: its tensor-parallel size, as in ``convert``.
        device: that of the weights: "cuda" with NCCL, "cpu" with gloo.
        setting: the user's name of ``rollout_tp``, for messages.

    Raises:
        ConfigError: it has no development endpoints, several engines, or another tensor-parallel size.
        NotPatchedError: it does not have the plugin. ConflictError: its settings differ.
        SyncError: its workers do not come into the group.
    """

    def __init__(self, url: str, port: int, *, rollout_tp: int = 1, device: Any = "cuda", setting: str = "rollout_tp") -> None:
        import torch
        from vllm.utils.network_utils import get_ip

        self._config, self._device = session.active_config(), torch.device(device)
        self._version: int | None = None
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._orders = Orders(url.rstrip("/"), self._config.sync_timeout)
        workers, size = self._begin(), self._orders.world_size()
        if workers != size:
            required, fix = "one engine", "start it without --data-parallel-size"
            raise ConfigError(explain(self._name(), required=required, found=f"{size} ranks, {workers} of which answer", fix=fix))
        if workers != rollout_tp:
            what, fix = f"{setting} with {self._name()}", f"set it to {workers}"
            raise ConfigError(explain(what, required=f"{workers}, as it has", found=str(rollout_tp), fix=fix))
        place = {"host": get_ip(), "port": port, "size": 1 + workers}
        joining = self._orders.start(encode("join", **place))
        joined = Task(lambda: registry.rollout().join(place["host"], port, 0, 1 + workers, self._device))
        self._orders.wait(joining, joined.ended)
        self._group: Group = joined.result()

    def _name(self) -> str:
        return f"the vLLM server at {self._orders.url}"

    def _begin(self) -> int:
        """Compare the workers with this run before any byte, and return how many answer."""
        workers = self._orders.ask("begin")
        require_same_workers(workers, self._config, self._version)
        return len(workers)

    def install(self, messages: Iterable[NamedTensor]) -> None:
        """Send the messages of a weight sync, and drop the prefixes that the server has cached.

        Raises SyncError or AuditError; the server then no longer generates.
        """
        self._begin()
        wire = GroupWire(self._orders, functools.partial(self._group.broadcast, src=0))
        send_all(wire, pack(messages, self._device))
        version = 1 + (self._version or 0)
        self._orders.ask("end", version=version)
        self._version = version
        self._orders.drop_prefixes()
