"""A folder that is a script's whole PATH: recording stubs for programs that act, links to tools that only read."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

__all__ = ["LAUNCHERS", "make", "preamble"]

#: programs that can start a training
LAUNCHERS = (
    "python", "python3", "uv", "torchrun", "deepspeed", "accelerate", "ray", "srun", "sbatch", "mpirun", "numactl", "nohup",
)  # fmt: skip
#: programs that a launch does not need, or that would reach the network, other processes or the machine
_OTHERS = (
    "nvidia-smi", "rocm-smi", "npu-smi", "sleep", "pip", "pip3", "conda", "hf", "huggingface-cli", "git", "wget", "curl", "ssh",
    "scp", "docker", "sudo", "apt", "apt-get", "kill", "pkill", "killall", "scontrol", "hostname", "mkdir", "tee", "rm", "cp",
    "mv", "ln", "chmod", "touch", "wandb", "ip", "ifconfig", "nsys",
)  # fmt: skip
#: programs that only read, or print to the script
_HARMLESS = (
    "bash", "sh", "env", "date", "dirname", "basename", "realpath", "readlink", "pwd", "cat", "echo", "printf", "head", "tail",
    "cut", "tr", "sed", "awk", "grep", "egrep", "sort", "uniq", "wc", "seq", "expr", "test", "true", "false", "id", "uname",
    "whoami", "nproc", "ls", "xargs", "bc",
)  # fmt: skip


def make(folder: Path, records: Path, root: Path) -> Path:
    """Write the folder and return it.

    Args:
        records: where the stubs put one JSON file for each call.
        root: ``mkdir`` makes folders only below it.
    """
    folder.mkdir(parents=True)
    records.mkdir(parents=True)
    text = Path(__file__).with_name("stub.py").read_text()
    text = text.replace("<records>", str(records)).replace("<root>", str(root.resolve()))
    program = folder / ".stub"
    program.write_text(f"#!{sys.executable} -IS\n{text}")
    program.chmod(0o755)
    for name in (*LAUNCHERS, *_OTHERS):
        (folder / name).symlink_to(program)
    for name in _HARMLESS:
        found = shutil.which(name)
        if found is not None:
            (folder / name).symlink_to(found)
    return folder


def preamble(path: Path) -> Path:
    """Write the file that bash reads first (``BASH_ENV``). It disables ``ulimit``, which could stop a script on this machine."""
    path.write_text("ulimit() { :; }\n")
    return path
