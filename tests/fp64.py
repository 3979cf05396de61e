"""A run whose processes compare every log-softmax of the trainer with FP64's, over what each token was drawn from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

#: processes import it as ``sitecustomize``
_HOOK = """
import json, os, wrapt

@wrapt.when_imported("jetrl_patch.exact.logprob")
def _(module):
    original = module.log_softmax

    def log_softmax(x, temperature):
        import torch

        found = original(x, temperature)
        kept = x > -1e29
        reference = torch.log_softmax((x.double() / temperature).masked_fill(~kept, -float("inf")), -1)
        line = {"rows": len(x), "kept": int(kept.sum()), "apart": float((found.double() - reference)[kept].abs().max())}
        with open(os.path.join(os.environ["IN_FP64"], f"fp64-{os.getpid()}.jsonl"), "a") as file:
            file.write(json.dumps(line) + chr(10))
        return found

    module.log_softmax = log_softmax
"""


class InFp64(NamedTuple):
    """What a run's processes saw.

    Attributes:
        rows: how many distributions. kept: how many tokens one has on average.
        apart: the largest difference of a log-prob.
    """

    rows: int
    kept: float
    apart: float


def environ(folder: Path) -> dict[str, str]:
    """Variables of a run that writes into ``folder`` what its processes see."""
    (folder / "sitecustomize.py").write_text(_HOOK)
    return {"PYTHONPATH": str(folder), "IN_FP64": str(folder)}


def seen(folder: Path) -> InFp64:
    lines = [json.loads(line) for file in folder.glob("fp64-*.jsonl") for line in file.read_text().splitlines()]
    rows = sum(line["rows"] for line in lines)
    return InFp64(rows, sum(line["kept"] for line in lines) / rows, max(line["apart"] for line in lines))
