"""Two ZeRO-3 ranks gather weights again and again, the largest first. Prints how many were read before they had arrived."""

from __future__ import annotations

import os
import sys

#: the large weight is still on its way when the last has arrived
SIZES, TURNS = (20_000_000, 10, 10), 15


def read_early() -> int:
    """Gather all weights ``TURNS`` times; count those that do not hold their value at once."""
    import deepspeed
    import torch

    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    with deepspeed.zero.Init(config_dict_or_path={**config, "bf16": {"enabled": True}}):
        model = torch.nn.ParameterList(
            torch.nn.Parameter(torch.full((size,), float(number))) for number, size in enumerate(SIZES, start=1)
        )
    found = 0
    for _ in range(TURNS):
        with deepspeed.zero.GatheredParameters(list(model)):
            found += sum(not bool((weight == number).all()) for number, weight in enumerate(model, start=1))
    return found


if __name__ == "__main__":
    import jetrl_patch

    if sys.argv[1] == "patched":
        jetrl_patch.enable(precision="fp8-unified")
        import openrlhf  # noqa: F401  (the patches are those of its processes)
    print(f"rank {os.environ['RANK']}: {read_early()} of {TURNS * len(SIZES)} read early", flush=True)
