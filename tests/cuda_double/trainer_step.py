"""Two training steps of a small model in exact FP8 on the double of an H100, and the trials that vLLM makes at load.

``python -m tests.cuda_double.trainer_step LIBRARY FAMILY BACKEND ATTENTION`` prints the launches of the second step.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
from typing import Any

ctypes.CDLL(sys.argv[1])  # first, because torch keeps what it was told about devices

import torch  # noqa: E402

import jetrl_patch  # noqa: E402
from jetrl_patch.config import Config  # noqa: E402
from jetrl_patch.exact import ops, sequences, trial  # noqa: E402
from jetrl_patch.trainer import prepare  # noqa: E402
from tests.cuda_double import device  # noqa: E402
from tests.cuda_double.checks import launches  # noqa: E402
from tests.models import build  # noqa: E402

TOKENS = 333


def step(model: Any, waits: bool = False) -> None:
    """Forward under autocast with recomputation, log-probs, backward. The host waits at most for a table of the first step."""
    ids, positions = (torch.empty(1, TOKENS, dtype=torch.int64, device=device.DEVICE) for _ in range(2))
    sequences.mark(positions, 7)
    with contextlib.nullcontext() if waits else device.NoWait():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(input_ids=ids, position_ids=positions, use_cache=False, attention_mask=None).logits[0]
            log_probs = ops.token_log_probs(logits, ids[0], torch.empty(TOKENS, 1, device=device.DEVICE), reuse=True)
        log_probs.sum().backward()
    assert logits.dtype == torch.bfloat16 and log_probs.dtype == torch.float32
    for name, p in model.named_parameters():
        assert p.grad is not None or not p.requires_grad, f"{name} has no gradient"
        p.grad = None


def load(config: Any) -> None:
    """The trials of ops and delta nets as vLLM makes them, with BF16 as torch's default."""
    sizes = trial.Sizes(
        config.hidden_size, config.intermediate_size, config.num_attention_heads, config.num_key_value_heads, 64,
        config.vocab_size,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    trial.require_exact_ops(sizes, device.DEVICE)
    if hasattr(config, "linear_num_key_heads"):
        names = "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"
        KH, H, K, V = (getattr(config, f"linear_{name}") for name in names)
        trial.require_exact_delta_net((KH, H, K, V), sizes, device.DEVICE)


def main(family: str, backend: str, kernel: str) -> None:
    jetrl_patch.enable(precision="fp8-unified")
    model = build(family).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    device.install(kernel == "flash3")
    config = Config(precision="fp8-unified", backend=backend, exact_attention=kernel).resolved()
    with device.tensors_without_values():
        assert prepare.prepare_model(model, config, device_type="cuda")
        device.to_device(model)
        step(model, waits=True)
        launches.clear()
        step(model)
        counted = json.dumps(launches)
        load(model.config)
    print(counted)


if __name__ == "__main__":
    main(*sys.argv[2:])
