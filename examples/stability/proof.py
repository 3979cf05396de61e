"""GRPO on a real pretrained model, SmolLM2-135M: which rollouts keep up with exact mode, and which levers make a difference?

Start it with ``make proof``. It trains what ``examples/smollm2/proof`` does not have yet, run by run, for as long as you let it:
each completed run becomes a small file there, and a stopped command goes on at the step where the trainer was last saved.
``--fill`` trains nothing: it writes the table and the picture of docs/stability.md from these files.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from examples.common.runner import RunFailedError
from examples.stability.arms import Arm, Setting
from examples.stability.loop import TRAINERS_ACCURACY
from examples.stability.picture import draw_proof
from examples.stability.sweep import ROOT, Job, is_whole, sweep, wide_console
from jetrl_patch.cli.report import Run, read_runs
from jetrl_patch.cli.report.pictures import draw_pictures
from scripts.fill_figures import figure
from scripts.tables import filled, markdown

RECORDS = ROOT / "examples" / "smollm2" / "proof"
PAGE, PICTURE = ROOT / "docs" / "stability.md", ROOT / "docs" / "assets" / "proof.png"
SCORE = "critic/score/mean"
HELD_OUT = "val-core/chain_sum/acc/mean@1"
#: what a record keeps of a step, to five digits
METRICS = (
    SCORE, HELD_OUT, TRAINERS_ACCURACY, "jetrl/tokens", "jetrl/logp_abs_diff_mean", "jetrl/logp_abs_diff_max", "jetrl/k3_kl",
    "jetrl/bit_equal_fraction", "jetrl/masked_fraction", "actor/pg_clipfrac", "actor/grad_norm", "response_length/mean",
)  # fmt: skip

EXACT, ROLLOUT = Arm(precision="fp8-unified"), Arm(precision="fp8-rollout")
#: the arms, the two that decide first
ARMS = (
    EXACT,
    ROLLOUT,
    Arm(precision="bf16"),
    Arm(precision="fp8-unified", align="linear"),
    Arm(precision="fp8-rollout", correction="tis"),
    Arm(precision="fp8-rollout", correction="mis"),
    Arm(precision="int8-rollout"),
    Arm(precision="fp8-unified", kv_cache="fp8"),
)
BASE = Setting(
    task="smollm2", steps=10, learning_rate=3e-5, prompts=2, group=8, updates=2, response_tokens=32, validate_every=10,
    held_out=64,
)  # fmt: skip
#: the base and what differs from it: one lever, but several in ``updates-4`` and ``one-question``
SETTINGS = {
    "base": BASE,
    "lr-1e-4": replace(BASE, learning_rate=1e-4),
    "temperature-1.5": replace(BASE, temperature=1.5),
    "updates-4": replace(BASE, prompts=4, group=4, updates=4),
    "lr-1e-5": replace(BASE, learning_rate=1e-5),
    "bypass": replace(BASE, old="rollout"),
    "updates-1": replace(BASE, updates=1),
    "group-16": replace(BASE, group=16),
    "one-question": replace(BASE, prompts=1, group=16, updates=1),
    "steps-40": replace(BASE, steps=40),
}

@dataclass(frozen=True)
class Verdict:
    """One arm in one setting, by seed: the mean score of the last half of the batches, and the last held-out scores."""

    score: dict[int, float]
    held_out: dict[int, float]
    trainer: dict[int, float]


def jobs(settings: Sequence[str], arms: Sequence[Arm], seeds: Sequence[int]) -> list[Job]:
    """The runs of a choice: a setting's seeds one after the other, the arms of a seed side by side."""
    return [
        Job(arm=arm, seed=seed, setting=SETTINGS[name], title=name) for name in settings for seed in seeds for arm in arms
    ]


def keep(job: Job, run: Run, folder: Path = RECORDS) -> Path:
    """Write a completed run's record: a line a step, with the metrics to five digits. Returns its path."""
    identity = {
        "precision": run.precision, "align": run.align, "correction": job.arm.correction, "kv_cache": job.arm.kv_cache,
        "seed": run.seed, "setting": job.setting.changed(),
    }  # fmt: skip
    lines = []
    for step, data in sorted(run.steps.items()):
        kept = {name: float(f"{data[name]:.5g}") for name in METRICS if name in data}
        lines.append(json.dumps({**identity, "step": step, "data": kept}))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{job.slug}.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def kept(folder: Path = RECORDS) -> dict[Job, Run]:
    """The completed runs of the settings and arms, in their order."""
    found = {}
    for job in jobs(list(SETTINGS), ARMS, range(10)):
        if is_whole(job, folder):
            (found[job],) = read_runs(folder / f"{job.slug}.jsonl")
    return found


def verdict(runs: Mapping[Job, Run], title: str, arm: Arm) -> Verdict:
    """How an arm ends in a setting."""
    mine = {job.seed: run for job, run in runs.items() if (job.title, job.arm) == (title, arm)}
    scores = {seed: [value for _, value in run.reward] for seed, run in mine.items()}
    return Verdict(
        {seed: fmean(values[len(values) // 2 :]) for seed, values in scores.items()},
        {seed: run.accuracy[-1][1] for seed, run in mine.items()},
        {seed: found[-1][1] for seed, run in mine.items() if (found := run.series(TRAINERS_ACCURACY))},
    )


def below(arm: Mapping[int, float], other: Mapping[int, float]) -> str:
    """In how many seeds ``arm`` is below ``other``, and whether its best seed is below the other's worst one."""
    seeds = arm.keys() & other.keys()
    if not seeds:
        return "–"
    count = sum(arm[seed] < other[seed] for seed in seeds)
    apart = max(arm[seed] for seed in seeds) < min(other[seed] for seed in seeds)
    return f"{count} of {len(seeds)}{', apart' if apart and len(seeds) > 1 else ''}"


def table(runs: Mapping[Job, Run]) -> str:
    """One row per setting and arm, in Markdown."""
    lines = [
        "| setting | arm | seeds | mean abs Δlogp | k3 KL | bit-equal | clipped | masked | gradient norm "
        "| score, last half (lowest to highest seed) | below exact in | held-out at the end | below exact in "
        "| trainer's own weights |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for title, arm in dict.fromkeys((job.title, job.arm) for job in runs):
        mine = [run for job, run in runs.items() if (job.title, job.arm) == (title, arm)]
        found, exact = verdict(runs, title, arm), verdict(runs, title, EXACT)

        def mean(name: str, mine: Sequence[Run] = mine) -> float:
            return fmean(value for run in mine for _, value in run.series(name))

        # a run without a correction masks nothing
        masked = "–" if arm.correction == "none" else f"{mean('jetrl/masked_fraction'):.1%}"
        name = f"`{arm.precision}`" + ", exact" * arm.config.exact + f", {arm.align}" * bool(arm.align)
        name += f" + `{arm.correction}`" * (arm.correction != "none") + ", FP8 KV cache" * (arm.kv_cache == "fp8")
        pairs = ((found.score, exact.score), (found.held_out, exact.held_out))
        compared = ["–" if arm == EXACT else below(ours, theirs) for ours, theirs in pairs]
        lines.append(
            f"| `{title}` | {name} | {len(mine)} | {figure(mean('jetrl/logp_abs_diff_mean'))} | {figure(mean('jetrl/k3_kl'))} "
            f"| {mean('jetrl/bit_equal_fraction'):.0%} | {mean('actor/pg_clipfrac'):.1%} | {masked} "
            f"| {mean('actor/grad_norm'):.1f} | {spread(found.score)} | {compared[0]} | {spread(found.held_out)} | {compared[1]} "
            f"| {spread(found.trainer)} |"
        )
    return "\n".join(lines)


def spread(by_seed: Mapping[int, float]) -> str:
    """Mean, lowest and highest value over seeds."""
    values = list(by_seed.values())
    if not values:
        return "–"
    return f"{fmean(values):.3f}" + (f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else "")


def settings_table() -> str:
    """What each setting changes, in Markdown."""
    base = BASE.changed()
    rows = []
    for title, setting in SETTINGS.items():
        changed = {name: value for name, value in setting.changed().items() if base.get(name) != value}
        changed |= {name: getattr(setting, name) for name in base if name not in setting.changed()}
        words = (f"`{name}` {value:g}" if isinstance(value, float) else f"`{name}` {value}" for name, value in changed.items())
        rows.append({"setting": f"`{title}`", "what differs from `base`": ", ".join(words) or "–"})
    return markdown(rows).rstrip()


def write_page(page: Path = PAGE, picture: Path = PICTURE) -> None:
    """Write the tables and the picture of the page from the records; its curves are of the setting with the most runs."""
    runs = kept()
    text = filled(page.read_text(encoding="utf-8"), {"proof-settings": settings_table(), "proof-table": table(runs)})
    page.write_text(text, encoding="utf-8")
    ((most, _),) = Counter(job.title for job in runs).most_common(1)
    draw_proof(runs, most, (EXACT, ROLLOUT), picture)
    draw_mismatch(runs, most, picture.with_name("mismatch.png"))


def draw_mismatch(runs: Mapping[Job, Run], shown: str, path: Path) -> None:
    """Write the picture of README.md: mean and largest |Δlogp| of a setting's modes, in the seed that most of them have."""
    modes = [job for job in runs if job.title == shown and job.arm.correction == "none" and job.arm.kv_cache == "auto"]
    ((seed, _),) = Counter(job.seed for job in modes).most_common(1)
    with tempfile.TemporaryDirectory() as folder:
        draw_pictures([runs[job] for job in modes if job.seed == seed], Path(folder))
        shutil.copy(Path(folder) / "mismatch.png", path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=tuple(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--arms", nargs="+", choices=[arm.slug for arm in ARMS], default=[EXACT.slug, ROLLOUT.slug])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("outputs/proof"))
    parser.add_argument("--fill", action="store_true", help="write docs/stability.md and train nothing")
    args = parser.parse_args()
    console = wide_console()
    if args.fill:
        write_page()
        return 0
    chosen = jobs(args.settings, [arm for arm in ARMS if arm.slug in args.arms], args.seeds)
    missing = [job for job in chosen if not is_whole(job, RECORDS)]
    console.print(f"{len(chosen) - len(missing)} of {len(chosen)} runs are in {RECORDS.relative_to(ROOT)}")
    try:
        sweep(missing, args.out.resolve(), console, args.at_once, resume=True, on_end=lambda job, run: print(keep(job, run)))
    except RunFailedError as error:
        console.print(str(error), style="red", markup=False)
        return 1
    exact = [(job, run.series("jetrl/bit_equal_fraction")) for job, run in kept().items() if job.arm == EXACT]
    unequal = [job.slug for job, equal in exact if min(value for _, value in equal) < 1]
    console.print(f"`make proof ARGS=--fill` writes {PAGE.relative_to(ROOT)}")
    if unequal:
        console.print(f"[bold red]promise broken:[/] exact runs with unequal log-probs: {', '.join(unequal)}")
    return 1 if unequal else 0


if __name__ == "__main__":
    sys.exit(main())
