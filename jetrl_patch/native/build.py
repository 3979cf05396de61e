"""Compile the C sources for this processor at first use and keep the result in the user's cache.

Each instruction set of ``SETS`` has a library of its own, all with the same bits. The one in use is that of the widest set that
processor and compiler both support, or of the set that ``JETRL_CPU_ISA`` names. Its file name contains the set and a hash of the
sources and the compiler, so a new release, a new compiler or another machine with the same home folder never loads the wrong
library. The file ends with a hash of its contents, which the loader ignores. A file cut short by a full disk or a broken copy
would load and then kill the process with a bus error. The hash shows this, and the library is compiled again. Files that another
user could have written are not loaded.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from jetrl_patch.config.environment import read_variable
from jetrl_patch.errors import ConfigError, JetrlError, explain, unknown

logger = logging.getLogger(__name__)

_COMPILER, _CACHE = "C compiler for the native CPU kernels", "cache of the native CPU kernels"
_INSTALL, _REPAIR = (f'{do}, or use backend="torch" (slower, the same contract)' for do in ("install one", "repair the compiler"))
_HASH = hashlib.sha256
SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.c", "gemm.c", "delta.c", "digest.c"))
HEADER = Path(__file__).with_name("numbers.h")
# The sources write each FMA explicitly. A compiler that turned a * b + c into one would change bits.
FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_VARIABLE = "JETRL_CPU_ISA"


@dataclass(frozen=True)
class InstructionSet:
    """An instruction set that the kernels are compiled for.

    Attributes:
        flags: compiler flags.
        needs: flags that /proc/cpuinfo lists for a processor with this set.
        speed: measured speed of the FP8 product (docs/benchmarks/cpu.md).
    """

    flags: tuple[str, ...]
    needs: frozenset[str]
    speed: str = ""


def _x86(flags: str, needs: str, below: InstructionSet | None = None, speed: str = "") -> InstructionSet:
    more = below or InstructionSet((), frozenset())
    return InstructionSet((*more.flags, *flags.split()), more.needs | set(needs.split()), speed)


_AVX2 = _x86("-mavx2 -mfma -mf16c", "avx2 fma f16c", speed="as fast as with AVX-512")
_AVX512 = _x86(
    "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512cd -mprefer-vector-width=512",
    "avx512f avx512bw avx512dq avx512vl avx512cd",
    _AVX2,
    "about half as fast as with AVX-512-BF16",
)
#: name -> set, the widest first. "portable" runs everywhere; on aarch64 it uses Neon.
SETS = {
    "avx512_bf16": _x86("-mavx512vnni -mavx512vbmi -mavx512bf16", "avx512_vnni avx512vbmi avx512_bf16", _AVX512),
    "avx512": _AVX512,
    "avx2": _AVX2,
    "portable": InstructionSet((), frozenset(), "about 80 times slower than with AVX2"),
}


def compiler() -> str | None:
    """The first C compiler found among ``$CC``, gcc, clang and cc, or None."""
    for name in (os.environ.get("CC"), "gcc", "clang", "cc"):
        found = shutil.which(name) if name else None
        if found:
            return found
    return None


def available() -> tuple[bool, str]:
    """Whether the kernels can be built and loaded here, and the instruction set or the reason. Compiles them if necessary.

    Raises ConfigError if ``JETRL_CPU_ISA`` names a set that is unknown, or that the processor lacks.
    """
    try:
        found = instruction_set()
    except ConfigError:
        raise
    except JetrlError as error:
        return False, str(error)
    return True, f"compiled for {found}"


def supported() -> list[str]:
    """The sets that this processor supports, the widest first."""
    has = _features()
    on_x86 = platform.machine() in ("x86_64", "AMD64")
    return [name for name, one in SETS.items() if one.needs <= has and (on_x86 or not one.needs)]


@functools.cache
def multiplies_bf16() -> bool:
    """Whether this processor multiplies BF16. Without that, torch's BF16 products have a tenth of FP32's speed."""
    return _wanted()[0] == "avx512_bf16"


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded kernels.

    Raises:
        ConfigError: ``JETRL_CPU_ISA`` names a set that this processor lacks.
        JetrlError: there is no compiler, or it does not work; the cache cannot be written, or other users can write it.
    """
    return _loaded()[1]


def instruction_set() -> str:
    """The set for which ``library`` was compiled. Raises the same errors."""
    return _loaded()[0]


@functools.lru_cache(maxsize=1)
def _loaded() -> tuple[str, ctypes.CDLL]:
    """The set and its library. A process chooses once."""
    wanted, failed = _wanted(), ""
    for name in wanted:
        try:
            found = load(name)
        except _CompilerError as error:
            if name == wanted[-1]:
                raise
            failed = failed or str(error)
        else:
            if failed:
                logger.warning("%s Until then the CPU kernels use %s, %s.", failed, name, SETS[name].speed)
            return name, found
    raise AssertionError("portable is always among the sets, or one set is asked for")


def _wanted() -> list[str]:
    """The sets to try, the widest first."""
    here, asked = supported(), read_variable(_VARIABLE)
    if not asked:
        return here
    if asked not in SETS:
        raise ConfigError(unknown(f"{_VARIABLE}={asked}", [asked], SETS))
    if asked not in here:
        lacks = ", ".join(sorted(SETS[asked].needs - _features())) or f"none of it: {platform.machine()}"
        fix = f"unset {_VARIABLE}, or set it to {' or '.join(here)}"
        what, found = f"{_VARIABLE}={asked}", f"one without {lacks}"
        raise ConfigError(explain(what, required="a processor that has it", found=found, fix=fix))
    return [asked]


def load(name: str) -> ctypes.CDLL:
    """The kernels of one set of ``SETS``, compiled if the cache has no library for it. Raises the same errors as ``library``."""
    cc = compiler()
    if cc is None:
        raise JetrlError(explain(_COMPILER, required="gcc, clang or cc on PATH, or CC", found="none", fix=_INSTALL))
    target = _cache_dir() / f"kernels-{name}-{_fingerprint(cc, name)}.so"
    try:
        if not is_whole(target):
            _compile(cc, name, target)
        _require_own(target)
        return ctypes.CDLL(str(target))
    except OSError as error:
        what, fix = f"{_CACHE}, {target.parent}", "set JETRL_CACHE_DIR to such a folder"
        raise JetrlError(explain(what, required="a folder to write and load libraries in", found=error, fix=fix)) from error


class _CompilerError(JetrlError):
    """The compiler failed."""


def is_whole(file: Path) -> bool:
    """Whether a library in the cache is complete: its last bytes are the hash of the bytes before them."""
    try:
        content = file.read_bytes()
    except OSError:
        return False
    size = _HASH().digest_size
    return _HASH(content[:-size]).digest() == content[-size:]


def _require_own(file: Path) -> None:
    """Raise JetrlError if another user than this one and root could have written the file, or can replace it in its folder."""
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
    raise JetrlError(explain(_CACHE, required=required, found=found, fix=fix))


def _cache_dir() -> Path:
    chosen, base = read_variable("JETRL_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    if chosen:
        return Path(chosen)
    try:
        return (Path(base) if base else Path.home() / ".cache") / "jetrl_patch"
    except RuntimeError as error:  # neither HOME nor an entry in the system's list of users
        fix = "set JETRL_CACHE_DIR to a folder"
        raise JetrlError(explain(_CACHE, required="a home folder", found=error, fix=fix)) from error


def _fingerprint(cc: str, name: str) -> str:
    try:
        run = subprocess.run([cc, "--version"], capture_output=True, text=True, errors="replace")
        wrong = f"exit status {run.returncode} from {cc} --version" if run.returncode else ""
    except OSError as error:
        wrong = str(error)
    if wrong:
        raise JetrlError(explain(_COMPILER, required="one that works", found=wrong, fix=_REPAIR))
    sources = (source.read_text() for source in (*SOURCES, HEADER))
    parts = (*sources, " ".join(FLAGS + SETS[name].flags), run.stdout, platform.machine())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _features() -> frozenset[str]:
    """The processor's flags in /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return frozenset()
    return frozenset(word for line in lines if line.startswith("flags") for word in line.split(":", 1)[1].split())


def _compile(cc: str, name: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may start at once. Each compiles to its own file, and the rename is atomic.
    handle, scratch = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        for openmp in (("-fopenmp",), ()):  # without OpenMP, the kernels use one thread and give the same bits
            command = [cc, *FLAGS, *SETS[name].flags, *openmp, *map(str, SOURCES), "-o", scratch, "-lm"]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode == 0:
                content = Path(scratch).read_bytes()
                Path(scratch).write_bytes(content + _HASH(content).digest())
                os.chmod(scratch, 0o755)  # mkstemp's files are private, but users may share root's libraries
                os.replace(scratch, target)
                return
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        found = next((line for line in lines if "error" in line), lines[0] if lines else f"exit status {result.returncode}")
        what = f"{cc} for the native CPU kernels ({name})"
        raise _CompilerError(explain(what, required="a compiled library", found=found.strip(), fix=_REPAIR))
    finally:
        Path(scratch).unlink(missing_ok=True)
