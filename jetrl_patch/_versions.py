"""The table of supported versions. The version guards, the packaging extras and the docs all use it.

``setup.py`` reads it before the package can be imported, so it imports nothing.
"""

VERSION = "0.1.0"

#: the address of the repository, such as https://host/owner/jetrl_patch; empty until it has a public one
HOME = ""

#: distribution name -> (supported PEP 440 range, release that the tests run on)
SUPPORTED = {
    "torch": (">=2.11,<2.14", "2.13.0"),
    "transformers": (">=5.5.3,<5.20", "5.10.4"),
    "vllm": (">=0.24,<0.33", "0.30.0"),
    "verl": (">=0.9,<0.10", "0.9.1"),
    "openrlhf": (">=0.11.1,<0.12", "0.11.2"),
    "trl": (">=1.11,<1.17", "1.16.0"),
    "ray": (">=2.41,<3", "2.60.0"),
}

#: Megatron-Core, whose layers exact mode replaces; the tests run on 0.16.1, the newest for Python 3.11
MEGATRON = "megatron-core>=0.16,<0.19"

#: training framework -> its main module; the entry points ``jetrl_patch.programs``
PROGRAMS = {"verl": "verl.trainer.main_ppo", "openrlhf": "openrlhf.cli.train_ppo_ray", "trl": "trl.cli.main"}

CORE_REQUIREMENTS = ["wrapt>=1.16", "packaging>=23", "typer>=0.12", "rich>=13"]


def _extra(*names: str) -> list[str]:
    return [name + SUPPORTED[name][0] for name in names]


#: for the page and the pictures of ``jetrl report``
REPORT = ["plotly>=6", "matplotlib"]

EXTRAS = {
    "vllm": _extra("torch", "transformers", "vllm"),
    # verl's default trainer imports TransferQueue, which comes only with some of verl's extras
    "verl": [*_extra("torch", "transformers", "vllm", "verl", "ray"), "TransferQueue>=0.1.10"],
    "openrlhf": _extra("torch", "transformers", "vllm", "openrlhf", "ray"),
    "trl": _extra("torch", "transformers", "vllm", "trl"),
    # with Megatron-Bridge, which has extras of its own and comes with the images of verl
    "megatron": [*_extra("torch", "verl"), MEGATRON, "mbridge>=0.15"],
    "te": ["transformer_engine>=2.3", *_extra("torch")],
    "optim": ["torchao>=0.18,<0.19", *_extra("torch")],
    "report": REPORT,
    "dev": ["pytest>=8", "pytest-cov", "pytest-timeout", "hypothesis", "ruff", "mypy", *REPORT],
}
