"""A stand-in for ``flash_attn``, which OpenRLHF imports unconditionally.

It is in ``sys.modules`` only while ``openrlhf.models.ring_attn_utils`` is executed, so neither transformers nor vLLM
mistakes it for flash attention.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from typing import Any

from jetrl_patch.adapters.base import Journal
from jetrl_patch.patching.guards import is_installed

__all__ = ["stand_in"]

_IMPORTER = "openrlhf.models.ring_attn_utils"
_MODULES = ("flash_attn", "flash_attn.bert_padding", "flash_attn.utils", "flash_attn.utils.distributed")


def stand_in(journal: Journal) -> None:
    """Make that one import succeed, unless flash-attn is installed or the importer is already loaded."""
    if is_installed("flash_attn") or _IMPORTER in sys.modules:
        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    journal.add_undo(
        lambda: sys.meta_path.remove(finder),
        target=f"sys.meta_path ({_IMPORTER})",
        reason="OpenRLHF imports flash_attn unconditionally, and the import fails on a CPU",
        remove_when="OpenRLHF imports flash_attn where it uses it",
    )


class _Finder(MetaPathFinder):
    def __init__(self) -> None:
        self._busy = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _IMPORTER or self._busy:
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy = False
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = _with_stand_in(spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _with_stand_in(execute: Any) -> Any:
    def exec_module(module: types.ModuleType) -> None:
        made = {name: types.ModuleType(name) for name in _MODULES}
        for stub in made.values():
            stub.__path__ = []
        vars(made["flash_attn.bert_padding"]).update(
            rearrange=_rearrange, index_first_axis=_index_first_axis, unpad_input=_unpad_input, pad_input=_pad_input
        )
        vars(made["flash_attn.utils.distributed"]).update(all_gather=_all_gather)
        sys.modules.update(made)
        try:
            execute(module)
        finally:
            for name in made:
                sys.modules.pop(name, None)

    return exec_module


def _rearrange(x: Any, pattern: str, **sizes: Any) -> Any:
    import einops

    return einops.rearrange(x, pattern, **sizes)


def _index_first_axis(x: Any, indices: Any) -> Any:
    return x[indices]


def _unpad_input(x: Any, attention_mask: Any, unused_mask: Any = None) -> tuple[Any, Any, Any, int, Any]:
    """x [B, T, ...] -> (its valid rows [n, ...], their places, cu_seqlens [B + 1], the longest, lengths [B])."""
    import torch

    lengths = attention_mask.sum(-1, dtype=torch.int32)
    places = attention_mask.flatten().nonzero().squeeze(-1)
    starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return x.flatten(0, 1)[places], places, starts, int(lengths.max()), lengths


def _pad_input(x: Any, places: Any, batch: int, width: int) -> Any:
    """The way back: x [n, ...] -> [batch, width, ...], zeros elsewhere; keeps gradients."""
    out = x.new_zeros(batch * width, *x.shape[1:]).index_copy(0, places, x)
    return out.view(batch, width, *x.shape[1:])


def _all_gather(x: Any, group: Any) -> Any:
    raise NotImplementedError("ring attention needs flash-attn, which does not run on a CPU. Use --ds.ring_attn_size 1.")
