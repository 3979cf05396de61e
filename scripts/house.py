"""Count files, lines, functions, layers, import circles and side channels of the product: ``python -m scripts.house [ROOT]``"""

from __future__ import annotations

import ast
import graphlib
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("jetrl_patch", "adapters")


def lines_of(path: Path) -> int:
    """Number of lines of a file."""
    return len(path.read_text().splitlines())


def functions(path: Path) -> Iterator[int]:
    """Lengths of a file's functions, in lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def imports(path: Path) -> Iterator[str]:
    """The dotted name of every import of a file, also in functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def sources(root: Path = ROOT) -> dict[str, Path]:
    """Dotted name as installed -> file, for every module of the product."""
    found = {}
    for folder in PRODUCT:
        for path in sorted((root / folder).rglob("*.py")):
            name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            found[name if folder == "jetrl_patch" else f"jetrl_patch.{name}"] = path
    return found


def graph(root: Path = ROOT) -> dict[str, set[str]]:
    """Module -> modules of the product that it imports, also in functions and under TYPE_CHECKING."""
    files = sources(root)
    found: dict[str, set[str]] = {}
    for module, path in files.items():
        names = {name for name in imports(path) if name.split(".")[0] == "jetrl_patch"}
        # in "from a import b" either a.b is a module, or b is a name in a
        found[module] = {name if name in files else name.rpartition(".")[0] for name in names} - {module, ""}
    return found


def layers(root: Path = ROOT) -> list[str]:
    """Packages and modules from bottom to top, as the table in docs/architecture.md lists them."""
    table = (root / "docs" / "architecture.md").read_text().split("| package or module, bottom first |")[1].split("\n\n")[0]
    return [name for row in table.splitlines() if row.startswith("| `") for name in re.findall("`([^`]+)`", row.split("|")[1])]


#: what is counted -> where a line is it
CHANNELS = {
    "thread-locals": r"\bthreading\.local\b",
    "context variables": r"\bContextVar\(",
    "attributes on foreign objects": r"\bAttached\(\s*$|\bAttached\([\"']",
    "comparisons of scale formats": r"scale_format\w* ?(==|!=|(not )?in) |[\"'](pow2|mxfp8|nvfp4)[\"'] (==|!=)",
}


def circles(edges: dict[str, set[str]]) -> int:
    """How many imports must go until no two modules import each other. Each circle that the sort finds loses one import."""
    edges, count = {module: set(others) for module, others in edges.items()}, 0
    while True:
        try:
            graphlib.TopologicalSorter(edges).prepare()
        except graphlib.CycleError as error:
            first, second = error.args[1][:2]
            edges[second].discard(first)
            count += 1
        else:
            return count


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    files = list(sources(root).values())
    sizes = [lines_of(path) for path in files]
    lengths = [length for path in files for length in functions(path)]
    folders = sorted(path.name for path in (root / "adapters").iterdir() if path.is_dir() and path.name != "__pycache__")
    text = "\n".join(path.read_text() for path in files)
    for name, value in {
        "product files": len(files),
        "product lines": sum(sizes),
        "median file": statistics.median(sizes),
        "files under 60 lines": sum(size < 60 for size in sizes),
        "files over 400 lines": sum(size > 400 for size in sizes),
        "median function": statistics.median(lengths),
        "functions over 60 lines": sum(length > 60 for length in lengths),
        "import circles": circles(graph(root)),
        "names in the list of layers": len(layers(root)),
        "lines of benchmarks": sum(map(lines_of, (root / "benchmarks").rglob("*.py"))),
        **{f"lines of adapters/{folder}": sum(map(lines_of, (root / "adapters" / folder).rglob("*.py"))) for folder in folders},
        **{name: len(re.findall(pattern, text, re.MULTILINE)) for name, pattern in CHANNELS.items()},
    }.items():
        print(f"{name:30} {value:,}")


if __name__ == "__main__":
    main()
