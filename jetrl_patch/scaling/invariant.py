"""QuRL's update-aware scaling: WX = (W / s)(sX), applied once before training (arXiv 2602.13953).

An update of a step is far smaller than a step of the rollout's format. With s > 1 the weights of q, k, v, gate and up
become smaller and the norms before them greater by as much: the function stays, and an update weighs s times more
against the weight that is quantized. ``o_proj``, ``down_proj`` and biases stay as they are.

The model's configuration remembers the factor (``config.json`` of everything that is saved from it), so that a
checkpoint of a scaled model is not scaled again.
"""

from __future__ import annotations

from typing import Any

import torch

from jetrl_patch.errors import ConfigError, explain
from jetrl_patch.scaling.groups import groups_of

__all__ = ["RECORD", "check_record", "scale_once", "take_over"]

#: attribute of a Hugging Face configuration
RECORD = "jetrl_invariant_scale"


@torch.no_grad()
def scale_once(model: Any, scale: float) -> bool:
    """Scale a loaded Hugging Face model in place, whole or already partitioned by ZeRO-3; False if it was scaled before.

    Exact where ``scale`` is a power of two; else each weight is rounded once in the dtype that it is held in.

    Raises:
        ModelError: a family whose function might change. ConfigError: the checkpoint was scaled by another factor.
    """
    if check_record(model.config, scale):
        return False
    parameters = dict(model.named_parameters())
    for group in groups_of(parameters, model.config.model_type, f"invariant_scale={scale:g}"):
        _local(parameters[group.norm]).mul_(scale)
        for reader in group.readers:
            _local(parameters[reader]).div_(scale)
    setattr(model.config, RECORD, scale)
    return True


def check_record(hf_config: Any, scale: float) -> bool:
    """Whether a model with this configuration is scaled already. Raises ConfigError if it was by another factor."""
    recorded = getattr(hf_config, RECORD, None)
    if recorded is not None and recorded != scale:
        raise ConfigError(
            explain(
                f"invariant_scale={scale:g}",
                required="a checkpoint that is not scaled, or by the same factor",
                found=f"{RECORD}={recorded} in its config.json",
                fix=f"use invariant_scale={recorded}, or the checkpoint from before",
            )
        )
    return recorded is not None


def _local(parameter: Any) -> torch.Tensor:
    """This process's part: under ZeRO-3 the parameter itself is empty and ``ds_tensor`` holds a slice of it."""
    found: torch.Tensor = getattr(parameter, "ds_tensor", parameter).data
    return found


def take_over(hf_config: Any, recorded: float | None, where: str) -> None:
    """The weights of a training checkpoint are loaded over a model: was it scaled as the model was?

    Without ``invariant_scale`` the model's configuration takes the checkpoint's record, so that what is saved later says
    what the weights are.

    Args:
        recorded: the factor that the checkpoint names, None if it names none.
        where: the checkpoint, for the error.

    Raises:
        ConfigError: the model was scaled when it was built, and the checkpoint is not, or by another factor.
    """
    built = getattr(hf_config, RECORD, None)
    if built is None and recorded is not None:
        setattr(hf_config, RECORD, recorded)
    elif built != recorded:
        raise ConfigError(
            explain(
                f"resuming from {where}",
                required=f"weights with invariant_scale={built}",
                found=f"a checkpoint with {recorded}",
                fix=f"resume with invariant_scale={recorded}: the factor is chosen once, before training"
                if recorded is not None
                else "resume without invariant_scale: the factor is chosen once, before training",
            )
        )
