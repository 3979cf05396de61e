"""What the soak calls a slope, and how it reads its samples."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.campaigns.soak.figures import elapsed, growths, picture, processor, rows
from tests.campaigns.soak.slopes import LIMITS, growth
from tests.campaigns.soak.watch import Sample, Watch, role

STEPS = list(range(1, 1001))


def noisy(slope: float, level: float) -> list[float]:
    draw = random.Random(0)
    return [level * (1 + 0.3 * draw.random()) + slope * step for step in STEPS]


@pytest.mark.parametrize("figure", LIMITS)
def test_noise_is_no_slope_and_growth_is(figure):
    least, share = LIMITS[figure]
    level = 100.0 * max(least, 1.0)
    assert growth(figure, STEPS, noisy(0.0, level)).flat
    assert growth(figure, STEPS, noisy(-level / 1000, level)).flat  # less is no leak
    assert not growth(figure, STEPS, noisy(3 * (least + share * level) / 1000 + level * 0.05 / 1000, level)).flat


def test_a_cache_that_fills_in_the_first_fifth_is_no_slope():
    assert growth("memory", STEPS, [min(step, 200) * 2**20 for step in STEPS]).flat


def test_too_few_values_are_an_error():
    with pytest.raises(ValueError, match="too few"):
        growth("memory", [1, 2], [1.0, 1.0])


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("ray::WorkerDict.actor_rollout_update_actor()", "WorkerDict"), ("ray::IDLE", "Ray's idle workers"),
        ("VLLM::EngineCore", "vLLM"), ("/x/ray/core/src/ray/raylet/raylet --a", "raylet"),
        ("/x/bin/python -m verl.trainer.main_ppo a=b", "driver"), ("", "?"),
    ],
)  # fmt: skip
def test_processes_are_called_by_what_they_do(command, name):
    assert role(command) == name


def watched(leak: int) -> dict[str, Any]:
    samples = [
        vars(Sample(step, 2.0 * step, name, 1, 10**9 + leak * step, 40, 20, 10**6, 0.75 * step))
        for step in range(0, 201)
        for name in ("WorkerDict", "vLLM")
    ]
    return {"samples": samples, "arrivals": {str(step): 2.0 * step for step in range(1, 201)}}


def test_a_leak_in_one_role_is_found_and_drawn(tmp_path):
    assert all(one.flat for _, one in growths(watched(0)))
    grows = [(name, one.figure) for name, one in growths(watched(2**20)) if not one.flat]
    assert grows == [("WorkerDict", "memory"), ("vLLM", "memory")]
    assert "| vLLM | memory | " in "\n".join(rows(list(growths(watched(2**20)))))
    picture(watched(0), "title", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_processor_seconds_are_those_of_all_roles():
    ended = [{**sample, "seconds": sample["seconds"] + 2, "cpu": 0.0} for sample in watched(0)["samples"][-2:]]
    steps, seconds = processor({"samples": [*watched(0)["samples"], *ended]})  # one more look, at processes that have ended
    assert steps[0] == 11 and set(seconds) == {1.5}


def at(pace: float, first: int, last: int, warm: float = 0.0) -> dict[str, Any]:
    """A run of these steps in ``pace`` seconds each, and ``warm`` more in each of the first thirty."""
    times = {step: pace * (step - first) + warm * min(step - first, 30) for step in range(first, last + 1)}
    samples = [vars(Sample(step, time, "vLLM", 1, 10**9, 40, 20, 0, time)) for step, time in times.items()]
    return {"samples": samples, "arrivals": {str(step): time for step, time in times.items()}}


@pytest.mark.parametrize(("pace", "flat"), [(1.2, True), (1.16, True), (1.1, False), (1.0, False)])
def test_a_slower_machine_is_no_slope_if_new_processes_are_as_slow(pace, flat):
    slow = at(1.2, 700, 1000)
    for sample in slow["samples"]:
        sample |= {"seconds": sample["seconds"] + 700, "cpu": sample["cpu"] + 700}
    early = at(1.0, 1, 700)
    late = {step: time + 700 for step, time in slow["arrivals"].items()}
    run = {"samples": early["samples"] + slow["samples"][1:], "arrivals": early["arrivals"] | late}
    alone = [one for _, one in growths(run) if "seconds" in one.figure]
    assert len(alone) == 2 and not any(one.flat for one in alone)
    resumed = [at(pace, 700, 842, warm=5.0), at(pace, 800, 1000, warm=5.0), at(pace, 990, 995)]
    beside = [one for _, one in growths({**run, "resumed": resumed}) if "seconds" in one.figure]
    assert [one.flat for one in beside] == [flat, flat]
    assert f"1.20 s (new processes: {pace:.2f} s)" in rows([("whole run", beside[0])])[-1]


def test_seconds_of_a_step_are_means_over_windows():
    read = {str(step): round(1.25 * step + 0.04, 1) for step in range(1, 102)}  # the clock is read ten times a second
    steps, seconds = elapsed({"arrivals": read})
    assert steps == list(range(11, 102, 10)) and all(abs(each - 1.25) < 0.01 for each in seconds)


def test_steps_are_read_once_from_a_log_that_grows(tmp_path):
    class Run:
        log = tmp_path / "log"

    watch = Watch(Run(), "mark", r"Global step (\d+): \{")
    Run.log.write_bytes(b"Global step 1: {}\nGlobal ste")
    watch._read_steps(1.0)
    Run.log.write_bytes(b"Global step 1: {}\nGlobal step 2: {}\n")
    watch._read_steps(2.0)
    assert watch.arrivals == {1: 1.0, 2: 2.0}
