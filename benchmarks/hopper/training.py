"""Part d: a training step of a stack of blocks with ``lm_head`` and log-probs, by phase.

Parameters, gradients and AdamW's states are BF16 on one GPU without FSDP, in every mode. BF16 runs with flash-attn if installed,
else SDPA; its log-probs are verl's, which also depend on flash-attn.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from typing import Any

import torch
from torch import Tensor

import jetrl_patch
from benchmarks.hopper.plan import Setup
from benchmarks.shapes import MODELS, VOCABULARY
from jetrl_patch import Config
from scripts.tables import Row

BASELINE, OWN = "BF16", "exact, the project's attention"
#: name -> settings (None: the plugin is off)
MODES: dict[str, Config | None] = {
    BASELINE: None,
    "linear": Config(precision="fp8-unified", align="linear"),
    "exact": Config(precision="fp8-unified", align="exact"),
    OWN: Config(precision="fp8-unified", align="exact", exact_attention="triton"),
}
#: what else differs -> sequences, tokens of each
VARIANTS = {"short": (4, 4096), "long": (1, 16384), "short, checkpointing": (4, 4096)}
PHASES = ("old log-probs", "forward", "backward", "optimizer")
LAYERS, STEPS = 4, 8


def build(layers: int, setup: Setup, attention: str = "sdpa") -> Any:
    """A Qwen3 of 8B's sizes, or a tiny one, with random BF16 weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    hidden, inner, heads, kv_heads, width = (128, 256, 2, 1, 64) if setup.dry else MODELS[1][1:]
    config = AutoConfig.for_model(
        "qwen3", hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=width, vocab_size=256 if setup.dry else VOCABULARY, num_hidden_layers=1 if setup.dry else layers,
        max_position_embeddings=40960, tie_word_embeddings=False, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(setup.device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)


def pieces(dry: bool) -> list[str]:
    return [f"{mode}; {variant}" for variant in list(VARIANTS)[: 1 if dry else 3] for mode in MODES if not dry or mode != OWN]


def measure(name: str, setup: Setup) -> list[Row]:
    """One mode's times, and the step's relative to BF16 in the same variant."""
    mode, variant = name.split("; ")
    row: Row = {"mode": mode, "sequences": variant, **_measure(mode, variant, setup)}
    steps = {(each["mode"], each["sequences"]): each["step ms"] for each in (*setup.earlier, row)}
    return [row | {"BF16 / this": steps.get((BASELINE, variant), float("nan")) / row["step ms"]}]


def _measure(mode: str, variant: str, setup: Setup) -> Row:
    from verl.utils.torch_functional import logprobs_from_logits

    from jetrl_patch.exact.ops import token_log_probs
    from jetrl_patch.trainer.prepare import prepare_model

    cuda, settings, formula, counted = not setup.dry, MODES[mode], logprobs_from_logits, PHASES
    model = build(LAYERS, setup, "flash_attention_2" if cuda and importlib.util.find_spec("flash_attn") else "sdpa")
    if settings is not None:
        settings = settings.replace(backend=setup.backend)
        jetrl_patch.enable(settings)
        prepare_model(model, settings.resolved(), device_type=setup.device)
        if settings.resolved().exact:  # skips the pass for old log-probs, because the rollout's are the trainer's
            formula, counted = token_log_probs, PHASES[1:]
    if "checkpointing" in variant:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=cuda)
    ids = torch.randint(model.config.vocab_size, (2, 16) if setup.dry else VARIANTS[variant], device=setup.device)

    def score() -> Tensor:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
        return formula(logits, ids[:, 1:].flatten())

    steps = []
    for _ in range(2 if setup.dry else 2 * STEPS):
        marks = [_now(cuda)]
        with torch.no_grad():
            score()
        marks.append(_now(cuda))
        loss = -score().float().mean()
        marks.append(_now(cuda))
        loss.backward()
        marks.append(_now(cuda))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        marks.append(_now(cuda))
        steps.append({phase: 1e3 * (b - a) for phase, a, b in zip(PHASES, marks, marks[1:])})
    steps = steps[len(steps) // 2 :]  # the first half warms up
    whole = statistics.median(sum(found[phase] for phase in counted) for found in steps)
    return {
        "attention": model.config._attn_implementation, "log-probs": formula.__name__,
        **{f"{phase} ms": statistics.median(found[phase] for found in steps) for phase in PHASES},
        "step ms": whole, "tokens/s": 1e3 * ids.numel() / whole,
        "peak GiB": torch.cuda.max_memory_allocated() / 2**30 if cuda else "",
    }  # fmt: skip


def _now(cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()
