"""The proof on a pretrained model: what a record keeps, what counts as done, and the page against the records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.stability import proof
from examples.stability.sweep import Job, is_whole
from jetrl_patch.cli.report import Run


def made_up(job: Job, score: float, steps: int | None = None) -> Run:
    equal = 1.0 if job.arm.config.exact else 1 / 3
    step = {proof.SCORE: score, "jetrl/bit_equal_fraction": equal, "timing_s/step": 12.3}
    step |= {name: 0.0123456789 for name in proof.METRICS if name.startswith(("jetrl/k3", "jetrl/logp", "jetrl/m", "actor/"))}
    last = job.setting.steps if steps is None else steps
    data: dict[int, dict[str, object]] = {i: dict(step) for i in range(last)}
    data[0][proof.HELD_OUT] = 0.5
    data[last] = {proof.HELD_OUT: score}
    return Run(job.arm.precision, str(job.arm.config.resolved_align), job.seed, data)


def test_every_run_has_a_name_of_its_own() -> None:
    all_of_them = proof.jobs(list(proof.SETTINGS), proof.ARMS, [0, 1, 2])
    assert len({job.slug for job in all_of_them}) == len(all_of_them) == 3 * len(proof.ARMS) * len(proof.SETTINGS)
    assert proof.settings_table().count("\n| `") == len(proof.SETTINGS) >= 9


def test_a_record_is_small_and_makes_its_run_done_and_no_other(tmp_path: Path) -> None:
    job, other = proof.jobs(["base"], [proof.ROLLOUT], [0, 1])
    path = proof.keep(job, made_up(job, 0.61), tmp_path)
    assert path.stat().st_size < 20_000
    assert is_whole(job, tmp_path) and not is_whole(other, tmp_path)
    first = json.loads(path.read_text().splitlines()[0])
    assert first["data"]["jetrl/k3_kl"] == 0.012346 and "timing_s/step" not in first["data"]
    assert list(proof.kept(tmp_path)) == [job]
    proof.keep(job, made_up(job, 0.61, steps=3), tmp_path)
    assert not is_whole(job, tmp_path) and not proof.kept(tmp_path)


def test_the_table_compares_by_seed_and_says_when_no_seed_overlaps(tmp_path: Path) -> None:
    for job in proof.jobs(["base"], [proof.EXACT, proof.ROLLOUT], [0, 1, 2]):
        proof.keep(job, made_up(job, 0.6 + job.seed / 100 - 0.3 * (job.arm == proof.ROLLOUT)), tmp_path)
    rows = proof.table(proof.kept(tmp_path)).splitlines()[2:]
    assert len(rows) == 2 and "**0**" not in rows[1] and "100%" in rows[0]
    assert "| 0.310 (0.300 to 0.320) | 3 of 3, apart |" in rows[1] and "| 0.610 (0.600 to 0.620) | – |" in rows[0]


@pytest.mark.parametrize(
    ("arm", "other", "expected"),
    [
        ({0: 0.1}, {1: 0.2}, "–"), ({0: 0.1}, {0: 0.2}, "1 of 1"), ({0: 0.1, 1: 0.3}, {0: 0.2, 1: 0.3}, "1 of 2"),
        ({0: 0.1, 1: 0.2}, {0: 0.3, 1: 0.4}, "2 of 2, apart"),
    ],
)  # fmt: skip
def test_below_counts_seeds(arm: dict[int, float], other: dict[int, float], expected: str) -> None:
    assert proof.below(arm, other) == expected


def test_the_committed_runs_are_small_and_exact_mode_is_exact_in_each_step() -> None:
    runs = proof.kept()
    assert len(runs) == len(list(proof.RECORDS.iterdir()))
    for job, run in runs.items():
        assert (proof.RECORDS / f"{job.slug}.jsonl").stat().st_size < 20_000
        equal = [value for _, value in run.series("jetrl/bit_equal_fraction")]
        assert all(value == 1.0 for value in equal) if job.arm.config.exact else max(equal) < 1.0


def test_the_page_has_the_tables_of_the_records(tmp_path: Path) -> None:
    page = tmp_path / "proof.md"
    page.write_text(proof.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    proof.write_page(page, tmp_path / "proof.png")
    assert page.read_text(encoding="utf-8") == proof.PAGE.read_text(encoding="utf-8")
    assert (tmp_path / "proof.png").stat().st_size > 10_000
