"""The page in a real browser: it fetches nothing, raises no error, and Plotly's controls act on all charts."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jetrl_patch.cli.report import collect, write_page, write_summary

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
    return write_page(runs, write_summary(runs, folder), folder, "Two runs", "as verl writes them")


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
    opened.wait_for_selector("#layers .heatmaplayer")
    yield opened
    context.close()
    assert [trouble for trouble in troubles if not trouble.startswith("data:")] == []


def of_lines(page: Any, code: str) -> Any:
    """The value of JavaScript about the figure ``plot`` of all lines."""
    return page.evaluate(f"(() => {{ const plot = document.getElementById('lines'); return {code}; }})()")


def changes(page: Any, code: str, before: Any) -> Any:
    """Wait until the value of ``code`` is no longer ``before``, and return it."""
    page.wait_for_function(
        f"before => {{ const plot = document.getElementById('lines'); return JSON.stringify({code}) !== before; }}",
        arg=json.dumps(before, separators=(",", ":")),
    )
    return of_lines(page, code)


HIDDEN = "plot.data.filter((t) => t.visible === 'legendonly').map((t) => t.name)"
RANGE = "plot._fullLayout.xaxis.range"


def test_a_click_on_a_run_hides_it_in_every_chart(page: Any) -> None:
    assert of_lines(page, HIDDEN) == []
    page.locator("#lines .legendtoggle").first.click()
    hidden = changes(page, HIDDEN, [])
    assert set(hidden) == {"exact"} and len(hidden) == of_lines(page, "plot.data.filter((t) => t.name === 'exact').length")
    assert len(hidden) > 8


def test_a_drag_zooms_all_charts_and_a_double_click_shows_everything(page: Any) -> None:
    whole = of_lines(page, RANGE)
    box = page.locator("#lines .xy .nsewdrag, #lines .nsewdrag[data-subplot=xy]").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 60, steps=5)
    page.mouse.up()
    low, high = changes(page, RANGE, whole)
    assert whole[0] < low < high < whole[1]
    every = of_lines(page, "Object.keys(plot._fullLayout).filter((k) => /^xaxis/.test(k)).map((k) => plot._fullLayout[k].range)")
    assert len(every) > 8 and all(ends == [low, high] for ends in every)
    page.mouse.dblclick(box["x"] + 20, box["y"] + 20)
    assert changes(page, RANGE, [low, high]) == pytest.approx(whole)


def test_the_horizontal_axis_can_be_tokens_or_time(page: Any) -> None:
    first = "plot.data[0].x[0]"
    assert of_lines(page, first) == 0
    page.locator("#lines .updatemenu-button", has_text="tokens").click()
    assert changes(page, first, 0) == 3000
    assert of_lines(page, RANGE)[1] > 100_000


def test_smoothing_draws_a_calmer_line(page: Any) -> None:
    lengths = "[...document.querySelectorAll('#lines .xy .js-line')].map((e) => e.getTotalLength())"
    before = of_lines(page, lengths)
    box = page.locator("#lines .slider-rail-touch-rect").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.75, box["y"] + box["height"] / 2)  # 0.9
    after = changes(page, lengths, before)
    assert len(after) == len(before) == 2 and all(b < 0.97 * a for a, b in zip(before, after, strict=True))


def test_the_values_of_a_step_show_under_the_pointer(page: Any) -> None:
    box = page.locator("#lines .nsewdrag[data-subplot=xy]").bounding_box()
    at = of_lines(page, "[plot._fullLayout.xaxis.d2p(30), plot._fullLayout.yaxis.d2p(plot.data[0].y[30])]")
    page.mouse.move(box["x"] + at[0] - 1, box["y"] + at[1])
    page.mouse.move(box["x"] + at[0], box["y"] + at[1])
    page.wait_for_selector("#lines .hoverlayer .hovertext")
    assert "at step 30" in page.locator("#lines .hoverlayer .hovertext").first.text_content()


def test_a_statistic_of_the_layers_can_be_chosen(page: Any) -> None:
    seen = "document.getElementById('layers').data.map((t) => t.visible)"
    before = of_lines(page, seen)
    assert before == [True, False, False, False]
    page.locator("#layers .updatemenu-header").click()
    page.locator("#layers .updatemenu-dropdown-button", has_text="saturation, exact").click()
    assert changes(page, seen, before) == [False, False, True, False]
    names = page.locator("#layers .yaxislayer-above .ytick").all_text_contents()
    assert names == [f"model.layers.{layer}.mlp.down_proj" for layer in range(11, -1, -1)]


def test_what_was_off_has_no_chart_and_what_never_changes_is_a_list(page: Any) -> None:
    titles = page.locator("#lines .annotation-text").all_text_contents()
    assert any("Weight SQNR, lowest layer" in title for title in titles)
    assert not any(word in title for title in titles for word in ("Clipped", "saturation", "quantized layers"))
    assert page.locator("dt", has_text="quantized layers").evaluate("e => e.nextSibling.textContent") == "28"
    assert page.get_by_text("monitor_sqnr 20 dB").count() == 1  # a threshold
    assert page.get_by_text("monitor_underflow 10% is outside").count() == 1


@pytest.mark.parametrize("width", [320, 768, 1280])
def test_no_width_scrolls_sideways(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.eval_on_selector_all("details", "all => all.forEach((e) => (e.open = true))")
    page.wait_for_timeout(150)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.querySelector('#lines svg').getBoundingClientRect().width") > 800


def test_a_live_page_loads_itself_anew(browser: Any, tmp_path: Path) -> None:
    run = run_file(tmp_path / "a.jsonl", 1, 0, exact=True)

    def publish(title: str, live: int) -> str:
        runs = collect([f"one={run}"], [])
        return write_page(runs, write_summary(runs, tmp_path), tmp_path, title, live=live).as_uri()

    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE)
    opened = context.new_page()
    opened.goto(publish("first", live=1))
    publish("second", live=0)  # the watch has ended
    playwright.expect(opened).to_have_title("second", timeout=PATIENCE)
    context.close()
