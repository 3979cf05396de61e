"""Thinning keeps extremes, styles are distinct, layer names are parsed, and Plotly's figures show what was logged."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetrl_patch import Config
from jetrl_patch.cli.report import charts, figures
from jetrl_patch.cli.report.charts import ALL_LAYERS, COLORS, Chart, Scales, choose, describe, draw, split_name, thin
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


def luminance(color: str) -> float:
    parts = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("color", COLORS)
def test_every_line_stands_out_from_its_ground(color: str) -> None:
    assert 1.05 / (luminance(color) + 0.05) >= 3.0


@pytest.mark.parametrize("count", [1, 3, 8, 16])
def test_no_two_runs_look_the_same(count: int) -> None:
    styles = choose([Run("", "", 0, name=f"run {i}", source=f"run {i}") for i in range(count)])
    assert len(set(styles)) == count
    if count <= len(COLORS):
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
    assert scales.chart("saturation").series[0] == [(1, 5.0), (2, 7.0)]
    assert scales.chart("sqnr db").series[0] == [(1, 1.0), (2, 3.0)]
    runs[0].steps[3] = data(2, math.nan)
    assert math.isnan(dict(Scales(runs).chart("saturation").series[0])[3])


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


def test_a_worst_expert_is_a_number_and_none_is_worse_than_another() -> None:
    assert charts.worst("weight worst expert", [(1, 90.0), (2, 17.0)]) == 17
    assert describe("weight worst expert").style == "count"
    data = {"jetrl/scale/model.layers.3.mlp.experts/weight_worst_expert": 4.0, "jetrl/scale/weight_worst_expert": 4.0}
    assert Scales([Run("", "", 0, {1: data})]).headline == []


def test_a_statistic_that_is_always_0_has_no_chart() -> None:
    data = {"jetrl/scale/weight_saturated_max": 0.0, "jetrl/scale/weight_sqnr_min": 31.0}
    scales = Scales([Run("", "", 0, {1: data, 2: data})])
    assert scales.headline == ["weight sqnr min"]


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


def test_only_1_reads_100_percent() -> None:
    share = Chart("share", "a share", "Learning", style="share")
    assert [share.text(value) for value in (1.0, 1 - 1e-9, 0.5, 0.0, math.nan)] == ["100%", "almost 100%", "50%", "0%", "NaN"]


def test_an_axis_shows_no_impossible_value_and_is_not_flattened_by_a_distant_limit() -> None:
    underflow = describe("activation underflow max")
    low, high, inside = underflow.ends(2e-4, 8e-4)
    assert 0 <= low < 2e-4 and 8e-4 < high < 1e-3 and inside == []
    assert underflow.ends(0.06, 0.09)[2] == list(underflow.limits)
    assert Chart("share", "a share", "Learning", style="share").ends(0.2, 1.0)[1] == 1.0
    low, high, inside = describe("weight sqnr min").ends(3.0, 9.0)
    assert high > 20 and [limit.value for limit in inside] == [20.0]


def a_run(name: str, mismatch: float, steps: int = 5) -> Run:
    data = {"reward": 0.5, "jetrl/tokens": 100, "step_time": 60.0, "jetrl/logp_abs_diff_mean": mismatch}
    return Run(name=name, source=name, steps={step: data | {"reward": 0.5 + step} for step in range(1, steps + 1)})


def test_the_lines_say_what_was_logged() -> None:
    runs = [a_run("exact <b>", 0.0), a_run("usual", 2e-3)]
    runs[1].steps[2]["reward"] = math.nan
    del runs[1].steps[3]["jetrl/tokens"]
    figure = figures.lines(runs, choose(runs), draw(runs))
    reward, broken, exact, usual = figure.data[:4]
    assert [trace.name for trace in (reward, broken, exact, usual)] == ["exact &lt;b&gt;", "usual"] * 2
    assert [trace.showlegend for trace in figure.data[:4]] == [True, True, False, False]
    assert (list(reward.x), list(reward.y)) == ([1, 2, 3, 4, 5], [1.5, 2.5, 3.5, 4.5, 5.5])
    assert list(broken.y) == [1.5, None, 3.5, 4.5, 5.5] and list(broken.customdata[1]) == [2, "NaN"]
    assert [note.hovertext for note in figure.layout.annotations if note.text == "×"] == ["usual: NaN"]
    assert set(usual.y) == {2e-3} and max(exact.y) < 1e-3  # 0 lies in a band below the smallest decade
    assert list(exact.customdata[0]) == [1, "0"]
    axis = figure.layout[exact.yaxis.replace("y", "yaxis")]
    assert axis.type == "log" and axis.ticktext[0] == "0" and axis.tickvals[0] == exact.y[0]
    by = {button.label: button.args[0]["x"] for button in figure.layout.updatemenus[0].buttons}
    assert list(by["tokens"][0]) == [100, 200, 300, 400, 500] and list(by["tokens"][1]) == [100, 200, 200, 300, 400]
    assert list(by["minutes"][0]) == [1, 2, 3, 4, 5]
    smooth = {step.label: step.args[0]["y"] for step in figure.layout.sliders[0].steps}
    assert len(smooth["off"]) == len(smooth["0.9"]) == len(by["step"]) == len(figure.data)
    assert list(smooth["off"][0]) == list(reward.y) and smooth["0.9"][0][0] == 1.5
    assert smooth["0.9"][0][1] == pytest.approx((0.09 * 1.5 + 0.1 * 2.5) / 0.19) and smooth["0.9"][1][1] is None


def test_a_map_of_layers_keeps_the_worst_of_each_stretch() -> None:
    def data(step: int) -> dict[str, float]:
        names = {f"jetrl/scale/layers.{layer}": 30.0 - layer for layer in (10, 2)}
        return {f"{name}/weight_sqnr": 1.0 if (name[-2:], step) == (".2", 777) else value for name, value in names.items()}

    runs = [Run(name=name, steps={step: data(step) for step in range(1, 1001)}) for name in ("one", "two")]
    figure = figures.layers(runs, Scales(runs))
    assert figure is not None and [trace.visible for trace in figure.data] == [True, False]
    assert list(figure.layout.yaxis.categoryarray) == ["layers.10", "layers.2"]  # from bottom to top
    first = figure.data[0]
    row = dict(zip(first.x, first.z[list(first.y).index("layers.2")], strict=True))
    assert len(row) == 200 and max(row) == 1000 and sorted(set(row.values())) == [1.0, 28.0] and row[780] == 1.0
    assert [button.label for button in figure.layout.updatemenus[0].buttons] == ["Weight SQNR, one", "Weight SQNR, two"]
    assert figures.layers([a_run("one", 0.0)], Scales([a_run("one", 0.0)])) is None
