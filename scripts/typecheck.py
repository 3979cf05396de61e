"""Run mypy on the package as installed, where ``adapters/`` is ``jetrl_patch.adapters``.

mypy does not follow the mapping of an editable install, so this script builds the tree from symbolic links in ``build/``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "typecheck"


def main() -> int:
    shutil.rmtree(TREE, ignore_errors=True)
    package = TREE / "jetrl_patch"
    package.mkdir(parents=True)
    for entry in (ROOT / "jetrl_patch").iterdir():
        if entry.name != "__pycache__":
            (package / entry.name).symlink_to(entry)
    (package / "adapters").symlink_to(ROOT / "adapters")
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "-p", "jetrl_patch"]
    return subprocess.run([*command, *sys.argv[1:]], cwd=TREE).returncode


if __name__ == "__main__":
    sys.exit(main())
