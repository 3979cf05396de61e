"""What packing one tensor for a delta sync costs on one thread: ``python -m benchmarks.delta``, a table of ``docs/sync.md``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.harness import best_of
from jetrl_patch.sync import delta
from jetrl_patch.sync.digest import digest
from scripts.tables import Row, markdown


def speed(size: int = 1 << 26) -> Iterator[Row]:
    """GB/s of the tensor's bytes, on one thread, by the share of bytes that changed."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    old = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    for share in (0.0001, 0.001, 0.01, 0.1):
        new = torch.where(torch.rand(size, generator=generator) < share, old ^ 1, old)
        record, changed = delta.encode(old, new)
        assert record is not None
        work = {
            "pack": partial(delta.encode, old, new),
            "apply": partial(delta.apply, old.clone(), record),
            "digest": partial(digest, new.view(-1, 4096)),
        }
        best = best_of(work, seconds=1.0, rounds=3)
        yield {
            "changed, %": 100 * changed / size,
            "sent, %": 100 * len(record) / size,
            **{f"{name}, GB/s": size / seconds / 1e9 for name, seconds in best.items()},
        }


if __name__ == "__main__":
    print(markdown(list(speed())))
