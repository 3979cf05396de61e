"""Compile every kernel for Hopper ahead of time, to inspect registers, spills, shared memory and PTX without a GPU.

``specs`` lists the kernels.
"""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from jetrl_patch.kernels.common import COMPILER
from jetrl_patch.kernels.formats import BLOCK
from jetrl_patch.kernels.gemm_common import PINNED

HOPPER = GPUTarget("cuda", 90, 32)

#: in the text of nvdisasm: a label, a jump to one, and an instruction after its address and predicate
_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_JUMP = re.compile(r"\bBRA\b.*`\((\.L_x_\d+)\)")
_OPCODE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")


class Spec(NamedTuple):
    """One kernel with representative arguments.

    ``types`` gives the type of every argument that is not a constexpr (``"*bf16"``, ``"i32"``,
    ``"tensordesc<fp8e4nv[128, 128]>"``), in the kernel's order. ``aligned`` lists integers that are multiples of 16;
    pointers are always 16-byte aligned.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constexprs: Mapping[str, Any] = {}
    options: Mapping[str, Any] = {}
    aligned: tuple[str, ...] = ()


# ---- Shorthand of the specs ------------------------------------------------------------------------

SCALES, OUTS = ("pow2", "fp32"), ("bf16", "fp32")


def box(rows: int, columns: int = BLOCK) -> str:
    """Triton's type name for a TMA descriptor with this box."""
    return f"tensordesc<fp8e4nv[{rows},{columns}]>"


def typed(text: str) -> dict[str, str]:
    """``"*bf16 q k; i32 T"`` as argument -> Triton's type."""
    parts = (part.split() for part in text.split(";"))
    return {name: kind for kind, *names in parts for name in names}


def pinned(warps: int, stages: int = 0) -> dict[str, object]:
    return {"num_warps": warps, **({"num_stages": stages} if stages else {}), **PINNED}


def compiled(warps: int, stages: int = 0) -> dict[str, object]:
    return {"num_warps": warps, **({"num_stages": stages} if stages else {}), **COMPILER}


# ---- Compile one ---------------------------------------------------------------------------------

class Compiled(NamedTuple):
    """A compiled kernel's use of SM resources, its layouts (Triton's GPU dialect) and its PTX."""

    registers: int
    spills: int  # bytes of local memory per thread
    shared: int  # bytes per program
    ptx: str
    cubin: bytes
    ttgir: str


def compile_one(spec: Spec, target: GPUTarget = HOPPER) -> Compiled:
    """Compile a kernel to a cubin and read its resource usage from ``cuobjdump``."""
    names = spec.kernel.arg_names
    signature = {name: spec.types.get(name, "constexpr") for name in names}
    divisible = [
        (index,)
        for index, name in enumerate(names)
        if signature[name].startswith("*") or (name in spec.aligned and name in spec.types)
    ]
    source = ASTSource(
        fn=spec.kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in spec.constexprs.items()},
        attrs={index: [["tt.divisibility", 16]] for index in divisible},
    )
    built = triton.compile(source, target=target, options=dict(spec.options))
    registers, spills = _resources(built.asm["cubin"])
    return Compiled(registers, spills, int(built.metadata.shared), built.asm["ptx"], built.asm["cubin"], built.asm["ttgir"])


def inner_loop(made: Compiled, around: str = "GMMA") -> list[str]:
    """The shortest of ``loops``: what a warp runs per block of the contraction, or of keys that all rows see."""
    return loops(made, around)[0]


def loops(made: Compiled, around: str = "GMMA") -> list[list[str]]:
    """The instructions of each loop that has ``around`` among them, by default a tensor-core product; the shortest first.

    Raises:
        ValueError: there is no such loop.
    """
    lines = _read(made.cubin, "nvdisasm", "--print-code").splitlines()
    places = {found[1]: i for i, line in enumerate(lines) if (found := _LABEL.match(line))}
    wanted = [i for i, line in enumerate(lines) if around in line]
    jumps = ((places.get(found[1], i), i) for i, line in enumerate(lines) if (found := _JUMP.search(line)))
    ranges = sorted((end - start, start, end) for start, end in jumps if any(start < i < end for i in wanted))
    if not ranges:
        raise ValueError(f"no loop with {around}")
    return [[op[1] for line in lines[start : end + 1] if (op := _OPCODE.search(line))] for _, start, end in ranges]


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory (which holds spills) per thread, for the one kernel of a cubin."""
    text = _read(cubin, "cuobjdump", "--dump-resource-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage:\n{text}")
    return int(found[1]), int(found[2]) + int(found[3])


def _read(cubin: bytes, tool: str, option: str) -> str:
    """What a tool prints about a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([_tool(tool), option, file.name], capture_output=True, text=True, check=True).stdout


@functools.cache
def _tool(name: str) -> str:
    """The path of a binary shipped with triton, so that no CUDA toolkit is needed."""
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)
