"""The names that the project touches exist, with fitting signatures, in every supported version: read from the wheels.

``make anchors`` writes the records. ``make test-pins`` runs some of these versions for real.
"""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from jetrl_patch._versions import SUPPORTED
from jetrl_patch.adapters.vllm.compat import SEQUENCE_PARALLEL
from jetrl_patch.adapters.vllm.parameters import EDITS, FREE, OWN
from jetrl_patch.patching.guards import installed_version
from jetrl_patch.trainer.support import BANS
from scripts.anchors.patches import FRAMEWORKS
from scripts.anchors.refresh import RECORDS, SWITCHES, VERSIONS
from scripts.anchors.source import OUTSIDE, Sources
from scripts.anchors.touched import differences, touched
from tests import trl

from . import fit

NEXT = ("vllm", "0.33.0")  # read, but not supported: it needs a newer torch


@cache
def record(framework: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDS / f"{framework}.json").read_text())
    return found


def at(framework: str, target: str, version: str) -> str | None:
    """The entry of a version: the last one that is not newer."""
    entries = record(framework)["names"][target]
    return next(words for since, words in reversed(sorted_by_version(entries)) if Version(since) <= Version(version))


def sorted_by_version(entries: dict[str, Any]) -> list[tuple[str, Any]]:
    return sorted(entries.items(), key=lambda entry: Version(entry[0]))


def of(framework: str, targets: Any) -> list[Any]:
    return [t for t in targets if (t if isinstance(t, str) else t[0]).split(".")[0] == framework]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_everything_touched_is_recorded(framework: str) -> None:
    wanted, known = set(of(framework, touched().every())), set(record(framework)["names"])
    assert not wanted - known, f"newly touched; run `make anchors`: {sorted(wanted - known)}"
    assert not known - wanted, f"no longer touched; run `make anchors`: {sorted(known - wanted)}"
    assert record(framework)["versions"] == list(VERSIONS[framework]), "run `make anchors`"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_versions_read_are_those_supported(framework: str) -> None:
    required, tested = SUPPORTED[framework]
    accepted = SpecifierSet(required)
    assert [v for v in VERSIONS[framework] if v not in accepted] == ([NEXT[1]] if framework == NEXT[0] else [])
    assert tested in VERSIONS[framework]
    oldest = next(part.removeprefix(">=") for part in required.split(",") if part.startswith(">="))
    assert Version(VERSIONS[framework][0]) == Version(oldest)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_name_is_there(framework: str) -> None:
    missing = [
        f"{target} (touched in {touched().names[target]}): missing in {version}"
        for target in of(framework, touched().names)
        for version in VERSIONS[framework]
        if at(framework, target, version) is None
    ]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_calls_and_replacements_fit(framework: str) -> None:
    wrong = []
    for version in VERSIONS[framework]:
        for target, count, words, complete in of(framework, touched().calls):
            theirs = fit.Signature.read(at(framework, target, version) or "")
            problem = fit.call(theirs, count, words, complete) if theirs else ""
            if problem:
                wrong.append(f"{touched().calls[target, count, words, complete]}: {target} of {version} {problem}")
        for target, ours in of(framework, touched().accepts):
            theirs, mine = fit.Signature.read(at(framework, target, version) or ""), fit.Signature.read(f"def({ours})")
            problem = fit.replacement(mine, theirs) if theirs and mine else ""
            if problem:
                wrong.append(f"{touched().accepts[target, ours]}: {target} of {version} {problem}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("difference", differences(), ids=lambda d: d.target.rpartition(".")[2])
def test_a_difference_starts_and_ends_where_it_says(difference: Any) -> None:
    changed = Version(difference.changed_in)
    for version in VERSIONS[difference.framework]:
        there = at(difference.framework, difference.target, version) is not None
        assert there is difference.is_in(version), version
    oldest = Version(VERSIONS[difference.framework][0])
    assert oldest < changed, f"no supported version is older than {changed}; remove what compat does about it"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_installed_release_says_what_its_wheel_says(framework: str) -> None:
    if framework == "trl":  # in a folder of its own, or not installed
        folder, version = trl.TRL, trl.VERSION
        if not version:
            pytest.skip("needs TRL, which `make trl` installs")
    else:
        spec, version = importlib.util.find_spec(framework), installed_version(framework) or ""
        assert spec is not None and spec.origin is not None and version
        folder = Path(spec.origin).parent.parent
    sources = Sources(folder, framework)
    version = Version(version).base_version
    assert version in VERSIONS[framework]
    found = {target: sources.describe(target) for target in record(framework)["names"]}
    assert found == {target: at(framework, target, version) for target in found}


def test_no_switch_of_vllm_splits_tokens_unnoticed() -> None:
    """vLLM renames and moves such switches; exact mode refuses each of them."""
    classes = dict(
        zip(("compilation_config.pass_config", "parallel_config", "compilation_config"), SWITCHES, strict=True)
    )
    ours = {f"{classes[path]}.{name}" for path, name in SEQUENCE_PARALLEL}
    theirs = {switch for found in record("vllm")["sequence_parallel"].values() for switch in found}
    assert theirs == ours


def test_every_sampling_parameter_of_vllm_is_in_one_table() -> None:
    """One that a new version adds is refused in exact mode until somebody has looked at it."""
    groups = [OWN, *BANS, *FREE.values(), *EDITS.values()]
    ours = [name for names in groups for name in names.split()]
    assert len(ours) == len(set(ours))
    assert set(ours) == {name for found in record("vllm")["sampling_parameters"].values() for name in found}


def test_what_the_sources_say(tmp_path: Path) -> None:
    """The reader itself: re-exports, base classes, annotations, missing names, unknown types."""
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("from .inner import *\nfrom torch import nn\nLAZY = {'Late': '.inner:Late'}\n")
    (package / "inner.py").write_text(
        "class Base:\n    kind: 'Late | None' = None\n    def __init__(self, a, *, b=1): self.made = a\n"
        "class Late(Base):\n    async def run(self, x, y=2, *more, **words): ...\n"
        "    @property\n    def base(self) -> Base: ...\n"
    )
    sources = Sources(tmp_path, "pack")
    found = {
        "pack.Base": "class(self, a, *, b=)",
        "pack.Late": "class(self, a, *, b=)",
        "pack.Late.run": "async def(self, x, y=, *more, **words)",
        "pack.Late.made": "attribute",
        "pack.Late.base.kind.run": "async def(self, x, y=, *more, **words)",
        "pack.Late.gone": None,
        "pack.Late.base.kind.gone": None,
        "pack.gone": None,
        "pack.gone.deeper": None,
        "pack.inner": "module",
        "pack.nn.Linear": OUTSIDE,
        "pack.Base.made.anything": OUTSIDE,
        "other.thing": None,
    }
    assert {target: sources.describe(target) for target in found} == found


@pytest.mark.parametrize(
    ("theirs", "count", "words", "problem"),
    [
        ("def(self, a, b=)", 1, (), ""),
        ("def(self, a, b=)", 3, (), "takes 2 positional arguments, not 3"),
        ("def(self, a, *, c)", 1, (), "needs c"),
        ("def(self, a, *, c)", 0, ("a", "c"), ""),
        ("staticmethod def(a)", 1, ("d",), "has no d"),
        ("async def(self, *more, **words)", 4, ("d",), ""),
    ],
)
def test_calls(theirs: str, count: int, words: tuple[str, ...], problem: str) -> None:
    signature = fit.Signature.read(theirs)
    assert signature is not None and fit.call(signature, count, words, complete=True) == problem


@pytest.mark.parametrize(
    ("ours", "theirs", "problem"),
    [
        ("self, a, *args, **kwargs", "self, a, b, c=", ""),
        ("self, a", "self, a, b=", "takes b"),
        ("self, a, **words", "self, a, b=", ""),
        ("self, a, **words", "self, a, b", "takes b"),
        ("self, x, *args, **kwargs", "self, a", "has a where ours has x"),
        ("self, a, b", "self, a", "has no b"),
        ("self, a", "self, a=", "has a default for a"),
        ("self, a", "self, a, *, b=", "takes b"),
        ("self, a, b=", "self, a, *, b=", ""),
        ("self", "self, **words", "takes any keyword"),
    ],
)
def test_replacements(ours: str, theirs: str, problem: str) -> None:
    mine, other = fit.Signature.read(f"def({ours})"), fit.Signature.read(f"def({theirs})")
    assert mine is not None and other is not None and fit.replacement(mine, other) == problem
