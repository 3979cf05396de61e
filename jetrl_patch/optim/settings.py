"""The optimizer class for each ``optimizer_states``, and the checks it needs. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from jetrl_patch.errors import ConfigError, explain
from jetrl_patch.patching.guards import is_installed

__all__ = ["CLASSES", "MODULE", "REQUIRED", "check_installed", "check_options"]

MODULE = "jetrl_patch.optim.adamw"
#: ``Config.optimizer_states`` -> the class in ``MODULE``
CLASSES = {"8bit": "AdamW8bit", "fp8": "AdamWFp8"}
#: the requirement for ``pip install``
REQUIRED = "torchao>=0.18,<0.19"
#: options of these classes besides lr, betas and weight_decay
OPTIONS = ("eps", "block_size", "bf16_stochastic_round")


def check_installed(states: str) -> None:
    """Raise ConfigError if torchao is not installed."""
    if not is_installed("torchao"):
        raise ConfigError(
            explain(
                f"optimizer_states={states!r}",
                required=REQUIRED,
                found="no installed torchao",
                fix=f"install it with `pip install '{REQUIRED}'`, or leave optimizer_states at 'fp32'",
            )
        )


def check_options(states: str, options: Mapping[str, object], where: str) -> None:
    """Raise ConfigError for options that these classes do not have.

    Args:
        states: the value of ``optimizer_states``.
        options: the framework's optimizer options.
        where: the framework's name for that setting.
    """
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise ConfigError(
            explain(
                f"{where} with optimizer_states={states!r}",
                required=f"options of torchao's AdamW ({', '.join(OPTIONS)})",
                found=", ".join(unknown),
                fix="remove them",
            )
        )
