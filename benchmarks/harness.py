"""What all benchmarks share: interleaved timing, memory, tables on the screen and in pages, the command line."""

from __future__ import annotations

import argparse
import inspect
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def best_of(functions: Mapping[str, Callable[[], object]], seconds: float = 0.3, rounds: int = 7) -> dict[str, float]:
    """Best seconds per call over ``rounds`` rounds. Each function runs for about ``seconds / rounds`` per round.

    The functions take turns, because a busy machine then slows all of them. Process time of all threads counts; other programs
    do not.
    """
    repeats = {}
    for name, function in functions.items():
        function()
        start = time.process_time()
        function()
        repeats[name] = max(1, int(seconds / rounds / max(time.process_time() - start, 1e-6)))
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.process_time()
            for _ in range(repeats[name]):
                function()
            best[name] = min(best[name], (time.process_time() - start) / repeats[name])
    return best


def shown(value: object) -> str:
    """Format a number with three significant digits; a dash if it could not be measured."""
    if isinstance(value, float):
        return "–" if value != value else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value).replace("|", "/")


def markdown(rows: Sequence[Row], title: str = "", note: str = "") -> str:
    """A Markdown table with an optional title and note. Rows may lack columns."""
    lines = [line for text in (f"## {title}" if title else "", note.replace("|", "/")) if text for line in (text, "")]
    if rows:
        names = list(dict.fromkeys(name for row in rows for name in row))
        lines += ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
        lines += ["| " + " | ".join(shown(row.get(name, "")) for name in names) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def show(title: str, rows: Iterable[Row]) -> list[Row]:
    """Print a table; return its rows."""
    from rich.console import Console
    from rich.table import Table

    found, table = list(rows), Table(title=title)
    for name, value in found[0].items():
        table.add_column(name, justify="left" if isinstance(value, str) else "right")
    for row in found:
        table.add_row(*map(shown, row.values()))
    Console().print(table)
    return found


def filled(page: str, texts: Mapping[str, str]) -> str:
    """The page with each text between its marks, ``<!-- name -->`` and ``<!-- /name -->``: as a block, or within a sentence.

    Raises:
        ValueError: the page lacks a mark.
    """
    for name, text in texts.items():
        first, last = f"<!-- {name} -->", f"<!-- /{name} -->"
        if not 0 <= page.find(first) < page.find(last):
            raise ValueError(f"the page needs the marks {first} and {last}, in this order, and lacks one. Add it.")
        before, _, rest = page.partition(first)
        line = "\n" if "\n" in text else ""
        page = f"{before}{first}{line}{text.strip()}{line}{last}{rest.partition(last)[2]}"
    return page


def extra_memory(run: Callable[[], object], device: str = "cpu") -> int:
    """Run it; return how many bytes it takes at most, of this process (Linux) or on its GPU."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # restarts the peak
    run()
    return _resident("VmHWM") - before


def _resident(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def asked_to_write(about: str | None, page: Path) -> bool:
    """Whether the command line has ``--write``, its only option."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--write", action="store_true", help=f"write {page}")
    return bool(parser.parse_args().write)


def main(*benchmarks: Callable[..., Iterable[Row]]) -> None:
    """Run the function that the command line names, and print its rows as Markdown. Its parameters are the options."""
    caller = inspect.getmodule(benchmarks[0])
    parser = argparse.ArgumentParser(description=caller.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART") if len(benchmarks) > 1 else None
    for function in benchmarks:
        about = inspect.getdoc(function) or ""
        place = parts.add_parser(function.__name__, help=about.partition("\n")[0]) if parts else parser
        place.set_defaults(run=function)
        for option in inspect.signature(function).parameters.values():
            name = "--" + option.name.replace("_", "-")
            place.add_argument(name, type=type(option.default), default=option.default, help="by default %(default)s")
    args = vars(parser.parse_args())
    args.pop("part", None)
    function = args.pop("run")
    print(markdown(list(function(**args)), function.__name__))
