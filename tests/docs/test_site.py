"""The documentation builds in strict mode, and every link in it and in the repository's pages resolves."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.conftest import Build

ROOT = Path(__file__).resolve().parents[2]
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md")
PAGES = sorted([*(ROOT / name for name in TOP), *(ROOT / "docs").rglob("*.md")])

#: attributes that load a resource when a page opens
LOADING = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}


class Page(HTMLParser):
    """The ids, links and loaded resources of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        self.loads += [value for name, value in found.items() if (tag, name) in LOADING]


@pytest.fixture(scope="module")
def site(site_folder: Path) -> dict[Path, Page]:
    pages = {path: Page(path.read_text()) for path in site_folder.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 20
    return pages


def test_every_link_of_the_site_leads_to_a_page_and_a_place_in_it(site: dict[Path, Page]) -> None:
    wrong = []
    for path, page in site.items():
        for link in (*page.links, *page.loads):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            known = site[target].ids if target in site else None
            if not target.exists() or (parts.fragment and known is not None and unquote(parts.fragment) not in known):
                wrong.append(f"{path.name}: {link}")
    assert not wrong


def test_a_page_loads_nothing_from_elsewhere(site: dict[Path, Page], site_folder: Path) -> None:
    assert not [f"{path.name}: {link}" for path, page in site.items() for link in page.loads if "//" in link]
    sheets = site_folder.rglob("*.css")
    assert not [sheet.name for sheet in sheets if re.search(r"url\(['\"]?(https?:)?//", sheet.read_text())]


def links_of(path: Path) -> Iterator[tuple[str, str]]:
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target):
            place, _, anchor = target.partition("#")
            yield place, anchor


def slugs(path: Path) -> set[str]:
    """Anchors of a page's headings, by the rules of both a code host and the site."""
    found = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)]\([^)]*\)", r"\1", heading).replace("`", "") for heading in found]
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_files_of_the_repository(page: Path) -> None:
    wrong = []
    for place, anchor in links_of(page):
        target = (page.parent / place).resolve() if place else page
        if not target.exists() or (anchor and target.name != "api.md" and anchor not in slugs(target)):
            wrong.append(f"{place}#{anchor}")
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    folders = "jetrl_patch|adapters|examples|scripts|tests|benchmarks|requirements"
    named = re.findall(rf"`((?:{folders})/[\w./]*)[:`]", page.read_text())
    assert not [name for name in named if not (ROOT / name).exists()]


def test_a_broken_link_fails_the_build(build: Build, tmp_path: Path) -> None:
    # on a copy: the strict build must be seen to fail
    for name in ("docs", "scripts", "mkdocs.yml", "jetrl_patch", "adapters", *TOP[:4], "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "docs").unlink()
    subprocess.run(["cp", "-r", str(ROOT / "docs"), str(tmp_path / "docs")], check=True)
    page = tmp_path / "docs" / "faq.md"
    page.write_text(page.read_text() + "\n[nowhere](install.md#no-such-heading) [none](none.md) [out](../setup.py)\n")
    done = build(tmp_path / "site", tmp_path)
    assert done.returncode != 0
    assert all(name in done.stderr for name in ("no-such-heading", "none.md", "../setup.py"))
