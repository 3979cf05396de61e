"""A hook of MkDocs: documents of the repository's top level become pages of the site, with their links rewritten."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

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
