"""QuRL's update-aware scaling: WX = (W / s)(sX), applied once before training (arXiv 2602.13953).

An optimizer update is far smaller than the spacing of the rollout's format. With s > 1 the weights of q, k, v, gate and
up shrink and the norms before them grow by the factor s. The function is unchanged, and an update is s times larger
relative to the quantized weight. ``o_proj``, ``down_proj`` and biases do not change.

The model's configuration records the factor, and so does every ``config.json`` saved from it, so that a checkpoint of a
scaled model is not scaled again.
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
    """Scale a loaded Hugging Face model in place, whole or partitioned by ZeRO-3. Returns False if it was already scaled.

    Exact if ``scale`` is a power of two; otherwise each weight is rounded once in its own dtype.

    Raises:
        ModelError: the family is not covered, so its function might change.
        ConfigError: the checkpoint was scaled by another factor.
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
    """Whether a model with this configuration is already scaled. Raises ConfigError if the factor was another one."""
    recorded = getattr(hf_config, RECORD, None)
    if recorded is not None and recorded != scale:
        raise ConfigError(
            explain(
                f"invariant_scale={scale:g}",
                required="an unscaled checkpoint, or one scaled by the same factor",
                found=f"{RECORD}={recorded} in its config.json",
                fix=f"use invariant_scale={recorded}, or the unscaled checkpoint",
            )
        )
    return recorded is not None


def _local(parameter: Any) -> torch.Tensor:
    """This process's part. Under ZeRO-3 the parameter itself is empty, and ``ds_tensor`` holds its slice."""
    found: torch.Tensor = getattr(parameter, "ds_tensor", parameter).data
    return found


def take_over(hf_config: Any, recorded: float | None, where: str) -> None:
    """Check that a training checkpoint, whose weights replace the model's, was scaled as the model was.

    If the model was built without ``invariant_scale``, its configuration takes over the checkpoint's record, so that
    later saves describe their weights correctly.

    Args:
        recorded: the checkpoint's factor, or None if it records none.
        where: the checkpoint that the error names.

    Raises:
        ConfigError: the model was scaled when it was built, and the checkpoint is unscaled or has another factor.
    """
    built = getattr(hf_config, RECORD, None)
    if built is None and recorded is not None:
        setattr(hf_config, RECORD, recorded)
    elif built != recorded:
        raise ConfigError(
            explain(
                f"resuming from {where}",
                required=f"weights with invariant_scale={built}",
                found="no invariant_scale" if recorded is None else f"invariant_scale={recorded}",
                fix=f"resume with invariant_scale={recorded}: the factor is chosen once, before training"
                if recorded is not None
                else "resume without invariant_scale: the factor is chosen once, before training",
            )
        )
