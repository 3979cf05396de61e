"""Hooks of MkDocs: documents of the top level become pages of the site, and no page loads anything from a network."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).resolve().parents[1]

#: file of the repository -> page of the site
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/README.md": "examples.md",
    "README.md": "index.md",
}
_LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?\)")


def rewritten(text: str, source: str) -> str:
    """Relative links of a file of the repository as links between pages; a link to anything else stays and fails strictly.

    Args:
        source: where the text stands in the repository.
    """

    def page(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        inside = target.removeprefix("docs/")
        place = PAGES.get(target) or (inside if inside != target else match[2])
        return f"{match[1]}{place}{match[3] or ''})"

    return _LINK.sub(page, text)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that have no file under docs/."""
    for source, page in PAGES.items():
        if not (ROOT / "docs" / page).exists():
            text = (ROOT / source).read_text(encoding="utf-8")
            files.append(File.generated(config, page, content=rewritten(text, source)))
    return files


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Material's search loads a script from a network where a page is opened as a file; assets/worker.js takes its place."""
    script = get_relative_url("assets/worker.js", page.url)
    return output.replace('src="https://unpkg.com/iframe-worker/shim"', f'src="{script}"')
