"""What changes between two weight syncs, and what a delta sync costs.

``python -m benchmarks.delta runs`` trains a small model in the real verl or OpenRLHF with ``sync="delta"`` at four learning rates
and reports the bytes that changed and that were sent. ``python -m benchmarks.delta speed`` times the packing of one tensor on one
thread.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.__main__ import shown
from benchmarks.timing import best_of
from jetrl_patch.sync import delta
from jetrl_patch.sync.digest import digest

RATES = (1e-7, 1e-6, 1e-5, 1e-4)
#: Qwen3 with the initial weights of its Hugging Face class: normal, standard deviation 0.02
MODEL = {
    "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4,
}  # fmt: skip
DELTA = {"JETRL_PRECISION": "fp8-unified", "JETRL_SYNC": "delta", "CUDA_VISIBLE_DEVICES": ""}
PATIENCE = 1800.0  # seconds for a run


def make_model(folder: Path) -> None:
    """Write the model into a task's folder, beside its tokenizer."""
    from transformers import AutoModelForCausalLM

    from tests.models import config_of

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of("qwen3", **MODEL), dtype=torch.float32)
    model.to(torch.bfloat16).save_pretrained(folder / "model")


def run(framework: str, folder: Path, rate: float, steps: int) -> list[dict[str, float]]:
    """Train for some steps; return the metrics of each."""
    from tests.openrlhf import run_openrlhf
    from tests.verl import run_verl

    if framework == "verl":
        found = run_verl.Run(folder, f"{run_verl.A}.optim.lr={rate}", environ=DELTA, steps=steps)
    else:
        extra = ("--actor.adam.lr", str(rate), "--actor.lr_scheduler", "constant", "--actor.lr_warmup_ratio", "0")
        episodes = ("--train.num_episodes", "2")  # over the prompts of half the steps
        found = run_openrlhf.Run(folder, *extra, *episodes, environ=DELTA, steps=steps // 2)
    if found.wait(PATIENCE) != 0:
        raise SystemExit(found.text[-6000:])
    metrics = found.metrics()
    if any(step["jetrl/bit_equal_fraction"] != 1.0 for step in metrics):
        raise SystemExit("a token differed between rollout and trainer")
    return metrics


def runs(framework: str, rates: Sequence[float], steps: int) -> Iterator[dict[str, object]]:
    """Medians over the syncs of a run, for each learning rate. The first sync sends everything and is not among them."""
    from tests.openrlhf.run_openrlhf import make_task

    with tempfile.TemporaryDirectory(prefix="delta") as name:
        folder = make_task(Path(name), fill=True)
        make_model(folder)
        for rate in rates:
            found = run(framework, folder, rate, steps)
            shares = [step["jetrl/sync_bytes_total"] / step["jetrl/sync_bytes_full"] for step in found]
            quantized = [2 * step["jetrl/sync_bytes"] / step["jetrl/sync_bytes_bf16"] for step in found]
            yield {
                "framework": framework,
                "learning rate": f"{rate:.0e}",
                "syncs": len(found),
                "changed bytes, %": 100 * statistics.median(step["jetrl/sync_changed_fraction"] for step in found),
                "sent, % of full": 100 * statistics.median(shares),
                "largest, %": 100 * max(shares),
                "FP8 layers sent, %": 100 * statistics.median(quantized),
                "full, MB": found[0]["jetrl/sync_bytes_full"] / 1e6,
                "largest delta, MB": max(step["jetrl/sync_bytes_total"] for step in found) / 1e6,
            }


def speed(size: int = 1 << 26) -> Iterator[dict[str, object]]:
    """GB/s of the tensor's bytes, on one thread, by the share of bytes that changed."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    old = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    for share in (0.0001, 0.001, 0.01, 0.1):
        new = torch.where(torch.rand(size, generator=generator) < share, old ^ 1, old)
        record, changed = delta.encode(old, new)
        assert record is not None
        target = old.clone()
        work: dict[str, Callable[[], object]] = {
            "pack": functools.partial(delta.encode, old, new),
            "apply": functools.partial(delta.apply, target, record),
            "digest": functools.partial(digest, new.view(-1, 4096)),
        }
        best = best_of(work, seconds=1.0, rounds=3)
        yield {
            "changed, %": 100 * changed / size,
            "sent, %": 100 * len(record) / size,
            **{f"{name}, GB/s": size / seconds / 1e9 for name, seconds in best.items()},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["runs", "speed"])
    parser.add_argument("--framework", choices=["verl", "openrlhf"], default="verl")
    parser.add_argument("--rate", type=float, action="append", help="a learning rate instead of the four; may be repeated")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    for row in runs(args.framework, args.rate or RATES, args.steps) if args.part == "runs" else speed():
        print("| " + " | ".join(shown(value) for value in row.values()) + " |", flush=True)


if __name__ == "__main__":
    main()
