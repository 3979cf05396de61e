"""Whether the active Python environment can run the examples on a GPU: one line of what is missing, and exit status 1.

``make`` runs this before anything that needs ``DEVICE=cuda``. It imports nothing but torch, and that last.
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
    """What is missing for a run on a GPU, in words; empty if nothing is."""
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    try:  # the clone's folder is importable without an installation, but has no adapters then
        importlib.metadata.version("jetrl_patch")
    except importlib.metadata.PackageNotFoundError:
        absent += ["jetrl_patch"] * ("jetrl_patch" not in absent)
    if absent:
        return f"no {', no '.join(absent)}"
    try:
        import torch

        return "" if torch.cuda.is_available() else f"torch {torch.__version__}, which sees no CUDA device"
    except Exception as error:  # whatever a damaged installation raises
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
