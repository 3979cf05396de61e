"""Select the layers whose weights FSDP2 gathers in FP8 (``gather.py``)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from jetrl_patch.errors import ModelError, explain
from jetrl_patch.fp8.formats import BLOCK
from jetrl_patch.fp8.gather import Fp8Shard
from jetrl_patch.fp8.linear import keep_gathered_out_of_graphs

__all__ = ["gather_in_fp8"]

logger = logging.getLogger(__name__)


def gather_in_fp8(model: nn.Module, names: Sequence[str], shards: int) -> list[str]:
    """Make FSDP2 gather the weights of these ``Fp8Linear`` layers in FP8. Call it before ``fully_shard``.

    A layer whose rows do not divide into ``shards`` equal parts of whole blocks is still gathered in BF16 and
    quantized by every rank; one log line names these layers. With one shard there is no all-gather, so this does nothing.

    Args:
        shards: the number of ranks that a weight is sharded over.

    Returns:
        The names of the layers gathered in FP8.

    Raises:
        ModelError: experts are among the layers; FSDP gathers all of a block's in one parameter.
    """
    if shards == 1:
        return []
    modules = dict(model.named_modules())
    stacked = [name for name in names if name not in modules]
    if stacked:
        fix = "set fp8_all_gather=False"
        raise ModelError(explain("fp8_all_gather", required="FP8 layers that are modules", found=stacked[0], fix=fix))
    keep_gathered_out_of_graphs()
    done, left = [], []
    for name in names:
        module: Any = modules[name]
        if module.out_features % (shards * BLOCK):
            left.append(name)
            continue
        weight, state = module.weight, module.fp8
        shard = Fp8Shard(weight.detach(), state.scale_format, state.backend_name)
        module.weight = nn.Parameter(shard, requires_grad=weight.requires_grad)
        done.append(name)
    if left and not (dist.is_initialized() and dist.get_rank()):
        logger.warning(
            "jetrl_patch: %d of %d FP8 layers are gathered in BF16, because %d equal shards of their rows would cut "
            "a block of %d: %s",
            len(left), len(left) + len(done), shards, BLOCK, ", ".join(left),
        )  # fmt: skip
    return done
