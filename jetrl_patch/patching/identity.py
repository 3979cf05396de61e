"""Which jetrl_patch this is: the version and a digest of the installed sources, since two commits may share a version."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from jetrl_patch._versions import VERSION
from jetrl_patch.patching.discovery import outside

#: suffixes of the files that compute
SOURCES = (".py", ".c", ".h")
#: hexadecimal digits of the digest that are shown
DIGITS = 12


@functools.cache
def identity() -> str:
    """``VERSION+DIGEST``, and the other packages that offer adapters. A process keeps what it was when first asked.

    Equal for a wheel and for the clone it was built from.
    """
    found = {f"{prefix}{path.relative_to(root).as_posix()}": path for prefix, root in _roots() for path in root.rglob("*")}
    digest = hashlib.sha256()
    for name, path in sorted(found.items()):
        if path.suffix in SOURCES:
            digest.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return " with ".join([f"{VERSION}+{digest.hexdigest()[:DIGITS]}", *outside()])


def _roots() -> list[tuple[str, Path]]:
    """What names begin with, and the folder. In a clone the adapters lie beside the package, in a wheel inside."""
    package = Path(__file__).parent.parent
    beside = package.parent / "adapters"
    return [("", package)] if (package / "adapters").is_dir() else [("", package), ("adapters/", beside)]
