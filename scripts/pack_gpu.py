"""Pack vLLM, verl and what they import for a Hopper machine without a network: ``benchmarks.hopper --pack`` and ``--unpack``.

The wheels of ``requirements/hopper.txt`` hold machine code for many GPUs, and tables that no loader reads. The packer overwrites
with zeros what an H100 or H200 does not load; nothing moves, so that every offset in a library stays true, and zeros compress
to nothing. One archive and its digest remain. Unpacking needs Python's standard library alone.
"""

from __future__ import annotations

import fnmatch
import hashlib
import io
import json
import lzma
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PINS = Path(__file__).resolve().parent.parent / "requirements" / "hopper.txt"
#: parts of the archive, to be copied one by one where that is limited; and the file of their SHA-256
PART, PART_BYTES, SUMS = "site.", 32 << 20, "sums.json"
#: what the runner's engines, trainers and workers import, with the agent that ray does not run without
CHECK = "import " + ", ".join([
    "vllm.entrypoints.llm", "vllm.v1.worker.gpu_model_runner", "verl.trainer.main_ppo",
    "verl.workers.rollout.vllm_rollout.vllm_async_server", "ray.dashboard.agent",
])  # fmt: skip
#: the wheels' platforms; pip compares them by name, so each version of glibc is listed
PLATFORMS = ["manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64"] + [
    f"manylinux_2_{version}_x86_64" for version in range(5, 36)
]
#: what no dense model on Hopper and no part of the runner reads
DROP = (
    "vllm/vllm-rs", "vllm/_rust_*", "vllm/third_party/fmha_sm100/*", "vllm/vllm_flash_attn/_vllm_fa2_C*", "vllm/_qutlass_C*",
    "vllm/_flashmla*", "vllm/third_party/deep_gemm/_C.cpython-31[0134]-*", "vllm/benchmarks/*", "tvm_ffi/3rdparty/*",
    "ray/jars/*", "ray/cpp/*", "ray/rllib/*", "ray/serve/*", "ray/tune/*", "ray/train/*", "ray/dashboard/client/*",
    "tests/*", "scripts/*", "recipe/*", "tutorial/*",  # some wheels install them, and they would hide this project's
    "*/__pycache__/*", "*.pyi", "*.a", "*/tests/*.py", "*.js.map",
)  # fmt: skip
#: in a compiled FlashAttention-3 kernel: head width and dtype
FA3 = re.compile(rb"Li(\d+)ENS_\d+(bfloat16_t|half_t|float_e4m3_t)EfNS_4arch4Sm90")
KERNELS = {(width, b"bfloat16_t") for width in (b"64", b"128")}
#: names of kernels, in whose files no kernel is for dense models in BF16 or FP8
UNUSED = (b"paged_attention_v", b"6marlin6Marlin", b"selective_scan", b"_w4a8_", b"_q_gemm_", b"fp32_router_gemm")
#: how compressed device code begins, and what reads it: PyPI's zstandard, which the packer gets for itself
ZSTD, ZSTANDARD = b"\x28\xb5\x2f\xfd", "zstandard==0.25.0"
#: with a large dictionary, because ray's libraries repeat each other
FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 192 << 20}]
FATBIN, MACHINE_CODE, SM_90 = 0xBA55ED50, 2, 90
SYMBOLS, LOADED = 2, 2  # a section's type, and a flag


class Section(NamedTuple):
    name: str
    type: int
    flags: int
    offset: int
    size: int
    link: int


def sections(elf: bytes | bytearray) -> list[Section]:
    """The sections of a 64-bit ELF file. ``link`` is an index into them."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    count, names = struct.unpack_from("<HH", elf, 60)
    heads = [struct.unpack_from("<IIQQQQII", elf, table + 64 * i) for i in range(count)]
    base = heads[names][4] if heads else 0
    text = lambda at: bytes(elf[at : elf.find(b"\0", at)]).decode()  # noqa: E731
    return [Section(text(base + h[0]), h[1], h[2], h[4], h[5], h[6]) for h in heads]


class Entry(NamedTuple):
    """Code for one architecture. Entries of the same ``fatbin`` are alternatives, of which the driver loads one."""

    fatbin: int
    kind: int
    arch: int
    offset: int
    size: int


def entries(elf: bytes | bytearray, section: Section) -> Iterator[Entry]:
    """The entries of a ``.nv_fatbin`` section."""
    at, end = section.offset, section.offset + section.size
    while at + 16 <= end:
        magic, _, head, length = struct.unpack_from("<IHHQ", elf, at)
        if magic != FATBIN:  # padding
            at += 8
            continue
        place, stop = at + head, at + head + length
        while place < stop:
            kind, _, own, size = struct.unpack_from("<HHIQ", elf, place)
            (arch,) = struct.unpack_from("<I", elf, place + 28)
            yield Entry(at, kind, arch, place + own, size)
            place += own + size
        at = -(-stop // 8) * 8


def strip(elf: bytearray, name: str) -> tuple[int, int]:
    """Overwrite in place what Hopper does not load. Returns the bytes of device code before and after.

    A kernel without machine code for sm_90 fails when it is launched, and only then.
    """
    found = sections(elf)
    code = [entry for section in found if section.name == ".nv_fatbin" for entry in entries(elf, section)]
    kept = 0
    for entry in code:
        keep = entry.kind == MACHINE_CODE and entry.arch == SM_90
        if keep:
            text = expanded(bytes(elf[entry.offset : entry.offset + entry.size]))
            kernels = set(FA3.findall(text)) if "_vllm_fa3_C" in name else set()
            keep = (not kernels or bool(kernels & KERNELS)) and not any(word in text for word in UNUSED)
        if keep:
            kept += entry.size
        else:
            elf[entry.offset : entry.offset + entry.size] = bytes(entry.size)
    tables = [each for section in found if section.type == SYMBOLS for each in (section, found[section.link])]
    for section in tables + [section for section in found if section.name.startswith(".debug")]:
        if not section.flags & LOADED:
            elf[section.offset : section.offset + section.size] = bytes(section.size)
    return sum(entry.size for entry in code), kept


def expanded(code: bytes) -> bytes:
    """The machine code of an entry, which may be compressed."""
    if not code.startswith(ZSTD):
        return code
    import zstandard

    found: bytes = zstandard.ZstdDecompressor().decompressobj().decompress(code)  # padding may follow
    return found


def download(folder: Path) -> None:
    """The pinned wheels for Python 3.12 on x86-64 Linux, from this machine's index. What has only a source is built.

    A folder in ``folder`` gets ``ZSTANDARD`` for the Python that runs.

    Raises:
        ValueError: pip failed, and has said why.
    """
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    target = ["--python-version=3.12", "--implementation=cp", *(f"--platform={name}" for name in PLATFORMS)]
    try:
        subprocess.run([*pip, "download", "--no-deps", *target, "-d", str(folder), "-r", str(PINS)], check=True)
        for source in folder.glob("*.tar.gz"):
            subprocess.run([*pip, "wheel", "--no-deps", "-w", str(folder), str(source)], check=True)
        subprocess.run([*pip, "install", "--no-deps", "--target", str(folder / "here"), ZSTANDARD], check=True)
    except subprocess.CalledProcessError:
        raise ValueError(f"--pack: required the wheels of {PINS}, found no way to get them (above).") from None


def stage(wheels: Path, tree: Path) -> None:
    """Unzip every wheel into one folder, stripped."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                name = re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", info.filename)
                if info.is_dir() or ".data/" in name or any(fnmatch.fnmatch(name, pattern) for pattern in DROP):
                    continue
                data = bytearray(archive.read(info))
                if data.startswith(b"\x7fELF"):
                    before, after = strip(data, name)
                    if before:
                        print(f"{name}: device code {before / 1e6:.1f} -> {after / 1e6:.1f} MB", flush=True)
                target = tree / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
                target.chmod(0o755 if info.external_attr >> 16 & 0o111 else 0o644)


def pack(folder: Path) -> None:
    """Download, strip and pack into ``folder``. The digests are written last, so that an interrupted pack is none."""
    start, sizes = time.monotonic(), {}
    folder.mkdir(parents=True, exist_ok=True)
    for old in (folder / SUMS, *folder.glob(f"{PART}*")):
        old.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        wheels, tree, packed = Path(work, "wheels"), Path(work, "tree"), Path(work, "packed")
        download(wheels)
        sys.path.append(str(wheels / "here"))
        stage(wheels, tree)
        # like files stand side by side, so that one is packed as a repetition of the other
        files = sorted(filter(Path.is_file, tree.rglob("*")), key=lambda file: (file.suffix, file.name, str(file)))
        with lzma.open(packed, "wb", filters=FILTERS) as raw, tarfile.open(fileobj=raw, mode="w|") as tar:
            for file in files:
                tar.add(file, str(file.relative_to(tree)))
        for what, there in {"wheels": wheels.glob("*.whl"), "unpacked": files, "packed": [packed]}.items():
            sizes[what] = sum(file.stat().st_size for file in there) / 1e6
        split(packed, folder)
    minutes = (time.monotonic() - start) / 60
    print(", ".join(f"{what} {size:.1f} MB" for what, size in sizes.items()) + f"; {minutes:.1f} minutes")


def split(packed: Path, folder: Path) -> None:
    """Cut the archive into parts, and write their digests."""
    data, sums = packed.read_bytes(), {}
    for number, at in enumerate(range(0, len(data), PART_BYTES)):
        part = data[at : at + PART_BYTES]
        (folder / f"{PART}{number}").write_bytes(part)
        sums[f"{PART}{number}"] = hashlib.sha256(part).hexdigest()
    (folder / SUMS).write_text(json.dumps(sums, indent=1) + "\n")


def unpack(folder: Path, site: Path) -> None:
    """Verify the parts, unpack them, and import what the runner imports. ``site`` exists only if it is whole.

    Raises:
        ValueError: a part is missing or wrong, ``site`` exists, or this machine lacks something; the message says which.
    """
    if site.exists():
        raise ValueError(f"--unpack: required a new folder, found {site}. Remove it, or choose another one.")
    sums = json.loads((folder / SUMS).read_text()) if (folder / SUMS).exists() else {}
    for name, digest in sums.items():
        found = hashlib.sha256((folder / name).read_bytes()).hexdigest() if (folder / name).exists() else "no file"
        if found != digest:
            raise ValueError(f"--unpack: required {folder / name} of SHA-256 {digest}, found {found}. Copy it again.")
    if not sums:
        raise ValueError(f"--unpack: required {folder / SUMS}, which --pack writes last. Copy it, or repeat --pack.")
    data = b"".join((folder / name).read_bytes() for name in sums)
    beside = site.with_name(f"{site.name}.part")
    shutil.rmtree(beside, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:xz") as tar:
        tar.extractall(beside, filter="data")
    beside.rename(site)
    path = os.pathsep.join([str(site.absolute()), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run([sys.executable, "-c", CHECK], env=os.environ | {"PYTHONPATH": path}, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise ValueError(f"--unpack: {CHECK!r} fails on this machine: {done.stderr.strip().splitlines()[-1]}")
    print(f"unpacked. Next: export PYTHONPATH={path} && pip install --no-deps --no-build-isolation -e .")
