"""Choose the implementation of the exact ops for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jetrl_patch.exact import dispatch


@contextlib.contextmanager
def dispatched(*choice: str) -> Iterator[str]:
    """Run ``dispatch.configure(*choice)``, yield what it chose, and restore what was chosen before."""
    before = dict(dispatch._chosen)
    try:
        yield dispatch.configure(*choice)
    finally:
        dispatch._chosen.clear()
        dispatch._chosen.update(before)
