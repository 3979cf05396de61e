"""The site in a real browser, opened from files: nothing overflows, nothing is fetched, and the search works."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = ["--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-sync"]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (chromium, google-chrome)")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Any]:
    """A page. At the end it must have logged nothing, thrown nothing and made no network request."""
    context, troubles = browser.new_context(), []
    page = context.new_page()
    page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith(("file:", "data:")) else troubles.append(request.url))
    yield page
    context.close()
    assert not troubles


@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_is_wider_than_the_window(opened: Any, site_folder: Path, width: int) -> None:
    opened.set_viewport_size({"width": width, "height": 844})
    wide = {}
    for path in sorted(site_folder.rglob("*.html")):
        if path.name == "404.html":  # served, never opened from a file: its links are absolute
            continue
        opened.goto(path.as_uri())
        # a table or a code block may be wider; it scrolls in its own box
        found = opened.evaluate(
            """() => [...document.querySelectorAll("article > *")].filter(e => e.getBoundingClientRect().right > innerWidth + 1)
               .map(e => e.outerHTML.slice(0, 80)).concat(
               document.scrollingElement.scrollWidth > innerWidth ? ["the page itself"] : [])"""
        )
        if found:
            wide[path.name] = found
    assert not wide


def test_the_search_answers_without_a_server(opened: Any, site_folder: Path) -> None:
    opened.goto((site_folder / "index.html").as_uri() + "?q=poison")
    opened.wait_for_selector(".md-search-result__item", state="attached", timeout=20_000)
    assert "sync.html" in opened.inner_html(".md-search-result__list")
