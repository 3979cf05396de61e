"""Tensor parallelism: the order of partial sums, and the bytes on every rank. Real workers in processes of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import jetrl_patch
from jetrl_patch.parity.modes import Job

from .test_exact import assert_equal, run
from .test_weights import expected, stream

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.parametrize(
    ("variant", "tp", "settings"),
    [
        ("qwen3", 2, {}),
        ("llama3-rope", 2, {"exclude": ("o_proj",)}),  # BF16 partial sums follow the same order
        ("tp4", 4, {}),  # two KV heads on four ranks: replicas
        ("qwen2", 4, {"on_cut": "bf16"}),  # four heads of 64 on four ranks cut o_proj's blocks
        ("llama-odd", 2, {"on_cut": "bf16"}),  # 1,000 columns of down_proj on two ranks, with a bias
        *((family, 2, {}) for family in ("mistral", "seed_oss", "smollm3", "granite")),
    ],
)
def test_log_probs_are_equal(
    checkpoint: Callable[..., str], engine: Callable[..., Any], variant: str, tp: int, settings: dict[str, Any]
) -> None:
    jetrl_patch.enable(precision="fp8-unified", **settings)
    job = Job(model=checkpoint(variant), config=jetrl_patch.status().config, tp=tp)
    assert_equal(job, run(engine, job, [(1, 2), (7, 1), (32, 1)], 52), tokens=2000)


def receive(worker: Any, file: str) -> dict[str, int]:
    """Runs in each worker: the whole stream from a file."""
    import torch

    for item in torch.load(file):
        worker.jetrl_receiver.on_bucket([item])
    result: dict[str, int] = worker.jetrl_receiver.finish()
    return result


@pytest.mark.parametrize(("variant", "tp"), [("llama", 2), ("tp4", 4)])
def test_bytes_on_all_ranks(
    checkpoint: Callable[..., str], engine: Callable[..., Any], tmp_path: Path, variant: str, tp: int
) -> None:
    import torch

    from jetrl_patch.sync.manifest import Terms

    first, second = checkpoint(variant), checkpoint(variant, seed=1)
    jetrl_patch.enable(precision="fp8-unified")
    config = jetrl_patch.status().config
    llm = engine(Job(model=first, config=config, tp=tp))
    backend = llm.collective_rpc("jetrl_report", kwargs={"digests": False})[0]["backend"]
    terms = Terms(precision="fp8-unified", align="exact", scale_format="pow2", backend=backend)
    torch.save(stream(second, config, terms), tmp_path / "stream")
    receipts = llm.collective_rpc(receive, args=(str(tmp_path / "stream"),))
    assert len(receipts) == tp
    reports = llm.collective_rpc("jetrl_report")
    assert [report["tp_rank"] for report in reports] == list(range(tp))
    pieces = {tuple(piece) for report in reports for piece in report["digests"]}  # a replica counts once
    found: dict[str, int] = {}
    for name, *_, value in pieces:
        found[name] = (found.get(name, 0) + value) % 2**64
    assert found == expected(second, (), "pow2")


def test_a_worker_that_loaded_no_plugin_stops_the_engine(
    checkpoint: Callable[..., str], engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``VLLM_PLUGINS`` may omit ours: then the engine's process is patched and its workers are not."""
    jetrl_patch.enable(precision="fp8-unified")
    monkeypatch.setenv("VLLM_PLUGINS", "none_of_them")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    with pytest.raises(Exception, match=r"(?i)worker|initialization failed"):
        engine(Job(model=checkpoint("qwen3"), config=jetrl_patch.status().config, tp=2))
