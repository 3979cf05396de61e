"""MkDocs hooks: turn documents outside docs/ into pages of the site, and keep pages from loading anything over the network.

Links are written as on a code host, from file to file. A link to one of those documents becomes a link to its page.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).resolve().parents[1]

#: file in the repository -> page of the site
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
    "README.md": "index.md",
}
_LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?\)")


def rewritten(text: str, source: str) -> str:
    """Turn relative links of a repository file into links between pages; others stay and fail in strict mode.

    Args:
        source: the file's path in the repository.
    """

    def page(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        inside = target.removeprefix("docs/")
        place = PAGES.get(target) or (inside if inside != target else match[2])
        return f"{match[1]}{place}{match[3] or ''})"

    return _LINK.sub(page, text)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages whose files are outside docs/."""
    for source, page in PAGES.items():
        if not (ROOT / "docs" / page).exists():
            text = (ROOT / source).read_text(encoding="utf-8")
            files.append(File.generated(config, page, content=rewritten(text, source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn a page's links to documents outside docs/ into links to their pages."""
    if page.file.src_uri in PAGES.values():
        return markdown
    here = posixpath.dirname(page.file.src_uri)

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", here, match[2]))
        place = posixpath.relpath(PAGES[target], here or ".") if target in PAGES else match[2]
        return f"{match[1]}{place}{match[3] or ''})"

    return _LINK.sub(link, markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Use assets/worker.js, because Material's search loads a script over the network if a page is opened as a file."""
    script = get_relative_url("assets/worker.js", page.url)
    return output.replace('src="https://unpkg.com/iframe-worker/shim"', f'src="{script}"')
