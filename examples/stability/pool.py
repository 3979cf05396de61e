"""The questions of the sanity test: those that the initial model solves in 20 to 80% of its answers (arXiv 2510.26788, §4).

``python -m examples.stability.pool --out FILE`` writes their positions in the training split.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from examples.stability.loop import Questions
from examples.words import CHECKPOINT, TASK

LOW, HIGH = 0.2, 0.8


def choose(questions: int, answers: int, seed: int) -> list[int]:
    """Positions of those among the first ``questions`` of the training split whose share of right answers is within bounds."""
    import jetrl_patch
    from examples.stability.arms import Arm, Setting
    from examples.stability.policy import Policy
    from examples.stability.rollout import Rollout

    config = Arm(precision="bf16").config
    jetrl_patch.enable(config)
    asked, rollout = Questions(TASK, Setting().response_tokens), Rollout(str(CHECKPOINT), seed)
    policy = Policy(str(CHECKPOINT), learning_rate=0.0)
    rollout.sync(policy.source, policy.weights())
    _, right = asked.sample(rollout, asked.train[:questions], answers, 1.0, seed)
    shares = [sum(right[i : i + answers]) / answers for i in range(0, len(right), answers)]
    return [i for i, share in enumerate(shares) if LOW <= share <= HIGH]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=2000)
    parser.add_argument("--answers", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    args.out.write_text(json.dumps(choose(args.questions, args.answers, args.seed)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
