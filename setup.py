"""All metadata of the distribution; ``pyproject.toml`` only configures tools."""

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
home = table["HOME"]
places = {"Source": "", "Documentation": "/tree/main/docs", "Changelog": "/blob/main/CHANGELOG.md", "Issues": "/issues"}
core = find_packages(include=["jetrl_patch", "jetrl_patch.*"])
adapters = ["jetrl_patch." + name for name in find_packages(include=["adapters", "adapters.*"])]

setup(
    name="jetrl_patch",
    version=table["VERSION"],
    description="Reinforcement learning for language models in FP8, bit-equal between rollout and trainer",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    author="jetrl_patch contributors",
    url=home or None,
    project_urls={name: home + path for name, path in places.items()} if home else {},
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["reinforcement learning", "RLHF", "GRPO", "FP8", "quantization", "LLM", "verl", "OpenRLHF", "vLLM"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    packages=core + adapters,
    package_dir={"jetrl_patch": "jetrl_patch", "jetrl_patch.adapters": "adapters"},
    package_data={"jetrl_patch": ["py.typed", "**/*.c", "**/*.h", "**/*.html"]},
    install_requires=table["CORE_REQUIREMENTS"],
    extras_require=table["EXTRAS"],
    entry_points={
        "console_scripts": ["jetrl = jetrl_patch.cli.main:main"],
        "vllm.general_plugins": ["jetrl_patch = jetrl_patch.adapters.vllm.entry:register"],
        "torch.backends": ["jetrl_patch = jetrl_patch.adapters.torch.entry:register"],
        "verl.plugins": ["jetrl_patch = jetrl_patch.adapters.verl.entry"],
        "jetrl_patch.adapters": [
            f"{path.parent.name} = jetrl_patch.adapters.{path.parent.name}.adapter:ADAPTER"
            for path in sorted((ROOT / "adapters").glob("*/adapter.py"))
        ],
        "jetrl_patch.programs": [f"{name} = {module}" for name, module in table["PROGRAMS"].items()],
    },
)
