"""Choose the attention of exact mode on a GPU: the project's kernel, or FlashAttention-3 where its rows are equal."""

from __future__ import annotations

import logging

import torch

from jetrl_patch.errors import ConfigError, explain
from jetrl_patch.exact import dispatch, flash3, trial

logger = logging.getLogger(__name__)

#: (device, heads, head width, page) -> why FlashAttention-3 does not serve there; "" if it does
_tried: dict[tuple[object, ...], str] = {}


def choose_attention(
    asked: str, heads: tuple[int, int], head_dim: int, device: torch.device, page: int = trial.PAGE
) -> str:
    """Choose what computes attention with this head width. Both sides of a run must come to the same; a sync compares it.

    The trial runs once per process and set of sizes.

    Args:
        asked: ``Config.exact_attention``.
        heads: of queries, and of keys and values, on one rank. page: tokens in a block of the cache.

    Returns:
        ``flash3.FLASH3``, or "" for the implementation's own attention (``dispatch.implementation``).

    Raises:
        ConfigError: FlashAttention-3 is asked for by name and cannot serve here.
    """
    chosen = _choose(asked, heads, head_dim, device, page)
    dispatch.attentions[device.type, head_dim] = chosen
    return chosen


def _choose(asked: str, heads: tuple[int, int], head_dim: int, device: torch.device, page: int) -> str:
    if device.type == "cpu" or asked == "triton":
        return ""
    found = _problem(heads, head_dim, device, page)
    if not found:
        logger.info("jetrl_patch: exact attention by FlashAttention-3, whose rows are equal on this GPU")
        return flash3.FLASH3
    if asked == flash3.FLASH3:
        raise ConfigError(
            explain(
                "exact_attention='flash3'",
                required="FlashAttention-3 with rows that do not depend on the batch",
                found=found,
                fix="use exact_attention='auto' or 'triton'",
            )
        )
    logger.info("jetrl_patch: exact attention by the project's Triton kernel; FlashAttention-3 does not serve: %s", found)
    return ""


def _problem(heads: tuple[int, int], head_dim: int, device: torch.device, page: int) -> str:
    """Why FlashAttention-3 does not serve on a device; "" if it does."""
    if dispatch.serving(device.type) != "triton":  # its backward is the project's
        return "the torch formulas in its place (backend='torch')"
    kernel, missing = flash3.find()
    if kernel is None:
        return missing
    key = (str(device), heads, head_dim, page)
    if key not in _tried:
        with dispatch.attention_by(flash3.FLASH3, device.type, head_dim):
            verdict = trial.compare_attention(heads, head_dim, device, page)
        torch.cuda.empty_cache()
        _tried[key] = "" if verdict.ok else verdict.found
    return _tried[key]
