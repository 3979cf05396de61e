"""Check that the active Python environment can run the examples on a GPU. If not, print one line and exit with status 1.

``make`` runs this before anything with ``DEVICE=cuda``. It imports only torch, and last.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence

__all__ = ["main", "missing"]

#: what every example imports
COMMON = ("torch", "rich", "jetrl_patch")


def missing(packages: Sequence[str]) -> str:
    """What a run on a GPU lacks, in words; empty if nothing."""
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    try:  # without an installation, the clone's folder can be imported but has no adapters
        importlib.metadata.version("jetrl_patch")
    except importlib.metadata.PackageNotFoundError:
        absent += ["jetrl_patch"] * ("jetrl_patch" not in absent)
    if absent:
        return f"no {', no '.join(absent)}"
    try:
        import torch

        return "" if torch.cuda.is_available() else f"torch {torch.__version__}, which sees no CUDA device"
    except Exception as error:  # a damaged installation may raise anything
        return f"a torch that cannot be imported ({type(error).__name__}: {' '.join(str(error).split())[:120]})"


def main(arguments: Sequence[str]) -> int:
    """Check for ``COMMON`` and the packages named on the command line."""
    found = missing([*COMMON, *arguments])
    if found:
        print(
            f"DEVICE=cuda: required a GPU and {', '.join([*COMMON, *arguments])} in {sys.executable}, found {found}. "
            "Activate such an environment (docs/install.md), or use DEVICE=cpu.",
            file=sys.stderr,
        )
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
