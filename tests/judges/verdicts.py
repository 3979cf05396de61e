"""What others say of a recorded run: WORKSPACE HEAD. Prints JSON.

The record is martingale's: the log-prob of each token at its rollout, and the trainer's. Its checker shares no code with the
recorder and verifies the record. Its doctor reads the mismatch of tokens without an update in between. molt-rl's metric compares
the same pairs bit by bit.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from checker.verify_tokens import verify_export
from martingale.diagnostics import decompose
from martingale.record import TokenLedger
from martingale.record.bits import parse_bits
from molt.models.utils import mismatch_metrics


def numbers(records: Any) -> torch.Tensor:
    """The log-probs of records: ``[tokens]``."""
    return torch.tensor([parse_bits(record.logprob_bits)[1] for record in records], dtype=torch.float32)


workspace, head = sys.argv[1:]
ledger = TokenLedger(Path(workspace) / "tokens.db", readonly=True)
with tempfile.TemporaryDirectory() as folder:
    checked = verify_export(ledger.export_for_checker(Path(folder) / "export"), expected_head=head)
found = decompose(ledger)
sequences = list(ledger.all_sequences())
rollout = torch.cat([numbers(one.tokens) for one in sequences])
trainer = torch.cat([numbers(ledger.scores_for(one.digest)) for one in sequences])
metrics = mismatch_metrics(rollout, trainer, torch.ones_like(rollout))
print(
    json.dumps(
        {
            "errors": checked["errors"], "anchored": checked["anchored"], "tokens": checked["n_tokens"], "lags": found["lags"],
            "compared": found["lag0_floor"]["n_tokens"], "withheld": found["lag0_floor_withheld"],
            "mean": found["lag0_floor"]["mean_abs_log_ratio"], "max": found["lag0_floor"]["max_abs_log_ratio"],
            **{name: float(value) for name, value in metrics.items()},
        }
    )
)  # fmt: skip
