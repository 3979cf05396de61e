"""Unpack the Python of vLLM's CUDA wheels into build/cuda-python: ``python -m scripts.anchors.cuda_python [VERSION ...]``.

``make engine-matrix`` tests on it how an engine resolves each mode on a GPU. A wheel is downloaded, read and deleted: of about
300 MB each, 40 MB stay. Nothing is installed.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import zipfile
from pathlib import Path

from scripts.anchors.patches import ROOT
from scripts.anchors.refresh import download

FOLDER = ROOT / "build" / "cuda-python"
#: what verl and OpenRLHF pin, what the tests run on, and the newest supported one
VERSIONS = ("0.24.0", "0.29.0", "0.30.0", "0.32.0")
#: written last: module of each compiled library of the wheel -> the schemas of its operators
LIBRARIES = "libraries.json"
#: a schema as a library holds it, such as ``rms_norm(Tensor! result, Tensor input, Tensor weight, float epsilon) -> ()``
_SCHEMA = re.compile(rb"(?<=\0)[A-Za-z_][\w.:]*\([\x20-\x7e]*\) -> [\x20-\x7e]+(?=\0)")


def unpacked(version: str) -> Path | None:
    """The folder to put on PYTHONPATH; None if it is not there."""
    folder = FOLDER / version
    return folder if (folder / LIBRARIES).exists() else None


def unpack(version: str) -> Path:
    """Download and unpack a wheel, unless that is done."""
    if (found := unpacked(version)) is not None:
        return found
    folder, wheel = FOLDER / version, download("vllm", version)
    if wheel is None:
        raise SystemExit(f"required the CUDA wheel of vLLM {version}, which pip did not find. Check VERSIONS and the index.")
    shutil.rmtree(folder, ignore_errors=True)
    libraries: dict[str, list[str]] = {}
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        files.extractall(folder, [name for name in names if name.endswith((".py", ".json")) or ".dist-info/" in name])
        for name in names:
            if name.endswith(".abi3.so"):
                module = name.removesuffix(".abi3.so").replace("/", ".")
                libraries[module] = sorted({found.decode() for found in _SCHEMA.findall(files.read(name))})
    (folder / LIBRARIES).write_text(json.dumps(libraries, indent=1))
    wheel.unlink()
    return folder


def main() -> None:
    """Unpack the versions that are named, or all."""
    for version in sys.argv[1:] or VERSIONS:
        print(f"vLLM {version}: {unpack(version).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
