"""Compare the scale formats and write the table of ``docs/precisions.md``: ``python -m benchmarks.scale_format``.

Measures the quantization error of weights and activations of the example's model, the mismatch between trainer and rollout when
they share only the linears, and the loss of training from scratch with cross-entropy. It takes a few minutes on two cores.
"""

from __future__ import annotations

import platform
import random
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn

from benchmarks.harness import Row, filled, main, markdown
from examples.words import CHECKPOINT, task, warm_start
from examples.words.tokenizer import build_tokenizer
from jetrl_patch.backends import quantize
from jetrl_patch.cli.parity.run import run_mode
from jetrl_patch.fp8.convert import swap_linears
from jetrl_patch.kernels.formats import ScaleFormat
from jetrl_patch.measure.parity import Job, choose
from jetrl_patch.models.layers import is_quantized

FORMATS: tuple[ScaleFormat, ...] = ("pow2", "fp32")
PAGE = Path(__file__).parents[1] / "docs" / "precisions.md"


def sqnr(value: Tensor, reference: Tensor) -> float:
    """Signal-to-quantization-noise ratio in dB."""
    error = (value.double() - reference.double()).pow(2).sum()
    return float(10 * torch.log10(reference.double().pow(2).sum() / error))


def quantization_error() -> dict[str, tuple[float, float]]:
    """SQNR in dB of (weights, activations), averaged over the FP8 layers of the example's checkpoint."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.bfloat16)
    inputs: dict[str, Tensor] = {}
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and is_quantized(n, ())}
    for name, layer in layers.items():
        layer.register_forward_pre_hook(lambda m, args, n=name: inputs.__setitem__(n, args[0].flatten(0, 1)))
    with torch.no_grad():
        model(input_ids=examples(random.Random(0), 64, 32)(0)[0])
    found = {}
    for scale_format in FORMATS:
        weights, activations = [], []
        for name, layer in layers.items():
            quantized = quantize.quantize_weight(layer.weight, scale_format)
            weights.append(sqnr(quantize.dequantize_weight(*quantized), layer.weight))
            quantized = quantize.quantize_activation(inputs[name], scale_format)
            activations.append(sqnr(quantize.dequantize_activation(*quantized), inputs[name]))
        found[scale_format] = mean(weights), mean(activations)
    return found


def mismatch(scale_format: ScaleFormat, tokens: int) -> dict[str, Any]:
    """``jetrl parity`` with only the linears shared."""
    (config,) = choose(["fp8-unified"], ["linear"], scale_format=scale_format)
    return run_mode(Job(model=str(CHECKPOINT), config=config, tokens=tokens))


def examples(rng: random.Random, questions: int | None = None, size: int = 64) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Batches of the example's answers, half of them worked out."""
    tokenizer = build_tokenizer()
    prompts = {q: warm_start.prompt_ids(tokenizer, q) for q in task.split()[0][:questions]}
    return lambda step: warm_start.batch(tokenizer, prompts, size, 0.5, rng)


def from_scratch(convert: Callable[[nn.Module], object], steps: int, seed: int) -> float:
    """Train from scratch on the example's answers; return the mean cross-entropy over the last tenth of the steps."""
    model, losses, batch = warm_start.build_model(build_tokenizer(), seed), [], examples(random.Random(seed))
    convert(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98))
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / (0.05 * steps)) * (1 - i / steps))
    for step in range(steps):
        ids, labels = batch(step)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids).logits[:, :-1].float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=warm_start.IGNORE)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        losses.append(loss.item())
    return mean(losses[-max(1, steps // 10) :])


def scale_formats(steps: int = 600, seeds: int = 2, tokens: int = 4000) -> list[Row]:
    """Write the table into the page."""
    torch.set_num_threads(1)
    arms: dict[str, Callable[[nn.Module], object]] = {"bf16": lambda model: None}
    for scale_format in FORMATS:
        arms[scale_format] = lambda model, f=scale_format: swap_linears(model, (), f, "native")  # type: ignore[misc]
    losses = {
        arm: mean(from_scratch(convert, steps, seed) for seed in range(seeds)) for arm, convert in track(arms.items(), "training")
    }
    errors, rows = quantization_error(), []
    for scale_format in track(FORMATS, "mismatch with shared linears"):
        apart, loss = mismatch(scale_format, tokens), losses[scale_format]
        rows.append(
            {
                "`scale_format`": scale_format,
                "weights, SQNR dB": f"{errors[scale_format][0]:.2f}",
                "activations, SQNR dB": f"{errors[scale_format][1]:.2f}",
                'mean abs Δlogp, `align="linear"`': f"{apart['logp_abs_diff_mean']:.2e}",
                "k3 KL": f"{apart['k3_kl']:.2e}",
                "loss from scratch (relative to BF16)": f"{loss:.4f} ({(loss / losses['bf16'] - 1) * 100:+.2f}%)",
            }
        )
    ran = (
        f"The example's model; {tokens} sampled tokens; {steps} steps of cross-entropy, {seeds} seed{'s' * (seeds > 1)}, "
        f"BF16 loss {losses['bf16']:.4f}; torch {torch.__version__}, {platform.machine()}.\n"
        f"Command: `python -m benchmarks.scale_format --steps {steps} --seeds {seeds} --tokens {tokens}`."
    )
    PAGE.write_text(filled(PAGE.read_text(), {"scale-formats": f"{markdown(rows)}\n{ran}"}))
    return rows


if __name__ == "__main__":
    main(scale_formats)
