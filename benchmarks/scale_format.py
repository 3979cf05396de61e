"""Compare the scale formats and write the table of ``docs/precisions.md``.

Measures the quantization error of weights and activations of the example's model, the mismatch between trainer and rollout
when they share only the linears, and the loss of training from scratch with cross-entropy.
Run: ``python -m benchmarks.scale_format`` (a few minutes on two cores, longer with more steps).
"""

from __future__ import annotations

import json
import platform
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from benchmarks.harness import Row, filled, main, markdown
from examples.words import task, warm_start
from examples.words.tokenizer import build_tokenizer
from jetrl_patch.backends import quantize
from jetrl_patch.fp8.convert import swap_linears
from jetrl_patch.models.layers import is_quantized

FORMATS = ("pow2", "fp32")
PAGE = Path(__file__).parents[1] / "docs" / "precisions.md"


def sqnr(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Signal-to-quantization-noise ratio in dB."""
    error = (value.double() - reference.double()).pow(2).sum()
    return float(10 * torch.log10(reference.double().pow(2).sum() / error))


def quantization_error() -> dict[str, tuple[float, float]]:
    """SQNR in dB of (weights, activations), averaged over the FP8 layers of the example's checkpoint."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(warm_start.CHECKPOINT, dtype=torch.bfloat16)
    inputs: dict[str, torch.Tensor] = {}
    layers = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and is_quantized(n, ())}
    for name, layer in layers.items():
        layer.register_forward_pre_hook(lambda m, args, n=name: inputs.__setitem__(n, args[0].flatten(0, 1)))
    tokenizer = build_tokenizer()
    prompts = {q: warm_start.prompt_ids(tokenizer, q) for q in task.split()[0][:64]}
    ids, _ = warm_start.batch(tokenizer, prompts, 32, 0.5, random.Random(0))
    with torch.no_grad():
        model(input_ids=ids)
    result = {}
    for scale_format in FORMATS:
        w, a = [], []
        for name, layer in layers.items():
            q = quantize.quantize_weight(layer.weight, scale_format)
            w.append(sqnr(quantize.dequantize_weight(*q), layer.weight))
            q = quantize.quantize_activation(inputs[name], scale_format)
            a.append(sqnr(quantize.dequantize_activation(*q), inputs[name]))
        result[scale_format] = sum(w) / len(w), sum(a) / len(a)
    return result


def mismatch(tokens: int) -> dict[str, dict[str, Any]]:
    """``jetrl parity`` with only the linears shared, for each format."""
    result = {}
    for scale_format in track(FORMATS, "mismatch with shared linears"):
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = [sys.executable, "-m", "jetrl_patch.cli.main", "parity", "--model", str(warm_start.CHECKPOINT)]
            command += ["--precision", "fp8-unified", "--align", "linear", "--scale-format", scale_format]
            subprocess.run([*command, "--tokens", str(tokens), "--json", file.name], check=True)
            result[scale_format] = json.loads(Path(file.name).read_text())[0]
    return result


def from_scratch(convert: Callable[[torch.nn.Module], object], steps: int, seed: int, label: str) -> float:
    """Train from scratch on the example's answers; return the mean cross-entropy over the last tenth of the steps."""
    tokenizer = build_tokenizer()
    model = warm_start.build_model(tokenizer, seed)
    convert(model)
    prompts = {q: warm_start.prompt_ids(tokenizer, q) for q in task.split()[0]}
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98))
    losses = []
    for step in track(range(steps), label):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / (0.05 * steps)) * (1 - step / steps)
        ids, labels = warm_start.batch(tokenizer, prompts, 64, 0.5, rng)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=warm_start.IGNORE
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    tail = losses[-max(1, steps // 10) :]
    return sum(tail) / len(tail)


def training(steps: int, seeds: int) -> dict[str, list[float]]:
    """Final losses per seed: BF16, and FP8 with each scale format."""
    arms: dict[str, Callable[[torch.nn.Module], object]] = {"bf16": lambda m: None}
    for scale_format in FORMATS:
        arms[scale_format] = lambda m, f=scale_format: swap_linears(m, (), f, "native")  # type: ignore[misc]
    return {arm: [from_scratch(convert, steps, s, f"{arm}, seed {s}") for s in range(seeds)] for arm, convert in arms.items()}


def scale_formats(steps: int = 600, seeds: int = 2, tokens: int = 4000) -> list[Row]:
    """The table of the page, which is written."""
    torch.set_num_threads(1)
    errors, losses, apart = quantization_error(), training(steps, seeds), mismatch(tokens)
    mean = {arm: sum(values) / len(values) for arm, values in losses.items()}
    rows: list[Row] = [
        {
            "`scale_format`": f, "weights, SQNR dB": f"{errors[f][0]:.2f}", "activations, SQNR dB": f"{errors[f][1]:.2f}",
            'mean abs Δlogp, `align="linear"`': f"{apart[f]['logp_abs_diff_mean']:.2e}", "k3 KL": f"{apart[f]['k3_kl']:.2e}",
            "loss from scratch (relative to BF16)": f"{mean[f]:.4f} ({(mean[f] / mean['bf16'] - 1) * 100:+.2f}%)",
        }
        for f in FORMATS
    ]  # fmt: skip
    ran = (
        f"The example's model; {tokens} sampled tokens; {steps} steps of cross-entropy, {seeds} seed(s), "
        f"BF16 loss {mean['bf16']:.4f}; torch {torch.__version__}, {platform.machine()}. "
        f"Command: `python -m benchmarks.scale_format --steps {steps} --seeds {seeds} --tokens {tokens}`."
    )
    PAGE.write_text(filled(PAGE.read_text(), {"scale-formats": f"{markdown(rows)}\n{ran}"}))
    return rows


if __name__ == "__main__":
    main(scale_formats)
