"""What the doubles refuse, and what they count."""

from __future__ import annotations

import collections

from torch import Tensor

#: launches by the kernel's or the library's name
launches: collections.Counter[str] = collections.Counter()


class Refused(RuntimeError):
    """What a GPU, a library or a launcher would refuse, or what makes the host wait."""


class Unsupported(RuntimeError):
    """What a library says that it does not support, on which callers may rely."""


def address(tensor: Tensor) -> int:
    """An address that only views of one storage share. Storages begin at multiples of 512 bytes, as those of torch do."""
    return tensor.untyped_storage()._cdata * 512 + tensor.storage_offset() * tensor.element_size()


def need(ok: bool, *what: object) -> None:
    if not ok:
        raise Refused(" ".join(map(str, what)))
