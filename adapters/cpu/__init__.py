"""Run real verl and OpenRLHF, with real vLLM rollouts, on a machine without an accelerator. Imports no framework."""

from __future__ import annotations

import functools
import importlib.metadata

from jetrl_patch.config import Config
from jetrl_patch.patching.patch import NO_REPORT, Patch

#: a fix without which a framework does not run on a CPU
CpuPatch = functools.partial(Patch, upstream=NO_REPORT, needed_by="a run on a CPU")

#: logical GPUs of a Ray cluster that OpenRLHF starts; it places its actors by them
LOGICAL_GPUS = 16


def is_cpu_run(config: Config) -> bool:
    """Whether ``platform`` is "cpu", or "auto" with vLLM's CPU build, which cannot use a GPU."""
    return config.platform == "cpu" or (config.platform == "auto" and vllm_cpu_version() is not None)


def vllm_cpu_version() -> str | None:
    """Return the version of vLLM's CPU build, with ``+cpu``; None if it is not installed or another build is."""
    try:
        found = importlib.metadata.distribution("vllm").version
    except importlib.metadata.PackageNotFoundError:
        try:
            return importlib.metadata.distribution("vllm-cpu").version + "+cpu"
        except importlib.metadata.PackageNotFoundError:
            return None
    return found if "cpu" in found else None


def logical_gpus(framework: str) -> int:
    """Return how many logical GPUs a CPU run of a framework gets if its settings name none."""
    return LOGICAL_GPUS if framework == "openrlhf" else 0
