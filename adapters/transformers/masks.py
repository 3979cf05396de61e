"""Number the sequences of a packed row for transformers' masks without a look at the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jetrl_patch.gate import while_config


@while_config(lambda config: config.exact)
def find_packed_sequence_indices(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``masking_utils.find_packed_sequence_indices``, which asks the device whether all tokens are of one sequence.

    Where the framework said how many sequences there are at most, the answer is not asked for, as in a traced graph: the
    numbers are returned also if they are all the same. Exact attention does not read them, any other masks nothing by them.
    """

    def find_packed_sequence_indices(position_ids: Any) -> Any:
        import torch

        from jetrl_patch.exact import packed

        if packed.bound(position_ids) is None:
            return original(position_ids)
        begins = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1
        return begins.cumsum(-1)

    return find_packed_sequence_indices
