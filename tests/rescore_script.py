"""Rescore samples of an asynchronous run, each with the checkpoint of the version that made it, and print the counts.

Arguments: a folder with ``samples-*.pt``; the last version of the initial model, and its folder; that of a later version, where
``{v}`` stands for how many versions later; the token that is banned at the first action (-1: none). A row of a file is the tokens
[T], the mask of the actions and the rollout's log-probs [T - 1], the version that made the sample, and the trainer's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def load(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    from jetrl_patch import session
    from jetrl_patch.trainer.prepare import prepare_model

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    prepare_model(model, session.active_config())
    return model


@torch.no_grad()
def score(model: Any, sequence: torch.Tensor, mask: torch.Tensor, stop: int) -> torch.Tensor:
    """Return log-probs [A] of one unpadded sequence [T], with ``stop`` banned at the first action if it is a token."""
    from jetrl_patch.exact.ops import token_log_probs

    logits = model(input_ids=sequence.unsqueeze(0), use_cache=False).logits[0].float()
    places = mask.nonzero().flatten()
    if stop >= 0:
        logits[places[0], stop] = -torch.inf
    return token_log_probs(logits[places], sequence[places + 1])


def main(samples: Path, initial: int, model: Path, checkpoints: str, stop: int) -> None:
    import jetrl_patch

    jetrl_patch.enable(precision="fp8-unified", platform="cpu")
    models: dict[int, Any] = {}
    tokens, equal, versions, late = 0, 0, set(), 0
    for file in sorted(samples.glob("samples-*.pt")):
        for sequence, mask, rollout, version, trainer in torch.load(file):
            if version not in models:
                models[version] = load(model if version <= initial else Path(checkpoints.format(v=version - initial)))
            found = score(models[version], sequence, mask, stop)
            tokens += len(found)
            equal += int((found.view(torch.int32) == rollout[mask.bool()].view(torch.int32)).sum())
            versions.add(version)
            late += version != trainer
    print(tokens, equal, len(versions), late)


def rescore(samples: Path, initial: int, model: Path, checkpoints: str, stop: int = -1) -> tuple[int, ...]:
    """Run ``main`` in a process of its own: number of tokens, of equal ones, of versions, of samples older than the trainer."""
    command = [sys.executable, "-m", "tests.rescore_script", *map(str, (samples, initial, model, checkpoints, stop))]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    return tuple(map(int, done.stdout.split()[-4:]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
