"""The page in a real browser: it fetches nothing, raises no error, and every control works."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jetrl_patch.cli.report import collect, write

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE = 300_000.0  # milliseconds; a busy machine is slow
QUIET = ["--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-sync"]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (chromium, google-chrome)")


def run_file(path: Path, seed: int, first: int, exact: bool) -> Path:
    """A run of 40 steps in the format of verl's file logger, starting with step ``first``."""
    chance, lines = random.Random(seed), []
    for step in range(first, first + 40):
        data = {
            "critic/score/mean": 0.3 + 0.015 * (step - first) + 0.05 * chance.random(),
            "timing_s/step": 3.0 + seed + chance.random(),
            "timing_s/gen": 1.0 + seed,
            "timing_s/update_actor": 1.2,
            "timing_s/update_weights": 0.2,
            "jetrl/tokens": 3000 + step,
            "jetrl/logp_abs_diff_mean": 0.0 if exact else 2e-3 * (1 + chance.random()),
            "jetrl/logp_abs_diff_max": 0.0 if exact else chance.random(),
            "jetrl/bit_equal_fraction": 1.0 if exact else 0.02,
            "jetrl/ess": 1.0 if exact else 0.999,
            "jetrl/k3_kl": 0.0 if exact else 10.0 ** -(step % 20),
            "jetrl/clipped_fraction": 0.0,  # what a run without a correction logs
            "jetrl/quantized_layers": 28,
            "response_length/mean": 20.0 + step,
        }
        if step % 10 == 0:
            data["val-core/words/acc/mean@1"] = min(1.0, 0.25 + step / 50)
            data["jetrl/scale/weight_sqnr_min"] = 10.0 - seed
            data |= {"jetrl/scale/weight_saturated_max": 0.0, "jetrl/scale/activation_underflow_max": 1e-4 * (1 + seed)}
            for layer in range(12):
                where = f"jetrl/scale/model.layers.{layer}.mlp.down_proj"
                data |= {f"{where}/saturation": 10.0**-layer, f"{where}/sqnr_db": 32.0 - 2 * layer - seed}
        lines.append(json.dumps({"step": step, "data": data}) + "\n")
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    texts = [
        f"exact={run_file(folder / 'a.jsonl', 1, 0, exact=True)}",
        f"a run with a rather long name, FP8 rollout={run_file(folder / 'b.jsonl', 7, 20, exact=False)}",
    ]
    runs = collect(texts, [])
    write(runs, folder / "out", "Two runs", "as verl writes them")
    return folder / "out" / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any, page_file: Path) -> Iterator[Any]:
    """The open page; at the end, the console must be empty and nothing thrown or fetched."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE)
    opened, troubles = context.new_page(), []
    opened.on("console", lambda message: troubles.append(message.text))
    opened.on("pageerror", lambda error: troubles.append(str(error)))
    opened.on("request", lambda request: troubles.append(request.url) if request.url != page_file.as_uri() else None)
    opened.goto(page_file.as_uri())
    yield opened
    context.close()
    assert [trouble for trouble in troubles if not trouble.startswith("data:")] == []


def lines(page: Any, chart: str) -> list[str]:
    found: list[str] = page.eval_on_selector_all(f"#chart-{chart} path.line", "all => all.map(e => e.dataset.run)")
    return found


def marks(page: Any, chart: str) -> list[str]:
    found: list[str] = page.eval_on_selector_all(f"#chart-{chart} text", "all => all.map(e => e.textContent)")
    return found


def column(page: Any, table: str, title: str) -> list[str]:
    code = """([table, title]) => {
        const t = document.querySelector(`[aria-label="${table}, table"] table`);
        const at = [...t.tHead.rows[0].cells].findIndex((c) => c.textContent === title);
        return [...t.tBodies[0].rows].filter((r) => !r.hidden).map((r) => r.cells[at].dataset.value);
    }"""
    found: list[str] = page.evaluate(code, [table, title])
    return found


def click_head(page: Any, table: str, title: str) -> None:
    page.get_by_role("region", name=f"{table}, table", exact=True).get_by_role("button", name=title, exact=True).click()


def test_switching_a_run_off_changes_charts_axes_and_tables(page: Any) -> None:
    assert lines(page, "reward") == ["0", "1"]
    assert "0" in marks(page, "mismatch-mean") and "10⁻³" in marks(page, "mismatch-mean")
    usual = page.get_by_role("checkbox", name="a run with a rather long name, FP8 rollout")
    usual.uncheck()
    assert lines(page, "reward") == lines(page, "mismatch-mean") == ["0"]
    assert column(page, "Summary", "run") == ["exact"]
    assert len(column(page, "Parts of a step", "run")) == 1
    assert "60" not in marks(page, "reward")  # the steps of the other run are gone from the axis
    usual.check()
    assert lines(page, "reward") == ["0", "1"]
    assert "60" in marks(page, "reward") or "50" in marks(page, "reward")
    page.get_by_role("button", name="None").click()
    assert lines(page, "reward") == []
    assert page.get_by_text("no visible run has this metric").first.is_visible()
    page.get_by_role("button", name="All").click()
    assert lines(page, "accuracy") == ["0", "1"]


def test_zero_has_a_place_of_its_own_below_the_smallest_decade(page: Any) -> None:
    code = """(run) => { const b = document.querySelector(`#chart-mismatch-mean path[data-run="${run}"]`).getBBox();
        const band = document.querySelector("#chart-mismatch-mean .band").getBBox();
        return [b.y, b.y + b.height, band.y, band.y + band.height]; }"""
    top, bottom, band_top, band_bottom = page.evaluate(code, 0)
    assert band_top < top <= bottom < band_bottom
    _, bottom, band_top, _ = page.evaluate(code, 1)
    assert bottom < band_top


def test_tables_sort_numbers_as_numbers(page: Any) -> None:
    page.get_by_text("Worst value per layer").click()
    for title in ("sqnr db", "saturation"):  # 31 … 3 and 1 … 1e-11 would sort differently as text
        shuffled = [float(value) for value in column(page, "Layers", title)]
        click_head(page, "Layers", title)
        falling = [float(value) for value in column(page, "Layers", title)]
        assert falling == sorted(shuffled, reverse=True) != shuffled
        click_head(page, "Layers", title)
        assert [float(value) for value in column(page, "Layers", title)] == falling[::-1]
        assert page.locator("th[aria-sort]", has_text=title).get_attribute("aria-sort") == "ascending"
    assert page.locator("th[aria-sort]").count() == 1
    click_head(page, "Layers", "layer")  # text, but in model order
    assert column(page, "Layers", "layer") == [f"{n:06d}" for n in range(12) for _ in range(2)]


def test_the_values_of_a_step_show_by_pointer_and_by_keyboard(page: Any) -> None:
    plot = page.locator("#chart-reward .plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
    tip = page.locator("#chart-reward .tip")
    assert tip.is_visible()
    assert re.match(r"step (2[5-9]|3[0-4])\n", tip.inner_text()) and "exact" in tip.inner_text()
    page.mouse.move(1, 1)
    assert not tip.is_visible()
    plot.focus()
    page.keyboard.press("ArrowRight")
    assert tip.inner_text().startswith("step 0")
    page.keyboard.press("ArrowRight")
    assert tip.inner_text().startswith("step 1")
    page.keyboard.press("Escape")
    assert not tip.is_visible()


def test_a_layer_and_a_statistic_can_be_chosen(page: Any) -> None:
    caption = page.locator("#chart-scales figcaption")
    assert page.locator("#chart-scale-weight-sqnr-min path.line").count() == 2  # worth a chart without being asked for
    page.locator("#what").select_option("sqnr db")
    assert caption.inner_text().startswith("sqnr db, worst layer")
    assert "6 dB" in marks(page, "scales")  # the last layers are at 9 and 3
    page.locator("#layer").select_option("model.layers.5.mlp.down_proj")
    assert caption.inner_text().startswith("sqnr db, model.layers.5.mlp.down_proj")
    assert "20 dB" in marks(page, "scales")  # the runs are at 21 and 15
    page.locator("#what").select_option("weight sqnr min")
    assert caption.inner_text().startswith("Weight SQNR, lowest layer\nsignal over quantization error")
    assert page.locator("#layer").is_disabled()
    assert "5 dB" in marks(page, "scales")  # 9 and 3 again, and the monitor's threshold
    assert "monitor_sqnr 20 dB" in marks(page, "scales")


def test_a_threshold_far_from_the_values_does_not_flatten_them(page: Any) -> None:
    assert "monitor_sqnr 20 dB" in marks(page, "scale-weight-sqnr-min")
    assert page.locator("#chart-scale-weight-sqnr-min line.limit").count() == 1
    far = "scale-activation-underflow-max"  # the values are below 0.1%, the threshold is 10%
    assert "↑ monitor_underflow 10%" in marks(page, far) and "10%" not in marks(page, far)
    assert page.locator(f"#chart-{far} line.limit").count() == 0


def test_what_was_off_has_no_chart_and_what_never_changes_is_a_list(page: Any) -> None:
    assert page.locator("#chart-clipped, #chart-scale-weight-saturated-max, #chart-more-jetrl-quantized_layers").count() == 0
    assert page.get_by_text("0 at every measured step of every run: Weight saturation, highest layer.").count() == 1
    page.get_by_text("Show 2 charts").click()
    assert page.locator("dt", has_text="quantized layers").evaluate("e => e.nextSibling.textContent") == "28"
    assert page.locator("#chart-more-response_length-mean path.line").count() == 2


def test_axes_show_only_possible_values(page: Any) -> None:
    shares = [mark for mark in marks(page, "ess") + marks(page, "bit-equal") if mark.endswith("%")]
    assert shares and all(0 <= float(mark.rstrip("%")) <= 100 for mark in shares)
    page.get_by_text("Show 2 charts").click()
    assert all("." not in mark for mark in marks(page, "more-response_length-mean"))  # whole numbers
    assert not [mark for chart in ("reward", "seconds", "sync") for mark in marks(page, chart) if mark.startswith(("-", "−"))]


def steps_shown(page: Any) -> list[float]:
    """The step marks of the reward's chart."""
    code = "all => all.filter((e) => e.getAttribute('text-anchor') === 'middle').map((e) => e.textContent)"
    return [float(mark) for mark in page.eval_on_selector_all("#chart-reward text", code) if mark != "step"]


def test_a_drag_zooms_all_charts_and_a_double_click_shows_everything(page: Any) -> None:
    whole = steps_shown(page)
    plot = page.locator("#chart-seconds .plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 60, steps=3)
    assert page.locator("#chart-seconds .chosen").count() == 1
    page.mouse.up()
    assert min(steps_shown(page)) > 15 and max(steps_shown(page)) < 45
    page.get_by_role("button", name="Whole axis").click()
    assert steps_shown(page) == whole
    assert page.locator("#whole").is_hidden()
    plot.focus()
    page.keyboard.press("+")
    assert len(steps_shown(page)) and steps_shown(page) != whole
    plot.dblclick(position={"x": 200, "y": 100})
    assert steps_shown(page) == whole


def test_smoothing_draws_a_calmer_line_over_what_was_logged(page: Any) -> None:
    def length(which: str) -> float:
        code = "(e) => e.getTotalLength()"
        return float(page.locator(f'#chart-reward path.{which}').first.evaluate(code))

    before = length("line")
    assert page.locator("#chart-reward path.raw").count() == 0
    page.locator("#smooth").fill("0.9")
    assert length("line") < 0.9 * before and length("raw") == pytest.approx(before, rel=0.05)
    assert page.locator("#smooth-value").inner_text() == "0.90"


def test_the_x_axis_can_be_tokens_or_time(page: Any) -> None:
    page.locator("#by").select_option("tokens")
    assert "sampled tokens" in marks(page, "reward") and "100k" in marks(page, "reward")
    assert lines(page, "reward") == ["0", "1"]
    plot = page.locator("#chart-reward .plot")
    plot.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#chart-reward .tip").inner_text().startswith("3,000 tokens, step 0 of exact")
    page.locator("#by").select_option("time")
    assert "minutes of training" in marks(page, "reward")
    assert lines(page, "accuracy") == ["0", "1"]


def test_a_chart_is_saved_as_csv(page: Any) -> None:
    with page.expect_download() as caught:
        page.locator("#chart-accuracy .csv").click()
    assert caught.value.suggested_filename == "accuracy.csv"
    rows = Path(caught.value.path()).read_bytes().decode().split("\r\n")
    assert rows[0] == 'step,exact,"a run with a rather long name, FP8 rollout"'
    assert rows[1] == "0,0.25," and rows[3] == "20,0.65,0.65"
    assert page.evaluate("field('=SUM(A1)')") == "'=SUM(A1)"


@pytest.mark.parametrize("width", [390, 1280])
def test_the_summary_keeps_its_first_column_while_it_scrolls(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    code = """() => { const box = document.querySelector('[aria-label="Summary, table"]');
        return [box.scrollWidth - box.clientWidth, box.querySelector("td.name").getBoundingClientRect().left]; }"""
    beyond, left = page.evaluate(code)
    assert beyond <= 0 or width < 1280  # its main columns fit a laptop's window
    page.get_by_role("checkbox", name="all columns").check()
    page.evaluate("""() => { document.querySelector('[aria-label="Summary, table"]').scrollLeft = 10000; }""")
    assert page.evaluate(code)[1] == left


@pytest.mark.parametrize("width", [320, 380, 768, 1280])
def test_no_width_scrolls_sideways(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.eval_on_selector_all("details", "all => all.forEach((e) => (e.open = true))")
    page.wait_for_timeout(150)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    drawn = page.evaluate("document.querySelector('#chart-reward svg').getBoundingClientRect().width")
    assert 200 < drawn <= width


def test_marks_of_an_axis_do_not_lie_on_each_other(page: Any) -> None:
    for width in (360, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        page.eval_on_selector_all("details", "all => all.forEach((e) => (e.open = true))")
        page.wait_for_timeout(150)
        overlaps = page.evaluate(
            """() => [...document.querySelectorAll("figure")].flatMap((figure) => {
                const boxes = [...figure.querySelectorAll("svg text")].map((t) => [t.textContent, t.getBoundingClientRect()]);
                return boxes.flatMap(([a, p], i) => boxes.slice(i + 1).filter(([, q]) =>
                    p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 3 && q.top < p.bottom - 3)
                    .map(([b]) => `${figure.id}: ${a} / ${b}`));
            })"""
        )
        assert overlaps == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_on_both_grounds(page: Any, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    ratio = page.evaluate(
        """() => {
            const part = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            const light = (color) => {
                const [r, g, b] = color.match(/[\\d.]+/g).map((v) => part(v / 255));
                return 0.2126 * r + 0.7152 * g + 0.0722 * b;
            };
            const ground = light(getComputedStyle(document.querySelector("figure")).backgroundColor);
            const texts = document.querySelectorAll("figcaption, figcaption small, td, th button, .card span");
            return Math.min(...[...texts].map((e) => light(getComputedStyle(e).color)).map(
                (own) => (Math.max(own, ground) + 0.05) / (Math.min(own, ground) + 0.05)));
        }"""
    )
    assert ratio >= 4.5


def test_a_live_page_loads_itself_anew_and_keeps_what_was_chosen(browser: Any, tmp_path: Path) -> None:
    run = run_file(tmp_path / "a.jsonl", 1, 0, exact=True)

    def publish(title: str, live: int) -> str:
        write(collect([f"one={run}", f"two={run_file(tmp_path / 'b.jsonl', 2, 0, exact=False)}"], []),
              tmp_path / "out", title, live=live)  # fmt: skip
        return (tmp_path / "out" / "report.html").as_uri()

    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE)
    opened = context.new_page()
    opened.goto(publish("first", live=1))
    opened.get_by_role("button", name="Pause").click()
    opened.get_by_role("checkbox", name="two").uncheck()
    opened.locator("#by").select_option("tokens")
    opened.locator("#by").blur()
    publish("second", live=0)  # the watch has ended
    assert opened.title() == "first"
    opened.get_by_role("button", name="Go on").click()
    playwright.expect(opened).to_have_title("second", timeout=PATIENCE)
    opened.wait_for_load_state()
    assert lines(opened, "reward") == ["0"] and opened.locator("#by").input_value() == "tokens"
    assert not opened.get_by_role("checkbox", name="two").is_checked()
    context.close()
