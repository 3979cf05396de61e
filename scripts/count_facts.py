"""Count the product files that name each model family, precision, correction and scale format, and list them.

Run: ``python scripts/count_facts.py``. The exit status is 1 if a fact is named in more files than its limit. Only the file that
records a fact, and files that exist for that fact alone, should name it; all other code queries the record.

Product files are the modules of ``jetrl_patch/`` and ``adapters/``. A name counts anywhere in a file (code, text, comments)
or in its path:

- a family: its ``model_type`` as a word (``qwen2``, ``"qwen2"``) or the prefix of its classes (``Qwen2MLP``); if one family's
  name is a prefix of another's, the longer one counts;
- ``int8`` and ``fp16``: as part of any identifier or word, including ``float16`` but not ``uint8`` and ``bfloat16``;
- ``fp8-unified`` and ``fp8-rollout``: the literal only, since other precisions use FP8 too;
- ``bf16``: as a precision only (``precision="bf16"``), since every mode has BF16 tensors;
- a correction: its name as a word in any case, with ``-`` or ``_``. One mapping per framework is exempt;
- a scale format without square blocks: its name in any case.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from jetrl_patch.config.corrections import CORRECTIONS
from jetrl_patch.config.formats import FORMATS
from jetrl_patch.config.modes import PRECISIONS

ROOT = Path(__file__).resolve().parents[1]

#: maximum number of files that may name one
LIMITS = {"family": 2, "precision": 12, "correction": 3, "format": 5}
#: mappings to the frameworks' own corrections, which are exempt
MAPPINGS = ("adapters/verl/correction.py", "adapters/openrlhf/correction.py")

_SPECIAL = {
    "bf16": r"precision\W{1,6}bf16\b|name=\"bf16\"",
    "fp16": r"fp16|(?<!b)float16",
    "int8-rollout": r"(?<!u)int8",
}


def precision_patterns() -> dict[str, re.Pattern[str]]:
    """Precision -> pattern that matches its name."""
    return {name: re.compile(_SPECIAL.get(name, re.escape(name)), re.IGNORECASE) for name in PRECISIONS}


def correction_patterns() -> dict[str, re.Pattern[str]]:
    """Correction -> pattern that matches its name."""
    return {
        name: re.compile(rf"(?<![\w-]){name.replace('-', '[-_]')}(?![\w-])", re.IGNORECASE) for name in CORRECTIONS
    }


def family_patterns(names: Iterable[str]) -> dict[str, re.Pattern[str]]:
    """Family (a ``model_type``) -> pattern that matches its name."""
    every = sorted(names)
    found = {}
    for name in every:
        prefix = _prefix(name)
        longer = [_prefix(other).removeprefix(prefix) for other in every if other != name and _prefix(other).startswith(prefix)]
        but = f"(?!{'|'.join(longer)})" if longer else ""
        found[name] = re.compile(rf"(?<![A-Za-z0-9_]){re.escape(name)}(?![A-Za-z0-9_])|(?<![A-Za-z0-9]){prefix}{but}(?=[A-Z])")
    return found


def _prefix(name: str) -> str:
    """``qwen3_moe`` -> ``Qwen3Moe``."""
    return "".join(part.capitalize() for part in name.split("_"))


def families() -> tuple[str, ...]:
    """The known families; none if their table is missing."""
    if importlib.util.find_spec("jetrl_patch.models.families") is None:
        return ()
    table = importlib.import_module("jetrl_patch.models.families")
    return tuple(table.FAMILIES)


def product_files() -> dict[str, str]:
    """Relative path -> path and text of every product file."""
    paths = [path for folder in ("jetrl_patch", "adapters") for path in sorted((ROOT / folder).rglob("*.py"))]
    return {(name := path.relative_to(ROOT).as_posix()): f"{name}\n{path.read_text()}" for path in paths}


def named_in(pattern: re.Pattern[str], files: dict[str, str]) -> list[str]:
    """The files that match a pattern."""
    return [name for name, text in files.items() if pattern.search(text)]


def counted() -> dict[str, dict[str, list[str]]]:
    """Kind of fact -> fact -> the product files that name it, without the exempt mappings."""
    files = product_files()
    others = {name: text for name, text in files.items() if name not in MAPPINGS}
    return {
        "family": {name: named_in(pattern, files) for name, pattern in family_patterns(families()).items()},
        "precision": {name: named_in(pattern, files) for name, pattern in precision_patterns().items()},
        "correction": {name: named_in(pattern, others) for name, pattern in correction_patterns().items()},
        "format": {name: named_in(re.compile(name, re.IGNORECASE), files) for name, form in FORMATS.items() if not form.square},
    }


if __name__ == "__main__":
    beyond = False
    for kind, facts in counted().items():
        for fact, where in facts.items():
            beyond |= len(where) > LIMITS[kind]
            print(f"{kind} {fact}: {len(where)} of at most {LIMITS[kind]} files: {', '.join(where)}")
    sys.exit(beyond)
