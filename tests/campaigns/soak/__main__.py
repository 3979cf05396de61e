"""Run the soak: ``make soak``, or ``python -m tests.campaigns.soak [verl|openrlhf] [--steps N]``.

A run of a thousand steps with a weight sync each, watched from outside; then the last three tenths again, killed after three
random steps and resumed each time: these are new processes, with whose seconds those of the old ones are compared. What is
measured goes to build/soak, as JSON and as pictures; a framework that is there is not run again. Exit status 1 if a figure grows,
a token differs, or the resumed run ends with other weights.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.campaigns.faults.runs import wait_until_gone
from tests.campaigns.soak.figures import growths, picture, rows
from tests.campaigns.soak.watch import Watch
from tests.seeded_runs import SeededRuns

OUT = Path(__file__).parents[3] / "build" / "soak"
#: what a step's line looks like in the framework's log
STEP = {"verl": r"training/global_step:(\d+)", "openrlhf": r"Global step (\d+): \{"}
#: slow enough that samples go on changing for a thousand steps
RATE = {"verl": ["actor_rollout_ref.actor.optim.lr=1e-5"], "openrlhf": ["--actor.adam.lr", "1e-5"]}
KILLS, LONGEST = 3, 6 * 3600.0
#: Ray's GCS remembers the last 100,000 tasks, 50 MiB in a thousand steps; with fewer it is full, and flat, early
ENVIRON = {"RAY_task_events_max_num_task_in_gcs": "1000"}


def soak(framework: str, steps: int, seed: int, folder: Path) -> dict[str, Any]:
    """Run the framework's task undisturbed, then killed and resumed. Returns what was seen, as JSON."""
    save_every = max(1, steps // 20)
    runs = SeededRuns(framework, folder, steps, save_every)
    start = functools.partial(runs.run, **ENVIRON)
    seen: dict[str, Any] = {"framework": framework, "steps": steps}
    whole = folder / "whole"
    run = start(whole, *RATE[framework])
    with Watch(run, str(whole), STEP[framework]) as watch:
        seen["status"] = run.wait(LONGEST)
    shutil.copy(run.log, OUT / f"{framework}.log")
    if seen["status"]:
        raise SystemExit(f"the undisturbed run of {framework} ended with {seen['status']}: {run.failure}")
    shares = [step.get("jetrl/bit_equal_fraction", math.nan) for step in run.metrics()]
    seen.update(watch.as_json(), shares=len(shares), equal=all(share == 1.0 for share in shares))
    seen["tokens"] = int(sum(step.get("jetrl/tokens", 0) for step in run.metrics()))
    print(f"{framework}: {len(shares)} steps, {seen['tokens']:,} tokens, all equal: {seen['equal']}", flush=True)

    broken, seen["killed"], seen["resumed"] = folder / "broken", [], []
    begin = steps * 7 // 10 // save_every * save_every
    runs.rewind(whole, broken, begin)
    kills = sorted(random.Random(seed).sample(range(begin + 1, steps), KILLS))
    for kill in kills:
        begun = runs.completed(broken)
        run = start(broken, *RATE[framework])
        with Watch(run, str(broken), STEP[framework]) as watch:
            run.wait_for(re.compile(STEP[framework].replace(r"(\d+)", str(kill))).search, LONGEST)
        run.stop()
        seen["resumed"].append(watch.as_json())
        seen["killed"].append({"at": kill, "resumed_from": begun, "left": wait_until_gone(str(broken))})
        print(f"{framework}: killed after step {kill}", flush=True)
    run = start(broken, *RATE[framework])
    with Watch(run, str(broken), STEP[framework]) as watch:
        status = run.wait(LONGEST)
    seen["resumed"].append(watch.as_json())
    if status:
        raise SystemExit(f"the resumed run of {framework} failed: {run.failure}")
    expected, found = runs.checkpoint(whole, steps), runs.checkpoint(broken, steps)
    seen["same"] = len(expected) == len(found) and all(map(torch.equal, expected, found))
    return seen


def report(seen: dict[str, Any]) -> bool:
    """Print what was seen and draw it. Returns whether all is well."""
    found = list(growths(seen))
    picture(seen, f"{seen['framework']}: {seen['steps']:,} steps with a weight sync each", OUT / f"{seen['framework']}.png")
    print("\n".join(rows(found)))
    kills = ", ".join(str(kill["at"]) for kill in seen["killed"])
    weights = "the same" if seen["same"] else "OTHER"
    print(f"{seen['shares']:,} steps, {seen['tokens']:,} tokens, all bit-equal: {seen['equal']}")
    print(f"killed after steps {kills} and resumed: {weights} weights")
    gone = not any(kill["left"] for kill in seen["killed"])
    return gone and seen["equal"] and seen["same"] and seen["shares"] == seen["steps"] and all(one.flat for _, one in found)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak")
    parser.add_argument("frameworks", nargs="*", choices=["verl", "openrlhf", []], metavar="verl|openrlhf")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="decides the steps in which a run is killed")
    options = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    good = True
    for framework in options.frameworks or ["verl", "openrlhf"]:
        kept = OUT / f"{framework}.json"
        if not kept.exists():
            folder = Path(tempfile.mkdtemp(prefix="jf", dir="/tmp"))
            try:
                kept.write_text(json.dumps(soak(framework, options.steps, options.seed, folder)))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        good &= report(json.loads(kept.read_text()))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
