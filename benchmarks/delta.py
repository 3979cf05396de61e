"""How much changes between two weight syncs, and what a delta sync costs: tables of ``docs/sync.md``.

``python -m benchmarks.delta runs`` trains a small model in the real verl or OpenRLHF with ``sync="delta"``, at four learning
rates in turn, and reports how many bytes changed and were sent. ``python -m benchmarks.delta speed`` times the packing of one
tensor on one thread.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.harness import Row, best_of, main
from jetrl_patch.sync import delta
from jetrl_patch.sync.digest import digest

RATES = (1e-7, 1e-6, 1e-5, 1e-4)
#: Qwen3 with the initial weights of its Hugging Face class: normal, standard deviation 0.02
MODEL = {
    "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4,
}  # fmt: skip
DELTA = {"JETRL_PRECISION": "fp8-unified", "JETRL_SYNC": "delta", "CUDA_VISIBLE_DEVICES": ""}
PATIENCE = 1800.0  # seconds for a run


def add_hook(folder: Path, steps: int) -> Path:
    """Write a ``sitecustomize`` that changes the optimizer's learning rate every ``steps`` steps; return its folder."""
    place = folder / "hook"
    place.mkdir()
    (place / "sitecustomize.py").write_text(
        f"""
import wrapt

@wrapt.when_imported("torch.optim.optimizer")
def _(module):
    rates, steps, taken = {RATES!r}, {steps}, {{}}
    def choose(optimizer, args, kwargs):  # DeepSpeed steps an optimizer once for each group of parameters
        first = id(next(p for group in optimizer.param_groups for p in group["params"]))
        number = taken[first] = taken.get(first, -1) + 1
        for group in optimizer.param_groups:
            group["lr"] = rates[min(number // steps, len(rates) - 1)]
    module.register_optimizer_step_pre_hook(choose)
"""
    )
    return place


def train(framework: str, folder: Path, steps: int) -> list[dict[str, float]]:
    """Train for ``steps`` steps at each rate; return the metrics of each step."""
    from transformers import AutoModelForCausalLM

    from tests.models import config_of
    from tests.openrlhf import run_openrlhf
    from tests.verl import run_verl

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of("qwen3", **MODEL), dtype=torch.float32)
    model.to(torch.bfloat16).save_pretrained(run_openrlhf.make_task(folder, fill=True) / "model")
    environ = {**DELTA, "PYTHONPATH": str(add_hook(folder, steps))}
    if framework == "verl":
        found = run_verl.Run(folder, environ=environ, steps=steps * len(RATES))
    else:
        found = run_openrlhf.Run(folder, "--train.num_episodes", str(len(RATES)), environ=environ, steps=steps)  # in each episode
    if found.wait(PATIENCE) != 0:
        raise SystemExit(found.text[-6000:])
    metrics = found.metrics()
    if len(metrics) != steps * len(RATES) or any(step["jetrl/bit_equal_fraction"] != 1.0 for step in metrics):
        raise SystemExit(f"required {steps * len(RATES)} steps with bit-equal tokens, found {len(metrics)} steps or a mismatch")
    return metrics


def runs(framework: str = "verl", steps: int = 10) -> Iterator[Row]:
    """Medians over the syncs of ``steps`` steps at each learning rate, in "verl" or "openrlhf".

    They leave out the sync before the first step, which sends everything.
    """
    with tempfile.TemporaryDirectory(prefix="delta") as folder:
        metrics = train(framework, Path(folder), steps)
    for number, rate in enumerate(RATES):
        found = metrics[number * steps : (number + 1) * steps]
        shares = [step["jetrl/sync_bytes_total"] / step["jetrl/sync_bytes_full"] for step in found]
        quantized = [2 * step["jetrl/sync_bytes"] / step["jetrl/sync_bytes_bf16"] for step in found]
        yield {
            "framework": framework,
            "learning rate": f"{rate:.0e}",
            "bytes that changed, %": 100 * statistics.median(step["jetrl/sync_changed_fraction"] for step in found),
            "sent, % of a full sync": 100 * statistics.median(shares),
            "most in one sync, %": 100 * max(shares),
            "FP8 layers sent, % of their weights": 100 * statistics.median(quantized),
            "sent, MB": statistics.median(step["jetrl/sync_bytes_total"] for step in found) / 1e6,
            "full, MB": found[0]["jetrl/sync_bytes_full"] / 1e6,
        }


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
    main(runs, speed)
