"""A fake framework that is not imported yet, and fake adapters that replace the real ones."""

from __future__ import annotations

import importlib
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jetrl_patch import registry, session
from jetrl_patch.registry import Adapter


@pytest.fixture
def framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package ``fakefw`` with modules ``a`` and ``b``, not imported yet."""
    root = tmp_path / "fakefw"
    root.mkdir()
    (root / "__init__.py").write_text("")
    for name in "ab":
        (root / f"{name}.py").write_text(
            textwrap.dedent(f"""
            def function(): return "{name}"
            class Class:
                @staticmethod
                def static(): return "static {name}"
            class Heir(Class): pass
            """)
        )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield root
    for name in [name for name in sys.modules if name.split(".")[0] == "fakefw"]:
        del sys.modules[name]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, framework: Path) -> Callable[..., None]:
    """Replace the real adapters with these."""

    def put(*adapters: Adapter) -> None:
        monkeypatch.setattr(registry, "adapters", lambda: adapters)

    return put


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """The environment before the test; the test must leave it unchanged."""
    before = dict(os.environ)
    yield before
    session.disable()
    assert dict(os.environ) == {**before, "PYTEST_CURRENT_TEST": os.environ["PYTEST_CURRENT_TEST"]}
