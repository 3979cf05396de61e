"""Packages that process images, in a folder of their own, for the tests of models with a vision tower.

    python scripts/vision.py .venv/vision requirements/vision.txt

They have a folder of their own because transformers chooses other processors wherever torchvision is installed, and imports it in
every process. Tests that need them put the folder on ``PYTHONPATH``.

torchvision's published build has compiled ops that need CUDA libraries. They do not load with a CPU build of torch. The import
continues without them and fails where it describes two of the missing ops. Nothing that processes images calls these two, so the
copy in the folder declares them first.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

#: appended to ``torchvision/extension.py``, which is imported first
DECLARED = '''

if not _has_ops():
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
'''


def build(folder: Path, requirements: Path) -> None:
    """Install into ``folder``, which exists only once torchvision can be imported from it."""
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-compile"]
    subprocess.run([*pip, "--target", str(unfinished), "-r", str(requirements)], check=True)
    with (unfinished / "torchvision" / "extension.py").open("a", encoding="utf-8") as file:
        file.write(DECLARED)
    path = {**os.environ, "PYTHONPATH": str(unfinished)}
    subprocess.run([sys.executable, "-c", "import torchvision.transforms.v2, qwen_vl_utils"], check=True, env=path)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]))
