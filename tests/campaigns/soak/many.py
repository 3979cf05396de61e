"""The sync under load: ``python -m tests.campaigns.soak.many [--syncs N] [--engines N] [--ranks N]``.

Eight training ranks sync to sixteen real vLLM engines on one machine, over OpenRLHF's colocated transport, two thousand times.
That takes 14 GB; fewer engines take less.
Each sync sends different weights. Now and then the bytes in each engine are compared with the trainer's, and all engines must
generate the same. The processes are watched as in the other soaks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.campaigns.soak.__main__ import ENVIRON, OUT
from tests.campaigns.soak.figures import growths, picture, rows
from tests.campaigns.soak.watch import Watch

SETTINGS = {"JETRL_PRECISION": "fp8-unified", "JETRL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}
#: makes glibc return freed memory at once. By default it keeps some, up to 40 MiB in each rank, which varies
RETURNED = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
#: syncs between two checks of every engine, and the seconds that one sync may take
LOOK, PATIENCE = 50, 300.0
PATTERN = r"sync (\d+) done"


class Rank:
    """One training rank, in a process of its own."""

    def __init__(self, rank: int, ranks: int, store: str, model: str) -> None:
        import torch.distributed as dist

        import jetrl_patch
        from tests.campaigns.faults.roads import Trainer

        jetrl_patch.enable()
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        self.trainer = Trainer(model, jetrl_patch.status().config)

    def reach(self, engines: list[Any]) -> None:
        from tests.campaigns.faults.roads import OpenrlhfIpc

        self.road = OpenrlhfIpc(engines[0], self.trainer)
        self.road.actor.vllm_engines = engines

    def sync(self, version: int) -> None:
        self.trainer.take(version)
        self.road.sync()

    def sent(self, version: int) -> dict[str, int]:
        """Digest of everything that a sync of this version sends."""
        from jetrl_patch.sync.digest import digest

        return {name: digest(tensor) for name, tensor in self.trainer.messages(version)}


def run(syncs: int, number_of_engines: int, number_of_ranks: int, folder: Path, log: Path) -> bool:
    """Start the processes and sync. Returns whether every look found the trainer's bytes and one answer in all engines."""
    import ray

    from tests import models
    from tests.campaigns.faults.rollout import start

    model = models.variant(folder / "model", "qwen3", 0)
    engines = [start("openrlhf", str(model), SETTINGS) for _ in range(number_of_engines)]
    ray.get([engine.pid.remote() for engine in engines])
    options: dict[str, Any] = {"runtime_env": {"env_vars": {**SETTINGS, "PYTHONPATH": os.getcwd()}}, "num_cpus": 1}
    rank_of = ray.remote(Rank).options(**options)
    ranks = [rank_of.remote(i, number_of_ranks, str(folder / "store"), str(model)) for i in range(number_of_ranks)]
    ray.get([rank.reach.remote(engines) for rank in ranks])
    sent, good = [ray.get(ranks[0].sent.remote(version)) for version in (0, 1)], True
    with log.open("a") as lines:
        for number in range(1, syncs + 1):
            ray.get([rank.sync.remote(number % 2) for rank in ranks], timeout=PATIENCE)
            print(f"sync {number} done", file=lines, flush=True)
            if number % LOOK in (0, 1):
                held = ray.get([engine.quantized.remote() for engine in engines])
                answers = ray.get([engine.generate.remote() for engine in engines])
                right = all(one and one.items() <= sent[number % 2].items() for one in held)
                good = good and right and all(answer == answers[0] for answer in answers)
                print(f"sync {number}: bytes as sent: {right}; one answer: {len(set(map(str, answers))) == 1}", flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.soak.many")
    parser.add_argument("--syncs", type=int, default=2000)
    parser.add_argument("--engines", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=8)
    options = parser.parse_args()
    syncs, engines, ranks = options.syncs, options.engines, options.ranks
    OUT.mkdir(parents=True, exist_ok=True)
    import ray

    import jetrl_patch

    with tempfile.TemporaryDirectory(prefix="jf", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        os.environ.update(SETTINGS, **ENVIRON, **RETURNED, TESTED_RUN=name)
        jetrl_patch.enable()
        log = folder / "log"
        log.touch()
        quiet = {"include_dashboard": False, "log_to_driver": False}
        ray.init(num_cpus=engines + ranks, _temp_dir=name, object_store_memory=200_000_000, **quiet)
        begin = time.monotonic()
        try:
            with Watch(SimpleNamespace(log=log), name, PATTERN) as watch:
                good = run(syncs, engines, ranks, folder, log)
        finally:
            ray.shutdown()
    seen = watch.as_json()
    (OUT / "many.json").write_text(json.dumps(seen))
    found = list(growths(seen))
    picture(seen, f"{syncs:,} syncs of {ranks} training ranks to {engines} engines", OUT / "many.png")
    print("\n".join(rows(found)))
    print(f"{syncs:,} syncs in {time.monotonic() - begin:.0f} s; bytes and answers right: {good}")
    return 0 if good and all(one.flat for _, one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
