"""The page: counts per class and mode, sole reasons, one sentence for each refusal."""

from __future__ import annotations

import pytest

from jetrl_patch.patching.guards import installed_version
from scripts.official import keys, page
from scripts.official.expand import Expansion, Launch
from scripts.official.judge import ASYNC, Judged, Problem, modes

TOP_P = Problem(
    "verl setting rollout.top_p with precision='fp8-unified', align='exact': required 1, found 0.9. Set it to 1.",
    "rollout.top_p",
)
NAME = Problem(
    "verl setting rollout.name with precision='bf16', align='none': required vllm, found 'x|y'. Set it to vllm.",
    "rollout.name",
)


def judged(name: str, kind: str | None, refused: dict[str, tuple[Problem, ...]] | None = None, **given: str) -> Judged:
    launch = Launch(f"examples/{name}.sh", 1, ("uv", "run", "python3", "-m", "verl.trainer.main_ppo"))
    verdicts = {mode: (refused or {}).get(mode, ()) for mode in modes()}
    return Judged(launch, "verl", "verl.trainer.main_ppo", kind, "a/model", verdicts, given)


ALL = [
    judged("a/plain", "dense"),
    judged("a/sampling", "dense", {"exact": (TOP_P,)}),
    judged("a/other", "dense", {mode: (TOP_P, NAME) if mode == "exact" else (NAME,) for mode in modes()}),
    judged("b/late", ASYNC, {"bf16": (NAME,)}),
    judged("c/new", ""),
    judged("d/sft", None),
]


def table(text: str, title: str) -> list[list[str]]:
    """The cells of the first table after a heading."""
    lines = text[text.index(title) :].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return [rows[0], *rows[2:]]


@pytest.fixture
def text() -> str:
    expansions = [Expansion("examples/a/plain.sh", ()), Expansion("examples/z.sh", (), "exit status 3: no")]
    return page.write([("verl 1.0", expansions, ALL)])


def test_counts_and_their_sums(text):
    head, dense, late, new, whole = table(text, "### Accepted launches")
    assert head == ["class", "launches", *modes()]
    assert dense == ["dense", "3", "1", *["2"] * 5]
    assert late == ["asynchronous, or another entry point", "1", *["1"] * 5, "0"]
    assert new[:2] == ["unknown model", "1"] and whole[:3] == ["all", "5", "3"]


def test_scripts_of_another_release_than_the_installed_one_are_named_once(text):
    installed = installed_version("verl")
    assert text.count(f"verl {installed}, the version that the plugin's tests install, judges them.") == 1
    assert "judges them" not in page.write([(f"verl {installed}", [], ALL), ("folder", [], ALL)])


def test_what_stands_alone(text):
    assert page.unlocks(ALL, "exact") == [("rollout.top_p", 2, 1), ("rollout.name", 1, 0)]
    rows = {row[0]: row for row in table(text, "### What would unlock more")}
    assert rows["`rollout.top_p`"][1:3] == ["2 (1)", "–"] and rows["`rollout.name`"][2] == "1 (1)"


def test_each_refusal_is_one_sentence_under_its_number(text):
    rows = {row[0]: row for row in table(text, "### Every launch")}
    assert rows["`a/plain.sh`"][2:] == ["yes"] * 6 and rows["`a/other.sh`"][2:4] == ["1, 2", "2"]
    assert "\n1. verl setting rollout.top_p: required 1, found 0.9. Set it to 1.\n" in text
    assert (
        "\n2. verl setting rollout.name: required vllm, found 'x\\|y'. Set it to vllm.\n" in text
        and "\n3. " not in text
    )


def test_an_unknown_model_is_neither_accepted_nor_refused(text):
    line = next(line for line in text.splitlines() if line.startswith("| `c/new.sh`"))
    assert line.count("unknown") == 6 and "yes" not in line


def test_what_is_no_launch_and_what_failed_is_said(text):
    assert "2 scripts make 6 launches, 5 of them with a rollout. 5 of these start by `uv run`" in text
    assert "`z.sh` (exit status 3: no)" in text and "These have no rollout" in text


def test_a_setting_that_nobody_has_looked_at_is_named():
    one = judged(
        "a/x", "dense", **{"data.train_batch_size": "8", "actor_rollout_ref.rollout.min_tokens": "0", "new.setting": "7"}
    )
    assert keys.open_keys([one], "exact") == {"new.setting": (1, ("7",))}
    assert "`new.setting`" in page.write([("verl 1.0", [], [one])])


def test_every_harmless_pattern_has_a_reason_and_hides_no_rule():
    for framework, rows in keys.HARMLESS.items():
        assert all(why and patterns and not why.endswith(".") for why, patterns in rows.items())
        assert keys.checked(framework)


def test_real_runs_are_listed():
    run = {
        "script": "examples/a/x.sh",
        "framework": "verl",
        "mode": "exact",
        "covers": "adv_estimator grpo",
        "failure": "",
        "release": "verl 1.0",
    }
    good = {**run, "steps": 2, "tokens": 1234, "bit_equal_fraction_min": 1.0, "logp_abs_diff_max": 0.0}
    bad = {
        **run,
        "steps": 0,
        "tokens": 0,
        "bit_equal_fraction_min": 0.0,
        "logp_abs_diff_max": 0.0,
        "failure": "no memory",
    }
    text = page.write([("verl 1.0", [], [])], [good, bad])
    assert "| `a/x.sh` | exact | adv_estimator grpo | 2 | 1,234 | 100.0% | 0 |" in text and "| – | no memory |" in text
