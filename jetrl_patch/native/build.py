"""Compile the C sources for this machine at first use and keep the result in the user's cache.

The file name contains a hash of the sources, the compiler and the processor, so a new release, a new compiler or
another machine with the same home directory never loads a stale library. The file ends with a hash of itself, which the
linker ignores: a file that a full disk or a broken copy cut short would load and then end the process with a bus error, so it
is compiled anew. What somebody else could have put there is not loaded.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from jetrl_patch.env import read_variable
from jetrl_patch.errors import JetrlError, explain

_REPAIR = 'repair the compiler, or use backend="torch" (slower, the same contract)'
_HASH = hashlib.sha256
SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.c", "gemm.c", "digest.c"))
HEADER = Path(__file__).with_name("numbers.h")
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
    except JetrlError as error:
        return False, str(error)
    return True, "compiled for this processor"


@functools.lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The loaded kernels.

    Raises:
        JetrlError: there is no compiler, or it does not work; the cache cannot be written, or others can write it.
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
    try:
        if not is_whole(target):
            _compile(cc, target)
        _require_own(target)
        return ctypes.CDLL(str(target))
    except OSError as error:
        what, fix = f"cache of the native CPU kernels, {target.parent}", "set JETRL_CACHE_DIR to such a folder"
        raise JetrlError(
            explain(what, required="a folder to write and load libraries in", found=error, fix=fix)
        ) from error


def is_whole(file: Path) -> bool:
    """Whether a library in the cache is complete: its last bytes are the hash of those before them."""
    try:
        content = file.read_bytes()
    except OSError:
        return False
    size = _HASH().digest_size
    return _HASH(content[:-size]).digest() == content[-size:]


def _require_own(file: Path) -> None:
    """Raise JetrlError if anybody but this user and root could have written the file, or can replace it in its folder."""
    own, folder = file.stat(), file.parent.stat()
    if own.st_uid not in (os.getuid(), 0):
        found = f"{file} of user {own.st_uid}"
    elif own.st_mode & stat.S_IWOTH:
        found = f"{file}, which everybody can write"
    elif folder.st_mode & stat.S_IWOTH and not folder.st_mode & stat.S_ISVTX:
        found = f"{file.parent}, which everybody can write"
    else:
        return
    required, fix = "files of this user or of root", "remove it, or set JETRL_CACHE_DIR to a folder of your own"
    raise JetrlError(explain("cache of the native CPU kernels", required=required, found=found, fix=fix))


def _cache_dir() -> Path:
    chosen, base = read_variable("JETRL_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    if chosen:
        return Path(chosen)
    try:
        return (Path(base) if base else Path.home() / ".cache") / "jetrl_patch"
    except RuntimeError as error:  # neither HOME nor an entry in the system's list of users
        raise JetrlError(
            explain(
                "cache of the native CPU kernels", required="a home folder", found=error, fix="set JETRL_CACHE_DIR to a folder"
            )
        ) from error


def _fingerprint(cc: str) -> str:
    try:
        run = subprocess.run([cc, "--version"], capture_output=True, text=True, errors="replace")
        wrong = f"exit status {run.returncode} from {cc} --version" if run.returncode else ""
    except OSError as error:
        wrong = str(error)
    if wrong:
        what = "C compiler for the native CPU kernels"
        raise JetrlError(explain(what, required="one that works", found=wrong, fix=_REPAIR))
    sources = (source.read_text() for source in (*SOURCES, HEADER))
    parts = (*sources, " ".join(FLAGS), run.stdout, platform.machine(), _processor())
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
                content = Path(scratch).read_bytes()
                Path(scratch).write_bytes(content + _HASH(content).digest())
                os.chmod(scratch, 0o755)  # mkstemp's files are for their owner alone, and users may share what root has compiled
                os.replace(scratch, target)
                return
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        found = next((line for line in lines if "error" in line), lines[0] if lines else f"exit status {result.returncode}")
        raise JetrlError(
            explain(f"{cc} for the native CPU kernels", required="a compiled library", found=found.strip(), fix=_REPAIR)
        )
    finally:
        Path(scratch).unlink(missing_ok=True)
