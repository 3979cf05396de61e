"""Packing for a GPU machine without a network: what is stripped, the pinned wheels, and packs that are not whole."""

from __future__ import annotations

import re
import struct
import sys
import types
import zipfile
from pathlib import Path

import pytest

from benchmarks.hopper.__main__ import main
from scripts import pack_gpu
from scripts.pack_gpu import FATBIN, MACHINE_CODE, PINS, SUMS, strip

PTX = 1


def fatbin(*entries: tuple[int, int, bytes]) -> bytes:
    """A fatbin of (kind, architecture, code). Its own header has 16 bytes, an entry's 64."""
    heads = [struct.pack("<HHIQ12xI8xQ16x", kind, 0x101, 64, len(code), arch, 0) + code for kind, arch, code in entries]
    return struct.pack("<IHHQ", FATBIN, 1, 16, sum(map(len, heads))) + b"".join(heads)


def library(code: bytes) -> bytearray:
    """An ELF file with device code, text, and a symbol table that is not loaded."""
    sections = [
        (".nv_fatbin", 1, 2, code, 0), (".text", 1, 2, b"host code", 0), (".dynsym", 11, 2, b"loaded symbols", 0),
        (".symtab", 2, 0, b"symbols", 4), (".strtab", 3, 0, b"their names", 0), (".debug_info", 1, 0, b"lines", 0),
        (".debug_loaded", 1, 2, b"mapped", 0),
    ]  # fmt: skip
    names = b"".join(name.encode() + b"\0" for name, *_ in sections)
    sections.append((".names", 3, 0, names + b".names\0", 0))
    body, heads, at = bytearray(64), b"", 0
    for name, kind, flags, data, link in sections:
        heads += struct.pack("<IIQQQQIIQQ", at, kind, flags, 0, len(body), len(data), link, 0, 8, 0)
        body += data + bytes(-len(data) % 8)
        at += len(name) + 1
    body[:4] = b"\x7fELF"
    struct.pack_into("<Q", body, 40, len(body))
    struct.pack_into("<HH", body, 60, len(sections), len(sections) - 1)
    return body + heads


def fa3(width: int, dtype: str) -> bytes:
    """Code with the mangled name of a FlashAttention-3 kernel."""
    return f"flash14Li{width}ENS_10{dtype}EfNS_4arch4Sm90".encode().ljust(64, b".")


def test_what_hopper_does_not_load_becomes_zeros_and_nothing_moves():
    hopper, older, newer, ptx, lone = (text * 8 for text in (b"sm_90 ok", b"sm_80 no", b"sm100 no", b"the PTX ", b"sm_75 no"))
    code = fatbin((MACHINE_CODE, 80, older), (MACHINE_CODE, 90, hopper), (PTX, 90, ptx)) + bytes(8)
    code += fatbin((MACHINE_CODE, 75, lone), (MACHINE_CODE, 100, newer))
    before = library(code)
    after = bytearray(before)
    assert strip(after, "vllm/_C.so") == (5 * 64, 64)
    expected = bytes(before)
    for gone in (older, newer, ptx, lone, b"symbols\0", b"their names", b"lines\0"):
        expected = expected.replace(gone, bytes(len(gone)))
    assert after == expected.replace(b"loaded " + bytes(7), b"loaded symbols") and len(after) == len(before)
    assert all(text in after for text in (hopper, b"host code", b"loaded symbols", b"mapped"))


def test_flash_attention_3_keeps_bf16_of_two_widths():
    kernels = {fa3(width, dtype): width in (64, 128) and dtype == "bfloat16_t"
               for width in (64, 96, 128, 256) for dtype in ("bfloat16_t", "half_t", "float_e4m3_t")}  # fmt: skip
    without_a_name = b"prepare_scheduler".ljust(64, b".")
    code = b"".join(fatbin((MACHINE_CODE, 90, kernel)) for kernel in (*kernels, without_a_name))
    for name, all_stay in (("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so", False), ("vllm/_C_stable_libtorch.abi3.so", True)):
        elf = library(code)
        strip(elf, name)
        assert {kernel: kernel in elf for kernel in kernels} == {kernel: keep or all_stay for kernel, keep in kernels.items()}
        assert without_a_name in elf


def test_kernels_that_no_dense_model_runs_are_found_in_compressed_code(monkeypatch):
    whole = {pack_gpu.ZSTD + b"%d" % n: name.ljust(64, b".") for n, name in enumerate((b"_ZN4vllm8rms_norm", *pack_gpu.UNUSED))}
    reader = types.SimpleNamespace(decompress=lambda code: whole[code.rstrip(b".")])
    module = types.SimpleNamespace(ZstdDecompressor=lambda: types.SimpleNamespace(decompressobj=lambda: reader))
    monkeypatch.setitem(sys.modules, "zstandard", module)
    codes = [code.ljust(64, b".") for code in whole]
    elf = library(b"".join(fatbin((MACHINE_CODE, 90, code)) for code in codes))
    assert strip(elf, "vllm/_C.so") == (64 * len(codes), 64)
    assert [code in elf for code in codes] == [True] + [False] * len(pack_gpu.UNUSED)


def test_a_library_without_device_code_keeps_what_is_loaded():
    elf = library(b"")
    assert strip(elf, "ray/_raylet.so") == (0, 0) and b"host code" in elf and b"their names" not in elf


@pytest.fixture
def packed(tmp_path, monkeypatch, capsys):
    """A pack of one wheel, in parts of 100 bytes."""

    def download(folder: Path) -> None:
        folder.mkdir()
        with zipfile.ZipFile(folder / "some-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("some/__init__.py", "x = 7\n")
            wheel.writestr("some/lib.so", library(fatbin((MACHINE_CODE, 90, b"sm_90 ok" * 8))))
            wheel.writestr("some-1.0.data/purelib/other.py", "y = 8\n")
            wheel.writestr("some-1.0.data/scripts/run", "no")
            wheel.writestr("tests/__init__.py", "would hide this project's")
            wheel.writestr(zipfile.ZipInfo("some/program"), "#!")
            info = zipfile.ZipInfo("some/raylet")
            info.external_attr = 0o755 << 16
            wheel.writestr(info, "#!")

    monkeypatch.setattr(pack_gpu, "download", download)
    monkeypatch.setattr(pack_gpu, "PART_BYTES", 100)
    monkeypatch.setattr(pack_gpu, "FILTERS", None)
    monkeypatch.setattr(pack_gpu, "CHECK", "import some, other; assert (some.x, other.y) == (7, 8)")
    folder = tmp_path / "pack"
    assert main(["--pack", str(folder)]) == 0
    assert re.search(r"wheels \d+\.\d MB, unpacked .* packed .*; 0\.0 minutes", capsys.readouterr().out)
    assert len(list(folder.glob("site.*"))) > 2 and {file.suffix for file in folder.iterdir()} >= {".json", ".0", ".1"}
    return folder


def test_a_pack_comes_back_as_it_was(packed, tmp_path, capsys):
    site = tmp_path / "site"
    assert main(["--unpack", str(packed), str(site)]) == 0
    assert f"export PYTHONPATH={site}" in capsys.readouterr().out
    files = {str(file.relative_to(site)) for file in site.rglob("*.*") if file.parent.name != "__pycache__"}
    assert files == {"some/__init__.py", "some/lib.so", "other.py"}
    assert site.joinpath("some/raylet").stat().st_mode & 0o111 and not site.joinpath("some/program").stat().st_mode & 0o111
    assert main(["--unpack", str(packed), str(site)]) == 2 and "required a new folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda pack: (pack / "site.1").write_bytes(b"x" * 100), r"site\.1 of SHA-256 \w+, found \w+\. Copy it again"),
        (lambda pack: (pack / "site.1").unlink(), r"site\.1 of SHA-256 \w+, found no file\. Copy it again"),
        (lambda pack: (pack / SUMS).unlink(), "sums.json, which --pack writes last"),
    ],
)
def test_a_pack_that_is_not_whole_is_one_error(packed, tmp_path, capsys, spoil, says):
    spoil(packed)
    assert main(["--unpack", str(packed), str(tmp_path / "site")]) == 2
    said = capsys.readouterr().err
    assert re.search(says, said) and said.count("\n") == 1 and not (tmp_path / "site").exists()


def test_what_the_machine_lacks_is_named(packed, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pack_gpu, "CHECK", "import some, six_of_another")
    assert main(["--unpack", str(packed), str(tmp_path / "site")]) == 2
    assert "ModuleNotFoundError: No module named 'six_of_another'" in capsys.readouterr().err


def test_an_interrupted_pack_is_none(packed, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(pack_gpu, "split", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        main(["--pack", str(packed)])
    assert not list(packed.iterdir())
    assert main(["--unpack", str(packed), str(tmp_path / "site")]) == 2 and SUMS in capsys.readouterr().err


def test_the_pins_are_those_of_verl_on_cuda():
    """What both files pin has the same version in both."""

    def pins(file: Path) -> dict[str, str]:
        found = re.findall(r"(?m)^([\w.-]+)(?:\[\w+\])?==(\S+)", file.read_text())
        return {name.lower(): version for name, version in found}

    ours, verl = pins(PINS), pins(PINS.with_name("cuda-verl.txt"))
    assert ours.keys() & verl.keys() == {"verl", "vllm", "transformers", "transferqueue", "tensordict", "ray"}
    assert not [name for name in ours.keys() & verl.keys() if ours[name] != verl[name]]
