"""The ``jetrl parity`` command: parse arguments, print tables, write a JSON file and a picture."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jetrl_patch.cli.parity.run import run_mode
from jetrl_patch.config import SETTINGS
from jetrl_patch.config.modes import PRECISIONS
from jetrl_patch.errors import ConfigError, JetrlError, ModelError, check_target, writing
from jetrl_patch.measure.parity import (
    BY_DEFAULT,
    RESPONSE_PARTS,
    STOCK,
    Draw,
    Job,
    check_model,
    choose,
    chosen,
    in_turn,
)
from jetrl_patch.native.machine import require_torch
from jetrl_patch.patching.guards import is_installed
from jetrl_patch.progress import Display
from jetrl_patch.trainer.preflight import check_checkpoint, needed_ep

#: the value of ``--engine`` that compiles no engine
_EAGER = '{"enforce_eager": true}'
#: vLLM's argument for whole experts on each of its tensor-parallel ranks
_EP = "enable_expert_parallel"

Result = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Returns 1 if a mode that promises equality is not equal, else 0. Errors are raised."""
    options = _parser().parse_args(arguments)
    # with --verbose the frameworks write to the terminal as well
    with Display("parity", live=not options.verbose) as progress:
        progress.stage("checking the model and the settings")
        jobs = _jobs(options)
        results, lacking = _measure(jobs, options.verbose, not options.stock, progress)
    _show(jobs[0], results, lacking)
    if options.picture:
        _draw(results[0], options.model, options.picture)
    if options.json:
        with writing(options.json):
            Path(options.json).write_text(json.dumps(results, indent=2) + "\n")
    promised = {job.label for job in jobs if job.promises_equality}
    broken = [r for r in results if (r["precision"], r["align"]) in promised and r["bit_equal_fraction"] != 1.0]
    for result in broken:
        print(
            f"{result['precision']} with align={result['align']} promises equal log-probs, but "
            f"{1 - result['bit_equal_fraction']:.2%} of the tokens differ, by up to {result['logp_abs_diff_max']:.3g}"
        )
    return 1 if broken else 0


def _jobs(options: argparse.Namespace) -> list[Job]:
    """The modes that the options select, after every check that needs no engine."""
    require_torch("jetrl parity")
    _check_explain(options)
    stock = chosen(options.stock)
    configs = []
    if not stock or options.precision or options.align:
        aligns = ["exact"] if options.explain else options.align
        common = {name: getattr(options, name) for name in ("scale_format", "on_cut", "backend", "kv_cache")}
        granularity, exclude = options.rollout_granularity, tuple(options.exclude)
        configs = choose(options.precision, aligns, granularity, exclude=exclude, **common)
    for target in filter(None, (options.json, options.picture)):
        check_target(Path(target), folder=False)  # measuring takes minutes
    images = check_model(options.model, [] if options.explain else configs, options.tp)
    if images and options.explain:
        raise ModelError(f"--explain compares trainers of a text model, and {options.model} has a vision tower. Drop --explain.")
    if options.explain:
        try:
            check_model(options.model, configs, options.tp)
        except ModelError as error:
            raise ModelError(f"--explain compares trainers with an exact rollout. {error} Then run without --explain.") from None
    names = ("model", "cost", "full", "explain", "tp", "batch", "tokens", "length", "seed", "prompts", "prompt_tokens")
    shared: dict[str, Any] = {name: getattr(options, name) for name in names} | {"engine": _engine(options.engine)}
    shared["draws"] = in_turn({item.name: getattr(options, item.name) for item in fields(Draw)})
    jobs = [Job(config=STOCK[name].config(), stock=name, **shared) for name in stock]
    jobs += [Job(config=config, **shared) for config in configs]
    split = not any(name == _EP for name, _ in jobs[0].engine)
    if split and any(needed_ep(job.model, job.config, job.tp) > 1 for job in jobs if not job.stock):
        print(f"{_EP}: tensor parallel size {options.tp} would cut a block of the experts, which now stay whole")
        jobs = [replace(job, engine=(*job.engine, (_EP, True))) for job in jobs]
    for job in jobs if options.tp > 1 or images else ():
        if not job.stock:
            check_checkpoint(job.model, job.config, job.tp, job.ep)
    return jobs


def _check_explain(options: argparse.Namespace) -> None:
    """Raise ConfigError for options that ``--explain`` does not measure."""
    if options.picture and not options.explain:
        raise ConfigError("--picture shows what --explain measures. Add --explain, or use jetrl report for pictures of runs.")
    if not options.explain:
        return
    stock = options.stock is not None
    given = {"--precision": options.precision, "--align": options.align, "--stock": stock, "--cost": options.cost}
    if other := [name for name, value in given.items() if value]:
        raise ConfigError(
            f"--explain chooses its own modes: an exact rollout, and trainers between stock and exact. Drop {', '.join(other)}."
        )
    if options.picture and not is_installed("matplotlib"):
        raise JetrlError("--picture needs matplotlib, which is not installed. Run pip install matplotlib.")


def _measure(jobs: list[Job], verbose: bool, may_lack: bool, progress: Display) -> tuple[list[Result], list[str]]:
    """Measure. With ``may_lack``, a stock setup that cannot run here is a line in the second list instead of an error."""
    results, lacking = [], []
    for number, job in enumerate(jobs, 1):
        progress.part = f"{job.name if job.stock else _mode(*job.label)}, {number} of {len(jobs)}"
        try:
            results.append(run_mode(job, verbose, progress))
        except JetrlError as error:
            if not (job.stock and may_lack):
                raise
            lacking.append(f"{job.name} does not run here: {error}")
    if not results:
        raise JetrlError(lacking[0])
    return results, lacking


# ---- The tables ----------------------------------------------------------------------------------

def _show(job: Job, results: list[Result], lacking: list[str]) -> None:
    """Print the tables and the lines under them. ``job`` holds the settings that all modes share."""
    from jetrl_patch.config.formats import FORMATS
    from jetrl_patch.models.layers import cut_words

    console = Console()
    size = f"tensor parallel size {job.tp}, batches of {job.batch} × {job.length} tokens"
    title = f"rollout vs. trainer: {Path(job.model).name}, {size}"
    columns = ("precision", "align", "tokens", "mean |Δ|", "max |Δ|", "k3 KL", "bit-equal")
    rows = []
    for r in results:
        figures = [f"{r[key]:.2g}" for key in ("logp_abs_diff_mean", "logp_abs_diff_max", "k3_kl")]
        rows.append((r["precision"], r["align"], f"{r['tokens']:,}", *figures, f"{r['bit_equal_fraction']:.2%}"))
    console.print(_table(title, "Δ: log-prob of a sampled token, trainer minus rollout", columns, rows, left=2))
    if job.explain:
        _show_explained(results[0], job.model, console)
    mixtures = [r for r in results if r["route_mismatch"] is not None]
    if mixtures:
        shares = ", ".join(f"{_mode(r['precision'], r['align'])} {r['route_mismatch']:.3%}" for r in mixtures)
        text = f"other experts in trainer and rollout, of all tokens and blocks: {shares}"
        console.print(text, highlight=False, soft_wrap=True)
    for r in results if job.full else ():
        console.print(_of_full(r), highlight=False, soft_wrap=True)
    if job.cost:
        console.print(_costs(results))
    for line in lacking:
        console.print(line, markup=False, highlight=False)
    for cut, scales in dict.fromkeys((tuple(r["cut_layers"]), r["scale_format"]) for r in results if r["cut_layers"]):
        console.print(cut_words(cut, job.tp, FORMATS[scales]))


def _of_full(result: Result) -> str:
    full = result["full"]
    whole = f"{full['equal']:.2%} of {full['values']:,} log-probs of the whole vocabulary equal, max |Δ| {full['apart']:.2g}"
    alone = f"{full['alone_equal']:.2%} of the tokens equal, max |Δ| {full['alone_apart']:.2g}"
    return f"{_mode(result['precision'], result['align'])}: {whole}; the trainer alone, one sequence at a time: {alone}"


def _mode(precision: str, align: str) -> str:
    return precision if align == "none" else f"{precision}/{align}"


def _table(title: str, caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: int) -> Table:
    """A table whose first ``left`` columns are text, and the others numbers."""
    table = Table(title=title, caption=caption)
    for at, column in enumerate(columns):
        table.add_column(column, justify="left" if at < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _costs(results: list[Result]) -> Table:
    caption = "rollout: sampled; trainer: forward and backward; ×: relative to the first row"
    if len({r["execution"] for r in results}) > 1:
        caption += f". Each engine runs as in training; all alike, not compiled: --engine '{_EAGER}'"
    rows = []
    for r in results:
        pairs = [(r[key], results[0][key]) for key in ("rollout_tokens_per_second", "trainer_tokens_per_second")]
        figures = (text for a, b in pairs for text in (f"{a:,.0f}", f"{a / b:.2f}"))
        rows.append((r["precision"], r["align"], r["execution"], *figures))
    return _table("tokens per second", caption, ("precision", "align", "engine", "rollout", "×", "trainer", "×"), rows, left=3)


# ---- The tables and the picture of ``--explain`` --------------------------------------------------

#: number of blocks that the table of depth shows
_BLOCKS = 5


def _show_explained(result: Result, model: str, console: Console) -> None:
    steps: list[dict[str, Any]] = result["steps"]
    rows = []
    for before, step in zip([None, *steps], steps):
        change = "" if before is None else f"{step['mean'] - before['mean']:+.4f}"
        alone = "" if step["alone"] is None else _short(step["alone"])
        ends = (step["max"], step["parts"][0], step["parts"][-1])
        rows.append((_step_name(step), _short(step["mean"]), change, alone, *map(_short, ends)))
    title = f"where the mismatch comes from: {Path(model).name}, {result['tokens']:,} tokens"
    caption = (
        "Each row makes one more op of the trainer exact. Change: what that removed. Alone: the mismatch if only this op is "
        "stock; 0 where exact mode keeps Hugging Face's op and changes vLLM's instead. Early and late: in the first and the "
        "last quarter of the responses."
    )
    columns = ("trainer", "mean |Δ|", "change", "alone", "max |Δ|", "early", "late")
    console.print(_table(title, caption, columns, rows, left=1))
    last = len(steps[0]["depth"])
    shown = sorted({1 + round(i * (last - 1) / (_BLOCKS - 1)) for i in range(_BLOCKS)})
    title = "growth with depth: hidden states after a block"
    caption = "Norm of the difference from the exact hidden states, relative to theirs; first batch."
    depths = ((_step_name(step), *(f"{step['depth'][block - 1]:.2%}" for block in shown)) for step in steps)
    console.print(_table(title, caption, ("trainer", *(f"block {block}" for block in shown)), depths, left=1))


def _short(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}" if value < 1e-3 else f"{value:.4f}"


def _step_name(step: dict[str, Any]) -> str:
    return f"+ {step['op']}" if step["op"] else "BF16, stock"


def _draw(result: Result, model: str, target: str) -> None:
    """Write the picture: the mismatch with each op made exact, and its growth over the model's depth and the response."""
    from matplotlib.figure import Figure

    steps: Sequence[dict[str, Any]] = result["steps"]
    figure = Figure(figsize=(13, 4), layout="constrained")
    bars, depth, position = figure.subplots(1, 3)
    names = [_step_name(step) for step in steps]
    bars.barh(names, [step["mean"] for step in steps], color="#4477aa")
    bars.invert_yaxis()
    bars.set(xlabel="mean |Δ log-prob|", title="one more op exact at a time")
    bars.locator_params(axis="x", nbins=5)
    apart = [i for i, step in enumerate(steps) if i == 0 or step["mean"] != steps[i - 1]["mean"]]
    for name, step in ((names[i], steps[i]) for i in apart):  # equal lines would hide one another
        depth.plot(range(1, len(step["depth"]) + 1), step["depth"], label=name)
        position.plot(range(1, len(step["parts"]) + 1), step["parts"], marker="o", label=name)
    depth.set(xlabel="block", ylabel="relative difference", title="hidden states, against exact")
    position.set(xlabel=f"part of the response (of {RESPONSE_PARTS})", ylabel="mean |Δ log-prob|", title="over the response")
    position.set_xticks(range(1, RESPONSE_PARTS + 1))
    depth.legend(fontsize="small", loc="upper center")
    figure.suptitle(f"{Path(model).name}: {result['tokens']:,} tokens of an exact rollout")
    with writing(target):
        figure.savefig(target, dpi=120)


# ---- The arguments -------------------------------------------------------------------------------

def _engine(text: str | None) -> tuple[tuple[str, Any], ...]:
    if text is None:
        return ()
    try:
        settings = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--engine {text} is not valid JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"--engine {text} must be a JSON object of vllm.LLM arguments")
    return tuple(settings.items())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jetrl parity",
        description="Sample from a local model in vLLM, score the samples with the trainer's model, and compare the log-probs.",
    )
    add = parser.add_argument
    names: dict[str, Any] = {"metavar": "NAME", "action": "extend", "nargs": "+", "default": []}
    add("--model", required=True, metavar="DIR", help="directory of a Hugging Face checkpoint")
    add("--precision", **names, help=f"{', '.join(PRECISIONS)}; default: {', '.join(BY_DEFAULT)}")
    add("--align", **names, help="linear or exact, for fp8-unified; default: both")
    setups = f"the installation without the plugin, in one or more setups: {', '.join(STOCK)} (default: all that run here)"
    add("--stock", nargs="*", metavar="NAME", help=setups)
    add("--cost", action="store_true", help="time both sides, in tokens per second, with engines that compile as in training")
    explain = "where the mismatch comes from: make the trainer's ops exact, one at a time"
    full = "compare the whole vocabulary too, and the trainer with itself in other batches"
    add("--full", action="store_true", help=full)
    add("--explain", action="store_true", help=explain)
    add("--picture", metavar="FILE", help="with --explain: write a PNG picture of it")
    add("--scale-format", default=SETTINGS["scale_format"].default, help=_choices("scale_format"))
    add("--rollout-granularity", default="block", help="block (default) or channel, in modes that support both")
    add("--exclude", **{**names, "metavar": "PATTERN"}, help="layers that stay in BF16 on both sides")
    cut = f"what to do where --tp cuts a block of 128; bf16 leaves the layers in BF16: {_choices('on_cut')}"
    add("--on-cut", default=SETTINGS["on_cut"].default, help=cut)
    add("--kv-cache", default=SETTINGS["kv_cache"].default, help=f"format of the rollout's KV cache: {_choices('kv_cache')}")
    add("--backend", default=SETTINGS["backend"].default, help=_choices("backend"))
    add("--prompts", metavar="FILE", help="text file with one prompt per line, or .jsonl with a string per line")
    add("--prompt-tokens", type=_positive, default=256, help="longest prompt; longer ones are cut (default: 256)")
    add("--tp", type=_positive, default=1, help="tensor parallel size of the rollout")
    add("--batch", type=_positive, default=32, help="requests per batch")
    add("--tokens", type=_positive, default=2048, help="minimum number of response tokens; whole batches of BATCH x LENGTH")
    add("--length", type=_positive, default=64, help="tokens per response")
    several: dict[str, Any] = {"metavar": "NUMBER", "nargs": "+"}
    add("--temperature", type=float, default=[1.0], **several, help="requests take one in turn, here and below")
    add("--top-k", type=int, default=[0], **several, help="draw from the k likeliest tokens (0: all)")
    add("--top-p", type=float, default=[1.0], **several, help="draw from the likeliest tokens that have this probability")
    add("--min-p", type=float, default=[0.0], **several, help="leave out tokens below this share of the largest probability")
    add("--seed", type=int, default=0)
    add("--engine", metavar="JSON", help='further vllm.LLM arguments, e.g. {"enable_prefix_caching": false}')
    add("--json", metavar="FILE", help="write the results, one object per mode")
    add("--verbose", action="store_true", help="show the output of the frameworks")
    return parser


def _choices(name: str) -> str:
    """The values of a setting, as a line of help."""
    return f"{', '.join(SETTINGS[name].choices)} (default: {SETTINGS[name].default})"


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value
