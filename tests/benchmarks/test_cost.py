"""The estimate of a step's cost: the page is up to date, each part has the right effect, and a measurement replaces it."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import cost as parts
from benchmarks import measured as measurements
from benchmarks.cost import Load, one_token, rollout, step, sum_over_ranks, training
from benchmarks.hopper import kernels, plan, record
from benchmarks.hopper import parity as modes
from benchmarks.hopper import training as trained
from benchmarks.measured import measured
from benchmarks.scaling import EXACT, NAMED, OURS, PAGE, page, worse
from benchmarks.shapes import gemm_seconds

WAYS = {way.name: way for way in parts.WAYS}
NETS = {net.block.name: net for net in parts.NETS}
LOAD = Load(samples=256, prompt=128, longest=2048)


def test_the_page_is_what_the_script_computes():
    assert PAGE.read_text() == page()


def test_parameters_are_those_of_the_models():
    billions = {name: net.matrices(net.experts) / 1e9 for name, net in NETS.items()}
    small = {"Qwen2.5-7B": 6.5, "Qwen3-8B": 6.9, "Llama-3.1-8B": 7.0}
    known = {**small, "Qwen3-32B": 31.0, "Llama-3.1-70B": 68.5, "Qwen3-30B-A3B": 29.9}
    assert billions == pytest.approx(known, rel=0.02)


def test_a_forward_pass_is_what_its_products_take():
    """With short sequences, almost all FLOPs are in the linears: two for each parameter and token."""
    net, lengths = NETS["Llama-3.1-70B"], np.full(100, 64)
    products = 2 * lengths.sum() * net.matrices(net.experts) / (parts.H100.peaks.bf16 * 1e12)
    assert products < training(net, WAYS["bf16"], lengths, parts.H100)[0] < 1.25 * products


def test_one_token_of_one_sequence_reads_every_weight_once():
    net = NETS["Qwen3-8B"]
    size = 2 * (net.matrices(net.experts) + net.vocabulary * net.block.hidden)
    assert one_token(net, WAYS["bf16"], 1, 1, parts.H100, 1) == pytest.approx(size / (parts.H100.peaks.bandwidth * 1e9), rel=0.01)


def test_experts_that_no_token_uses_are_not_read():
    net = NETS["Qwen3-30B-A3B"]
    few, many = (one_token(net, WAYS["bf16"], rows, 1, parts.H100, 1) for rows in (1, 512))
    assert 5 * few < many


def test_what_a_mode_does_not_change_costs_the_same():
    bf16, mixed, exact, with_pass = (
        step(NETS["Qwen3-8B"], WAYS[name], LOAD, parts.H100) for name in ("bf16", "fp8-rollout", "exact", "exact, with the pass")
    )
    assert mixed[1:3] == bf16[1:3]
    on_one_rank = (rollout(NETS["Qwen3-8B"], WAYS[name], LOAD, parts.H100, 1) for name in ("fp8-rollout", "bf16"))
    assert next(on_one_rank) < next(on_one_rank)
    assert exact.old_log_probs == 0 and (with_pass.rollout, with_pass.update) == (exact.rollout, exact.update)


@pytest.mark.parametrize("net", parts.NETS, ids=lambda net: net.block.name)
def test_each_mode_has_its_own_best_parallelism(net):
    """Each mode is compared at its best parallelism."""
    for way in parts.WAYS[:3]:
        found = step(net, way, LOAD, parts.H100)
        every = {tp: rollout(net, way, LOAD, parts.H100, tp) for tp in net.sizes(way.samples)}
        assert found.rollout == min(every.values()) == every[found.tp] and len(every) > 1


def test_sizes_cut_no_head_and_no_block():
    """768 inner features are six blocks of 128; BF16 has none to cut."""
    net = NETS["Qwen3-30B-A3B"]
    assert list(net.sizes(fp8=False)) == [1, 2, 4] and list(net.sizes(fp8=True)) == [1, 2]


def test_a_model_that_does_not_fit_is_an_error():
    big = NETS["Llama-3.1-70B"]
    assert rollout(big, WAYS["bf16"], LOAD, parts.H100, 1) == float("inf") and step(big, WAYS["bf16"], LOAD, parts.H100).tp > 2
    with pytest.raises(ValueError, match=r"Llama-3\.1-70B leaves no room"):
        step(big, WAYS["bf16"], LOAD, parts.H100._replace(memory=1e9))


def test_a_sum_over_ranks_moves_what_its_mode_moves():
    """BF16 all-reduces two bytes. Exact mode takes the way of the fewest bytes that pays for a second collective."""
    latency, free = parts.H100.latency, parts.H100._replace(peaks=parts.H100.peaks._replace(bandwidth=float("inf")))
    assert sum_over_ranks(1e6, True, free, 1) == sum_over_ranks(1e6, False, free, 1) == 0
    for tp in (2, 4, 8):
        assert sum_over_ranks(1e6, False, free, tp) == pytest.approx(latency + 4e6 * (tp - 1) / tp / free.link)
        small, large = parts.ONE_SHOT[tp] / 4 - 1, 1e8
        for gpu in (parts.H100, free):  # in one shot no part is stored
            assert sum_over_ranks(small, True, gpu, tp) == pytest.approx(latency + 4 * small * (tp - 1) / gpu.link)
        assert sum_over_ranks(large, True, free, tp) == pytest.approx(2 * latency + 6 * large * (tp - 1) / tp / free.link)
        assert sum_over_ranks(large, True, free, tp) < sum_over_ranks(large, True, parts.H100, tp)
    medium = 2e5  # too large for one shot, too small for two collectives
    assert sum_over_ranks(medium, True, free, 4) == pytest.approx(latency + 4 * medium * 3 / free.link)


def test_its_limits_are_those_of_the_engine():
    ranks = pytest.importorskip("jetrl_patch.adapters.vllm.ranks")
    assert {tp: min(ranks.ONE_STAGE[tp], 8 << 20) for tp in parts.ONE_SHOT} == parts.ONE_SHOT
    pays = parts.H100.latency * parts.H100.link  # bytes that a second collective has to save
    assert 0.9 * pays < ranks.SAVED < 1.1 * pays


def test_every_part_counts_and_the_most_important_is_first():
    net, load = NETS["Llama-3.1-70B"], parts.Load(256, 512, 16384)
    for name in NAMED:
        changed = parts.H100.with_parts({name: 0.5 * parts.H100.part(name)})
        assert any(step(net, way, load, changed) != step(net, way, load, parts.H100) for way in (WAYS["exact"], EXACT)), name
    with pytest.raises(ValueError, match="speed"):
        parts.H100.with_parts({"speed": 1.0})
    first, *others, both = [[float(ratio) for ratio in list(row.values())[1:]] for row in worse(parts.H100)]
    assert len(others) == len(OURS) and sum(others[0]) == min(map(sum, others)) < sum(both) < sum(first)


def test_measured_parts_are_named_on_the_page(tmp_path):
    text = page(tmp_path)
    assert text == PAGE.read_text() and "| measured |" not in text
    write(tmp_path, 0.8)
    assert page(tmp_path).count("| measured |") == len(PARTS)


def write(folder, factor):
    """Records of a GPU that has ``factor`` times the assumed parts."""
    gpu = parts.H100.with_parts({name: factor * parts.H100.part(name) for name in PARTS})
    peaks, (model, net, M) = gpu.peaks, (measurements.MODEL, measurements.NET, measurements.M)
    sizes = sum(N * K for _, N, K in model.linears)
    fprop, wgrad, bf16 = (2 * M * sizes / 1e12 / peak for peak in peaks[1:3] + peaks[:1])
    quantized = M * sum(5 * K + 4 * N for _, N, K in model.linears) / (peaks.bandwidth * 1e9)
    decode = sum(gemm_seconds(64, N, K, True, peaks.fp8, peaks.bandwidth) for _, N, K in model.linears) / gpu.fp8_decoding
    times = (
        (kernels.FPROP, M, kernels.BF16, bf16), (kernels.FPROP, M, "triton", fprop),
        (kernels.LAYER, M, "triton", 2 * fprop + wgrad + quantized), (kernels.DECODE, 64, "triton", decode),
    )  # fmt: skip
    rows = {"kernels": [{"what": what, "M": M, "way": way, "us": 1e6 * seconds} for what, M, way, seconds in times]}

    def forward(mode, variant):
        count, length = trained.VARIANTS[variant]
        share = gpu.attention * (gpu.exact_attention if mode == "exact" else 1)
        pairs = 2 * count * length**2 * model.heads * model.head_dim * trained.LAYERS
        return {"mode": mode, "sequences": variant, "forward ms": 5 + 1e3 * pairs / (share * peaks.bf16 * 1e12)}

    rows["training"] = [forward(mode, variant) for mode in (trained.BASELINE, "exact") for variant in ("short", "long")]
    rows["rollout"] = [
        {"mode": mode, "requests": 4, "prompt": 32768, "response": 128,
         "decode tokens/s": 4 / one_token(net, way, 4, 4 * (32768 + 64), gpu, 1)}
        for mode, way in ((modes.GRAPHS, WAYS["exact"]), (modes.FP8_CACHE, EXACT), (modes.STOCK_BF16, WAYS["bf16"]))
    ]  # fmt: skip
    for name, found in rows.items():
        (part,) = plan.find([name])
        whole = record.load(folder, part) | {"planned": ["all"], "rows": {"all": found}}
        record.save(folder, part, whole)
    return gpu


PARTS = ("bf16", "fp8", "fp8_wgrad", "attention", "exact_attention", "exact_decoding", "cache_decoding", "fp8_decoding")


@pytest.mark.parametrize("factor", [0.8, 1.1])
def test_measured_parts_replace_the_assumed_ones(tmp_path, factor):
    assert measured(tmp_path, parts.H100) == {}
    gpu = write(tmp_path, factor)
    found = measured(tmp_path, parts.H100)
    assert found == pytest.approx({name: gpu.part(name) for name in PARTS}, rel=1e-6)
    (kernel,) = plan.find(["kernels"])
    record.save(tmp_path, kernel, record.load(tmp_path, kernel) | {"dry": True})  # measures nothing
    assert not {"bf16", "fp8", "fp8_wgrad", "fp8_decoding"} & measured(tmp_path, parts.H100).keys()
