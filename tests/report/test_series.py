"""Thinning keeps extremes, rounding keeps values recognizable, styles are distinct, and layer names are parsed."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_patch import Config
from jetrl_patch.cli.report.charts import ALL_LAYERS, DARK, LIGHT, Scales, choose, describe, draw, split_name, thin
from jetrl_patch.cli.report.page import short
from jetrl_patch.cli.report.runs import Run, summarize
from jetrl_patch.measure.statistics import FIELDS

floats = st.floats(allow_nan=True, allow_infinity=True)


@settings(deadline=None)
@given(st.lists(floats, max_size=8) | st.lists(floats, min_size=25, max_size=200), st.integers(5, 20))
def test_thinning_keeps_ends_extremes_and_what_is_no_number(values: list[float], limit: int) -> None:
    points = list(enumerate(values))
    kept = thin(points, limit)
    assert len(kept) <= max(limit, 0)
    assert all(any(p is q for q in points) for p in kept)
    assert [step for step, _ in kept] == sorted({step for step, _ in kept})
    if len(points) <= limit:
        assert kept is points
    if points:
        assert kept[0] is points[0] and kept[-1] is points[-1]
    finite, shown = ([v for _, v in some if math.isfinite(v)] for some in (points, kept))
    if finite:
        assert (min(shown), max(shown)) == (min(finite), max(finite))
    assert any(not math.isfinite(v) for v in values) == any(not math.isfinite(v) for _, v in kept)


def test_each_bin_keeps_its_own_spike() -> None:
    values = [0.0] * 100_000
    for spike in range(500, 100_000, 1000):
        values[spike] = 1.0 + spike
    kept = thin(list(enumerate(values)))
    assert len(kept) <= 600
    assert {v for _, v in kept if v} == {v for v in values if v}


@given(floats)
def test_a_short_value_says_the_same(value: float) -> None:
    found = short(value)
    if not math.isfinite(value):
        assert isinstance(found, str) and repr(float(found)) == repr(value)
        return
    assert not isinstance(found, str)
    assert (found == 0) == (value == 0) and (found == 1) == (value == 1)
    assert math.isclose(found, value, rel_tol=1e-4)


def luminance(color: str) -> float:
    parts = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(("colors", "ground"), [(LIGHT, "#ffffff"), (DARK, "#171d28")])
def test_every_line_stands_out_from_its_ground(colors: tuple[str, ...], ground: str) -> None:
    for color in colors:
        low, high = sorted((luminance(color), luminance(ground)))
        assert (high + 0.05) / (low + 0.05) >= 3.0, color


@pytest.mark.parametrize("count", [1, 3, 8, 16])
def test_no_two_runs_look_the_same(count: int) -> None:
    styles = choose([Run("", "", 0, name=f"run {i}", source=f"run {i}") for i in range(count)])
    assert len(set(styles)) == count
    if count <= len(LIGHT):
        assert len({style.color for style in styles}) == count


def test_seeds_share_a_color_and_arms_do_not() -> None:
    runs = [
        Run("bf16", "none", 0),
        Run("bf16", "none", 1),
        Run("fp8-unified", "exact", 0),
        Run("fp8-rollout", "none", 0),
    ]
    a, b, c, d = choose(runs)
    assert a.color == b.color and a.dash != b.dash
    assert len({a.color, c.color, d.color}) == 3


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("jetrl/scale/model.layers.0.mlp.down_proj/saturation", ("saturation", "model.layers.0.mlp.down_proj")),
        ("jetrl/scale/layers/0/mlp/amax_max", ("amax max", "layers/0/mlp")),
        ("jetrl/monitor/model.layers.3.q_proj/sqnr_db", ("monitor sqnr db", "model.layers.3.q_proj")),
        ("jetrl/scale/saturation_max", ("saturation max", ALL_LAYERS)),
        ("jetrl/k3_kl", None),
        ("actor/grad/norm", None),
    ],
)
def test_statistics_of_layers_are_known_by_their_names(name: str, found: tuple[str, str] | None) -> None:
    got = split_name(name)
    assert got == (found and (found[0].replace("/", " "), found[1]))


def test_the_worst_is_the_largest_or_of_a_ratio_the_smallest() -> None:
    def data(layer: int, up: float) -> dict[str, float]:
        return {f"jetrl/scale/layers.{layer}/{what}": up for what in ("saturation", "sqnr_db")}

    runs = [Run("", "", 0, {1: {**data(10, 1.0), **data(2, 5.0)}, 2: {**data(10, 7.0), **data(2, 3.0)}})]
    scales = Scales(runs)
    assert scales.layers == ["layers.2", "layers.10"]
    assert scales.worst(0, "saturation", "layers.2") == 5.0
    assert scales.worst(0, "sqnr db", "layers.2") == 3.0
    assert scales.chart("saturation").series[0] == [(1, 5.0), (2, 7.0)]
    assert scales.chart("sqnr db").series[0] == [(1, 1.0), (2, 3.0)]
    runs[0].steps[3] = data(2, math.nan)
    assert math.isnan(Scales(runs).worst(0, "saturation", "layers.2") or 0.0)


def test_the_monitors_figures_of_all_layers_are_the_headline() -> None:
    names = (
        "weight_sqnr_min",
        "activation_underflow_max",
        "gradient_saturated_max",
        "weight_unchanged_mean",
        "weight_amax_max",
        "weight_slice_sqnr_min",
    )
    data = dict.fromkeys((f"jetrl/scale/{name}" for name in names), 1.0)
    data |= {"jetrl/scale/model.layers.0.q_proj/weight_sqnr": 30.0, "jetrl/guard_layers": 0.0}
    scales = Scales([Run("", "", 0, {1: data})])
    assert scales.headline == [
        "weight sqnr min",
        "activation underflow max",
        "gradient saturated max",
        "weight unchanged mean",
    ]
    assert scales.layers == ["model.layers.0.q_proj"]
    assert [what for what in scales.series if scales.per_layer(what)] == ["weight sqnr"]


def test_the_monitors_figures_say_what_they_are() -> None:
    config = Config()
    for name, threshold in (("weight sqnr min", config.monitor_sqnr), ("activation underflow max", config.monitor_underflow)):
        assert [limit.value for limit in describe(name).limits] == [threshold]
    assert describe("weight sqnr min").style == "db" and describe("gradient saturated max").style == "share"
    logged = {name.replace("_", " ") for name in FIELDS} | {"unchanged", "worst layer", "worst experts", "worst expert"}
    assert all(describe(f"weight {name}").help for name in logged)  # a new figure of the monitor needs an explanation
    assert describe("something else").title == "something else"


def test_the_worst_expert_is_that_of_the_worst_step() -> None:
    name = "model.layers.3.mlp.experts"

    def data(sqnr: float, slices: float, expert: float) -> dict[str, float]:
        found = {"sqnr": sqnr, "slice_sqnr": slices, "worst_expert": expert}
        of_all = {"jetrl/scale/weight_worst_expert": expert, "jetrl/scale/weight_worst_experts": 7.0}
        return {f"jetrl/scale/{name}/weight_{figure}": value for figure, value in found.items()} | of_all

    scales = Scales([Run("", "", 0, {1: data(30, 29, 90), 2: data(29, 12, 17), 3: data(28, math.nan, 4), 4: {}})])
    assert scales.layers == [name] and scales.worst(0, "weight worst expert", name) == 17
    assert scales.worst(0, "weight worst expert", "another") is None
    assert not any("worst" in what for what in scales.headline)
    assert describe("weight worst expert").style == "count"


def test_a_statistic_that_is_always_0_is_silent() -> None:
    data = {"jetrl/scale/weight_saturated_max": 0.0, "jetrl/scale/weight_sqnr_min": 31.0}
    scales = Scales([Run("", "", 0, {1: data, 2: data})])
    assert scales.silent == ["weight saturated max"] and scales.headline == ["weight sqnr min"]


def test_a_correction_that_was_off_has_no_chart_and_no_column() -> None:
    data = {"jetrl/tokens": 10, "jetrl/clipped_fraction": 0.0, "jetrl/masked_fraction": 0.0, "jetrl/entropy_like": 3.0}
    off, on = Run("bf16", "none", 0, {1: data, 2: data}), Run("bf16", "none", 1, {1: data}, correction="tis")
    keys = [chart.key for chart in draw([off])]
    assert "clipped" not in keys and "masked" not in keys and summarize(off)["clipped_fraction_mean"] is None
    (clipped,) = [chart for chart in draw([off, on]) if chart.key == "clipped"]
    assert clipped.series == [[], [(1, 0.0)]] and summarize(on)["clipped_fraction_mean"] == 0.0
    (still,) = [chart for chart in draw([off]) if chart.title == "entropy like"]
    assert still.steady == 3.0 and still.style == "count"


def test_tokens_and_time_are_sums_over_the_steps() -> None:
    run = Run("", "", 0, {2: {"jetrl/tokens": 5, "timing_s/step": 1.5}, 1: {"jetrl/tokens": 10}, 3: {"jetrl/tokens": math.nan}})
    assert run.tokens == [(1, 10.0), (2, 15.0), (3, 15.0)]
    assert run.time == [(2, 1.5)]
