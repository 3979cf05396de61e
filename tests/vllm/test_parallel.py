"""Tensor parallelism: who adds partial sums, in which order, and the bytes on every rank. Real workers in their own processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import jetrl_patch
from jetrl_patch.measure.parity import Job

from ..fp8.thresholds import MISMATCH
from ..models import ONE_RECORD
from .test_exact import apart, assert_equal, prompts_of, run
from .test_weights import expected, stream

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.parametrize(
    ("variant", "tp", "settings"),
    [
        ("qwen3", 2, {}),
        ("llama-mx-tp", 2, {"scale_format": "mxfp8"}),
        ("llama3-rope", 2, {"exclude": ("o_proj",)}),  # BF16 partial sums follow the same order
        ("tp4", 4, {}),  # two KV heads on four ranks: replicas
        ("qwen2", 4, {"on_cut": "bf16"}),  # four heads of 64 on four ranks cut o_proj's blocks
        ("llama-odd", 2, {"on_cut": "bf16"}),  # 1,000 columns of down_proj on two ranks, with a bias
        *((family, 2, {}) for family in ONE_RECORD),
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


@pytest.mark.parametrize(
    ("variant", "tp", "scale_format"), [("llama", 2, "pow2"), ("tp4", 4, "pow2"), ("llama-mx-tp", 2, "mxfp8")]
)
def test_bytes_on_all_ranks(
    checkpoint: Callable[..., str], engine: Callable[..., Any], tmp_path: Path, variant: str, tp: int, scale_format: str
) -> None:
    import torch

    from jetrl_patch.sync.protocol import Terms

    first, second = checkpoint(variant), checkpoint(variant, seed=1)
    jetrl_patch.enable(precision="fp8-unified", scale_format=scale_format)
    config = jetrl_patch.status().config
    llm = engine(Job(model=first, config=config, tp=tp))
    backend = llm.collective_rpc("jetrl_report", kwargs={"digests": False})[0]["backend"]
    terms = Terms(precision="fp8-unified", align="exact", scale_format=scale_format, backend=backend)
    torch.save(stream(second, config, terms), tmp_path / "stream")
    receipts = llm.collective_rpc(receive, args=(str(tmp_path / "stream"),))
    assert len(receipts) == tp
    reports = llm.collective_rpc("jetrl_report")
    assert [report["tp_rank"] for report in reports] == list(range(tp))
    pieces = {tuple(piece) for report in reports for piece in report["digests"]}  # a replica counts once
    found: dict[str, int] = {}
    for name, *_, value in pieces:
        found[name] = (found.get(name, 0) + value) % 2**64
    assert found == expected(second, (), scale_format)


def test_a_worker_that_loaded_no_plugin_stops_the_engine(
    checkpoint: Callable[..., str], engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``VLLM_PLUGINS`` may omit ours: then the engine's process is patched and its workers are not."""
    jetrl_patch.enable(precision="fp8-unified")
    monkeypatch.setenv("VLLM_PLUGINS", "none_of_them")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    with pytest.raises(Exception, match=r"(?i)worker|initialization failed"):
        engine(Job(model=checkpoint("qwen3"), config=jetrl_patch.status().config, tp=2))


def count_sums(worker: Any) -> None:
    """Runs in each worker: count the sums over ranks of row-parallel linears, vLLM's and ours."""
    import vllm.model_executor.layers.fused_moe.runner.moe_runner as mixtures
    import vllm.model_executor.layers.linear as linears

    from jetrl_patch.adapters.vllm import ranks

    worker.jetrl_sums = {"linears": 0, "mixtures": 0, "gathers": 0, "slices": 0}

    def counted(place: Any, name: str, what: str) -> None:
        original = getattr(place, name)

        def call(*args: Any) -> Any:
            worker.jetrl_sums[what] += 1
            return original(*args)

        setattr(place, name, call)

    counted(linears, "tensor_model_parallel_all_reduce", "linears")
    counted(mixtures, "tensor_model_parallel_all_reduce", "mixtures")
    counted(ranks, "_gather", "gathers")
    counted(ranks, "_exchanged", "slices")


def sums(worker: Any) -> dict[str, int]:
    """Runs in each worker."""
    found: dict[str, int] = worker.jetrl_sums
    return found


@pytest.mark.parametrize(
    ("variant", "settings", "kind", "linears", "mixtures"),  # sums of a step: of three blocks
    [
        ("qwen3", {"precision": "fp8-unified", "align": "linear"}, "dense", 6, 0),
        ("llama3-rope", {"precision": "fp8-rollout"}, "dense", 6, 0),
        # with shared experts, which are added before the sum, and a dense block
        ("qwen2_moe-tp", {"precision": "fp8-unified", "align": "linear"}, "fp8-unified", 4, 2),
    ],
)
def test_without_equal_bits_vllm_adds_the_ranks_sums(
    checkpoint: Callable[..., str],
    engine: Callable[..., Any],
    variant: str,
    settings: dict[str, Any],
    kind: str,
    linears: int,
    mixtures: int,
) -> None:
    from jetrl_patch.adapters.vllm.sample import generate

    jetrl_patch.enable(**settings)
    job = Job(model=checkpoint(variant), config=jetrl_patch.status().config, tp=2)
    llm = engine(job)
    llm.collective_rpc(count_sums)
    samples = generate(llm, prompts_of(16, (1, 40)), 12, 1.0)
    first, second = llm.collective_rpc(sums)
    assert first == second and first["gathers"] == 0 and first["linears"] > 0
    steps, rest = divmod(first["linears"], linears)
    assert rest == 0 and first["mixtures"] == steps * mixtures
    assert 0 < apart(job, samples).logp_abs_diff_mean < MISMATCH[kind]


def give_double(worker: Any, **settings: Any) -> bool:
    """Runs in each worker: vLLM's custom all-reduce over gloo, and the engine's choice. Returns whether it was chosen."""
    import torch
    from vllm.distributed import get_tp_group

    from jetrl_patch.adapters.vllm import ranks

    from .all_reduce_double import AllReduceDouble

    group = get_tp_group()

    def exchange(mine: Any) -> list[Any]:
        parts = [torch.empty_like(mine) for _ in range(group.world_size)]
        torch.distributed.all_gather(parts, mine, group=group.device_group)
        return parts

    changes = settings if group.rank_in_group == 1 else {}
    double: Any = AllReduceDouble(exchange, group.rank_in_group, group.world_size, **changes)
    device: Any = group.device_communicator
    device.ca_comm, worker.jetrl_double = double, double
    ranks.current_platform = SimpleNamespace(is_cuda=lambda: True, device_type="cuda")  # type: ignore[assignment]
    ranks.choose_sum(torch.device("cpu"))
    double.kernels.clear()
    return ranks._proven is double


def launched(worker: Any) -> list[int]:
    """Runs in each worker: the stages of the kernels."""
    found: list[int] = worker.jetrl_double.kernels
    return found


def prefer_slices(worker: Any) -> None:
    """Runs in each worker."""
    from jetrl_patch.adapters.vllm import ranks

    ranks.SAVED = 0


@pytest.mark.parametrize("variant", ["qwen3", "qwen2_moe-tp"])
def test_with_equal_bits_ranks_add_in_one_shot_or_gather_or_by_slices(
    checkpoint: Callable[..., str], engine: Callable[..., Any], variant: str
) -> None:
    """A CPU has no custom all-reduce. With a double of it the bits stay, and with one that flips a bit the ranks gather again."""
    from jetrl_patch.adapters.vllm.sample import generate

    jetrl_patch.enable(precision="fp8-unified")
    job = Job(model=checkpoint(variant), config=jetrl_patch.status().config, tp=2)
    llm = engine(job)
    llm.collective_rpc(count_sums)

    def added() -> dict[str, int]:
        before, other = llm.collective_rpc(sums)
        assert before == other
        assert_equal(job, generate(llm, prompts_of(4, (1, 40)), 8, 1.0), tokens=30)
        after, other = llm.collective_rpc(sums)
        assert after == other
        return {key: after[key] - before[key] for key in after}

    plain = added()
    assert plain["linears"] == plain["mixtures"] == plain["slices"] == 0 and plain["gathers"] > 0
    assert llm.collective_rpc(give_double) == [True, True]
    assert added() == dict.fromkeys(plain, 0)
    assert llm.collective_rpc(launched) == [[1] * plain["gathers"]] * 2
    assert llm.collective_rpc(give_double, kwargs={"flips": True}) == [False, False]
    assert added() == plain
    assert llm.collective_rpc(launched) == [[], []]
    llm.collective_rpc(prefer_slices)
    assert added() == plain | {"gathers": 0, "slices": plain["gathers"]}
