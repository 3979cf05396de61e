"""Pieces of a part of ``make hopper`` that stand in for measurements, in a module that a new process imports quickly."""

from __future__ import annotations

import os
import subprocess
import sys
import time


def measure(name, setup):
    """Does what the piece is called."""
    if name == "dies":
        os._exit(5)
    if name == "sleeps":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        time.sleep(300)
    if name.startswith("meets"):  # two others, which run at the same time
        folder = setup.scratch / "met"
        folder.mkdir(exist_ok=True)
        (folder / name).touch()
        while len(list(folder.iterdir())) < 3:
            time.sleep(0.05)
    if name == "raises":
        raise MemoryError("out of memory")
    return [{"piece": name, "earlier": len(setup.earlier), "verdict": "MISSED" if name == "misses" else "met"}]
