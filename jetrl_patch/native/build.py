"""Compile the C sources for this machine at first use and keep the result in the user's cache.

The file name contains a hash of the sources, the compiler and the processor, so a new release, a new compiler or
another machine with the same home directory never loads a stale library.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from jetrl_patch.env import read_variable
from jetrl_patch.errors import JetrlError, explain

SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.c", "digest.c"))
# The compiler contracts a * b + c to FMA. That is fixed at compile time, so every caller gets the same bits.
FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
)


def compiler() -> str | None:
    """The first C compiler found among ``$CC``, gcc, clang and cc, or None."""
    for name in (os.environ.get("CC"), "gcc", "clang", "cc"):
        found = shutil.which(name) if name else None
        if found:
            return found
    return None


def available() -> tuple[bool, str]:
    """Whether the kernels can be built and loaded here, and why not. Compiles them if necessary."""
    try:
        library()
    except (JetrlError, OSError) as error:
        return False, str(error)
    return True, "compiled for this processor"


@functools.lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The loaded kernels.

    Raises:
        JetrlError: there is no compiler, or compilation failed.
    """
    cc = compiler()
    if cc is None:
        raise JetrlError(
            explain(
                "C compiler for the native CPU kernels",
                required="gcc, clang or cc on PATH, or CC",
                found="none",
                fix='install one, or use backend="torch" (slower, the same contract)',
            )
        )
    target = _cache_dir() / f"kernels-{_fingerprint(cc)}.so"
    if not target.exists():
        _compile(cc, target)
    return ctypes.CDLL(str(target))


def _cache_dir() -> Path:
    chosen = read_variable("JETRL_CACHE_DIR", "")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(chosen) if chosen else Path(base) / "jetrl_patch"


def _fingerprint(cc: str) -> str:
    version = subprocess.run([cc, "--version"], capture_output=True, text=True, check=True).stdout
    parts = (*(source.read_text() for source in SOURCES), " ".join(FLAGS), version, platform.machine(), _processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _processor() -> str:
    """The processor's model and feature flags, on which ``-march=native`` depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features")))


def _compile(cc: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    wide = ("-mprefer-vector-width=512",) if "avx512f" in _processor() else ()
    # Several processes may start at once. Each compiles to its own file, and the rename is atomic.
    handle, scratch = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        for openmp in (("-fopenmp",), ()):  # without OpenMP the kernels run on one thread, with the same bits
            command = [cc, *FLAGS, *wide, *openmp, *map(str, SOURCES), "-o", scratch, "-lm"]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode == 0:
                os.replace(scratch, target)
                return
        raise JetrlError(
            f"{cc} could not compile the native CPU kernels:\n{result.stderr.strip()}\n"
            'Repair the compiler, or use backend="torch" (slower, the same contract).'
        )
    finally:
        Path(scratch).unlink(missing_ok=True)
