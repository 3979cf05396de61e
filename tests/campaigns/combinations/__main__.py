"""Judge random combinations, and run some of them for real: ``make combinations``.

Every combination is judged in one process, as the trainer judges it before it loads a model. Of those that are accepted, the
first ones run two steps for real: in exact mode every token must be equal, in the others the run must reach its end. Of those
that are refused, the first ones run too, and must end with the same error before the engine is built. Verdicts are kept in
build/combinations.json, and a later call continues there. Exit status 1 if one is wrong: its seed then belongs in
``test_seeds.py``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from jetrl_patch.config import Config
from scripts.tables import markdown
from tests.campaigns import kept
from tests.campaigns.combinations.draw import Combination, combination
from tests.trl import run_python

NAME = "combinations"
JUDGE, SCRIPT = Path(__file__).with_name("judge.py"), kept.ROOT / "tests" / "trl" / "script.py"
#: TRL's file that builds the engine; a refusal comes before
_ENGINE = "vllm_generation.py"


def judged(cases: list[Combination]) -> dict[int, tuple[str, str]]:
    """Seed -> who refuses the combination and why."""
    given = json.dumps([[case.plugin, case.given] for case in cases])
    with tempfile.TemporaryDirectory() as folder:
        done = run_python(Path(folder), str(JUDGE), given=given)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return {case.seed: tuple(verdict) for case, verdict in zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True)}


def run(case: Combination) -> tuple[str, list[dict[str, Any]], float]:
    """The end of a run's errors (empty if it succeeds), its log, and its seconds."""
    with tempfile.TemporaryDirectory() as name:
        folder, begin = Path(name), time.monotonic()
        given = {**case.given, "max_steps": 2}
        done = run_python(folder, str(SCRIPT), json.dumps(case.plugin), json.dumps(given))
        log = json.loads((folder / "log.json").read_text()) if (folder / "log.json").is_file() else []
    return done.stderr[-3000:] if done.returncode else "", log, time.monotonic() - begin


def wrong(case: Combination, error: str, log: list[dict[str, Any]]) -> str:
    """What is wrong with a run that was accepted; empty if nothing."""
    if error:
        lines = [line for line in error.splitlines() if "Error: " in line]
        return f"accepted, but it ended: {(lines or error.splitlines())[-1][:300]}"
    compared = [row["jetrl/bit_equal_fraction"] for row in log if row.get("jetrl/tokens")]
    if not Config(**case.plugin).exact:
        return "" if compared else "nothing was compared"
    return "" if compared and set(compared) == {1.0} else f"not exact: bit-equal fractions {compared}"


def wrong_refusal(said: str, error: str, log: list[dict[str, Any]]) -> str:
    """What is wrong with a run that was refused as ``said``; empty if nothing."""
    if said.split(". ")[0] not in " ".join(error.split()):
        return f"the run says something else: {error.splitlines()[-1][:300] if error else 'nothing'}"
    return "the error came after the engine" if log or _ENGINE in error else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=300, help="how many are judged")
    parser.add_argument("--runs", type=int, default=40, help="how many of those that are accepted run for real")
    parser.add_argument("--refusals", type=int, default=8, help="how many of those that are refused run for real")
    args = parser.parse_args()
    cases = [combination(seed) for seed in range(args.first, args.first + args.seeds)]
    verdicts = judged(cases)
    counted = Counter(who or "accepted" for who, _ in verdicts.values())
    accepted = [case for case in cases if not verdicts[case.seed][0]][: args.runs]
    refused = [case for case in cases if verdicts[case.seed][0] == "plugin"][: args.refusals]
    done = kept.read(NAME)
    for case in (*accepted, *refused):
        if case.key not in done:
            error, log, seconds = run(case)
            said = verdicts[case.seed][1]
            done[case.key] = wrong_refusal(said, error, log) if said else wrong(case, error, log)
            print(f"seed {case.seed}, {seconds:.0f} s: {done[case.key] or 'right'}", flush=True)
            kept.write(NAME, done)
    bad = [case for case in (*accepted, *refused) if done[case.key]]
    unstable = [seed for seed, (who, _) in verdicts.items() if who == "unstable"]
    for case in bad:
        print(f"WRONG seed {case.seed}: {case.plugin} {case.given}: {done[case.key]}")
    row = {"judged": len(cases), **counted, "run": len(accepted), "refusals run": len(refused), "wrong": len(bad) + len(unstable)}
    print(markdown([row]))
    return 1 if bad or unstable else 0


if __name__ == "__main__":
    sys.exit(main())
