"""What a script of several ranks has found, for the test that started it."""

from __future__ import annotations

import json
import os
import sys

import torch.distributed as dist


def tell(facts: dict) -> None:
    """Print the facts of all ranks in one line, and end this process."""
    every: list = [None] * dist.get_world_size()
    dist.all_gather_object(every, facts)
    if dist.get_rank() == 0:
        print("FACTS " + json.dumps(every), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter, which then aborts
