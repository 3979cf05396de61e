"""All metadata of the distribution lives here; ``pyproject.toml`` only configures tools."""

from pathlib import Path
from typing import Any

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def _support_table() -> dict[str, Any]:
    """Run ``jetrl_patch/_versions.py`` on its own: the package itself may not be importable yet."""
    namespace: dict[str, Any] = {}
    exec((ROOT / "jetrl_patch" / "_versions.py").read_text(), namespace)
    return namespace


table = _support_table()
core = find_packages(include=["jetrl_patch", "jetrl_patch.*"])
adapters = ["jetrl_patch." + name for name in find_packages(include=["adapters", "adapters.*"])]

setup(
    name="jetrl_patch",
    version=table["VERSION"],
    description="Reinforcement learning of language models in one FP8 flow, equal to the last bit on both sides",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=core + adapters,
    package_dir={"jetrl_patch": "jetrl_patch", "jetrl_patch.adapters": "adapters"},
    package_data={"jetrl_patch": ["py.typed", "**/*.c", "**/*.html"]},
    install_requires=table["CORE_REQUIREMENTS"],
    extras_require=table["EXTRAS"],
    entry_points={
        "console_scripts": ["jetrl = jetrl_patch.cli.main:main"],
        "vllm.general_plugins": ["jetrl_patch = jetrl_patch.adapters.vllm.entry:register"],
        "verl.plugins": ["jetrl_patch = jetrl_patch.adapters.verl.entry"],
    },
)
