"""What a trainer does on a GPU besides the plain step: no CPU tensor, wrong dtype or hidden wait, and the expected kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cuda_double.test_trainer_step import run

ATTENTION_BACKWARD = {"row_sums_kernel", "dq_kernel", "dkdv_kernel"}
#: part -> some of its launches. The parts of one group run in one process, in this order
GROUPS: tuple[dict[str, set[str]], ...] = (
    {"auto": {"fprop_kernel", "attention_kernel", "cuBLASLt", *ATTENTION_BACKWARD}},
    {
        "fp8 cache": {"DeepGEMM", "attention_kernel", "bf16_gemm_kernel", *ATTENTION_BACKWARD},
        "linear": {"DeepGEMM", "norm_rows_kernel", "rotary_pair_kernel"},
        "adapters": {"merge_kernel", "DeepGEMM", "FlashAttention-3"},
        "sharded": {"DeepGEMM", "cuBLASLt", "FlashAttention-3"},
        "gathered": {"DeepGEMM", "cuBLASLt", "transpose_kernel"},
        "scored": {"bf16_gemm_kernel", "log_prob_backward_kernel"},
        "seen": {"bf16_gemm_kernel", "attention_kernel"},
    },
    {
        "synced": {"weight_kernel", "digest_kernel"},
        "trials": {"DeepGEMM", "fprop_kernel", "cuBLASLt", "grouped_kernel", "store_kernel", "decode_kernel"},
    },
)
#: how often the host waits. One audit for each optimizer step; in the tower for each block and pass; in a sync for the digests of
#: two streams, and for figures and shares of the monitor. Trials wait for each comparison
WAITS = {"sharded": 1, "seen": 4, "synced": 4}


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: next(iter(group)))
def test_parts(library: Path, group: dict[str, set[str]]):
    launched = json.loads(run("trainer_parts", library, *group))
    for part, kernels in group.items():
        assert launched[part].keys() >= kernels, (part, sorted(launched[part]))
        assert part == "trials" or launched[part].get("waits", 0) == WAITS.get(part, 0), (part, launched[part])
    if "sharded" in launched:  # once for each weight in two micro-batches with recomputation, and one audit for each of these
        assert (launched["sharded"]["weight_kernel"], launched["gathered"]["weight_kernel"]) == (21 + 2, 15 + 6 * 4)
