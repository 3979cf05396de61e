"""Require the same plugin in the other processes of a run: ranks that no driver has started, and workers of a rollout engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from jetrl_patch.config import Config
from jetrl_patch.errors import NotPatchedError, SyncError, explain
from jetrl_patch.patching.identity import identity
from jetrl_patch.trainer.rules import require_same

#: how this module's keys in the process group's store begin
_PREFIX = "jetrl_patch"


def require_same_ranks(config: Config, seconds: float) -> None:
    """Wait until all ranks of the default process group have said which plugin and settings they have. Nothing without a group.

    Through the group's store: an unpatched rank would answer a collective with data of its own.

    Raises NotPatchedError if a rank says nothing in time, ConflictError if its version or a setting differs.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return
    store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    call = store.add(f"{_PREFIX}/{rank}/calls", 1)  # a process may build several trainers
    keys = [f"{_PREFIX}/{call}/{other}" for other in range(size)]
    own = {"jetrl_patch": identity(), **config.to_env()}
    store.set(keys[rank], json.dumps(own))
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except RuntimeError as error:  # torch's DistStoreError is one
        silent = ", ".join(str(other) for other, key in enumerate(keys) if not store.check([key]))
        required, found = "jetrl_patch in every rank", f"no word from rank {silent} in {seconds:g} s"
        fix = "set the JETRL_* variables, or call jetrl_patch.enable(), in all of them"
        raise NotPatchedError(explain("ranks of this run", required=required, found=found, fix=fix)) from error
    for other, key in enumerate(keys):
        require_same(f"rank {other}", required=own, found=json.loads(store.get(key)))


def require_same_workers(answers: Sequence[Mapping[str, Any]], config: Config, version: int | None) -> None:
    """Compare what workers answer to "begin" (``sync.orders.obey``) with the run's settings and its last sync, before any byte.

    ``version`` is the number of the trainer's last sync; None if it has sent none to these workers. A worker that serves nothing
    after a failed sync did not sample from old weights, and this sync repairs it.

    Raises ConflictError for other settings, SyncError for other weights.
    """
    for answer in answers:
        who = f"a vLLM worker (pid {answer['pid']} on {answer['node']})"
        require_same(who, required=config.to_env(), found=answer["config"])
        if version is not None and answer["serves"] and answer["version"] != version:
            raise SyncError(
                f"{who} is stale: it serves the weights of sync {answer['version']}, but the last sync was {version}. It "
                "was restarted or missed a sync, and has since sampled from those weights. Restart the run."
            )
