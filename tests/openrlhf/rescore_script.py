"""Rescore samples of an asynchronous run, each with the checkpoint of the version that made it, and print the counts.

Arguments: folder with ``samples-*.pt``, model of version 1, folder of checkpoints (``global_step{n}_hf`` is version n + 1).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch


def load(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    from jetrl_patch import runtime
    from jetrl_patch.adapters.transformers.prepare import prepare_model

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    prepare_model(model, runtime.active_config())
    return model


@torch.no_grad()
def score(model: Any, sequence: torch.Tensor, mask: torch.Tensor, stop: int) -> torch.Tensor:
    """Return log-probs [A] of one unpadded sequence [T], with ``stop`` banned at the first action."""
    from jetrl_patch.exact.ops import token_log_probs

    logits = model(input_ids=sequence.unsqueeze(0), use_cache=False).logits[0].float()
    places = mask.nonzero().flatten()
    logits[places[0], stop] = -torch.inf
    return token_log_probs(logits[places], sequence[places + 1])


def main(samples: Path, first: Path, checkpoints: Path) -> None:
    import jetrl_patch

    jetrl_patch.enable(precision="fp8-unified", platform="cpu")
    models: dict[int, Any] = {}
    tokens, equal, versions, late = 0, 0, set(), 0
    for file in sorted(samples.glob("samples-*.pt")):
        for sequence, mask, rollout, version, trainer in torch.load(file):
            if version not in models:
                models[version] = load(first if version == 1 else checkpoints / f"global_step{version - 1}_hf")
            found = score(models[version], sequence, mask, stop=1)
            tokens += len(found)
            equal += int((found.view(torch.int32) == rollout[mask.bool()].view(torch.int32)).sum())
            versions.add(version)
            late += version != trainer
    print(tokens, equal, len(versions), late)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
