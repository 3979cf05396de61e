"""``jetrl doctor`` reports that a run would start only if it would: GPUs, models, data, environments together."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from jetrl_patch.adapters import cpu
from jetrl_patch.cli.doctor import launch
from jetrl_patch.cli.doctor.launch import check_command
from jetrl_patch.config import Config
from jetrl_patch.models import hub
from jetrl_patch.native import machine
from jetrl_patch.trainer.rules import Check, Report
from tests.doctor.judged import furnish, judge, openrlhf, verl
from tests.models import config_of

ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
PYTHON = "ray_kwargs.ray_init.runtime_env.py_executable"
BF16 = Config(precision="bf16")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return furnish(tmp_path_factory.mktemp("place"))


def starts(checks: list[Check]) -> bool | None:
    return Report(checks=checks).starts


def wrong(checks: list[Check]) -> list[tuple[str, str, str]]:
    return [(check.name, check.state, check.finding) for check in checks if check.state in ("problem", "unknown")]


def only(checks: list[Check]) -> tuple[str, str, str]:
    (found,) = wrong(checks)
    return found


def test_what_is_all_here_would_start(place: Path) -> None:
    assert starts(judge("verl", verl(place), BF16)) is True
    assert starts(judge("openrlhf", openrlhf(place), BF16)) is True


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with four GPUs."""
    monkeypatch.setattr(cpu, "vllm_cpu_version", lambda: None)
    monkeypatch.setattr(machine, "count_gpus", lambda: 4)


def test_logical_gpus_of_a_cpu_run(place: Path) -> None:
    found = only(judge("verl", verl(place, "trainer.n_gpus_per_node=8"), BF16))
    assert found == ("GPUs", "problem", "8 logical GPUs required (trainer.n_gpus_per_node=8 on 1 node), 2 found")
    rest = [word for word in verl(place) if "num_gpus=" not in word]
    (check,) = [check for check in judge("verl", rest, BF16) if check.name == "GPUs"]
    assert check.state == "problem" and check.to_do.startswith("set +ray_kwargs.ray_init.num_gpus=2")
    assert only(judge("openrlhf", openrlhf(place, "--vllm.num_engines", "13"), BF16))[2].endswith(", 16 found")


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("extra", "state"),
    [
        (["trainer.n_gpus_per_node=4", "ray_kwargs.ray_init.num_gpus=4"], None),
        (["trainer.n_gpus_per_node=4"], "problem"),  # Ray is told that there are two
        (["trainer.n_gpus_per_node=5", "ray_kwargs.ray_init.num_gpus=5"], "problem"),
        (["trainer.nnodes=2"], "unknown"),
        (["trainer.n_gpus_per_node=8", "trainer.nnodes=2"], "problem"),
        (["trainer.n_gpus_per_node=8", "+ray_kwargs.ray_init.address=auto"], "unknown"),
        (["reward.reward_model.enable_resource_pool=True", "reward.reward_model.nnodes=1"], "problem"),
    ],
)
def test_gpus_of_verl(place: Path, extra: list[str], state: str | None) -> None:
    found = [kind for name, kind, _ in wrong(judge("verl", verl(place, *extra), BF16)) if name == "GPUs"]
    assert found == ([state] if state else [])


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("extra", "total"),
    [
        ([], 5),  # two actors, two references, one engine
        (["--train.colocate_actor_ref"], 3),
        (["--algo.kl.init_coef", "0"], 3),
        (["--train.colocate_all", "--vllm.num_engines", "2"], 2),
        (["--train.colocate_all", "--train.async_enable"], 3),
        (["--algo.kl.init_coef", "0", "--algo.advantage.estimator", "gae"], 11),  # and a critic on eight
        (["--vllm.tensor_parallel_size", "3"], 7),
    ],
)
def test_gpus_of_openrlhf(place: Path, extra: list[str], total: int) -> None:
    checks = judge("openrlhf", openrlhf(place, *extra), BF16)
    (found,) = [check for check in checks if check.name == "GPUs"]
    assert found.finding.startswith(f"{total} GPUs required (") and found.state == ("ok" if total <= 4 else "problem")


def test_a_running_cluster_is_not_this_machine(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert only(judge("openrlhf", openrlhf(place), BF16))[:2] == ("GPUs", "unknown")
    assert only(judge("verl", verl(place), BF16))[:2] == ("GPUs", "unknown")


@pytest.mark.parametrize(
    ("path", "state", "message"),
    [
        ("/no/such/model", "problem", "no such folder"),
        ("./model", "problem", "no such folder"),
        ("~/model", "problem", "replaces the ~"),
        ("hdfs://a/b", "unknown", "was not opened"),
        ("org/name", "unknown", "neither a folder nor in the cache"),
    ],
)
def test_a_model_that_is_not_here(
    place: Path, path: str, state: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    for checks in (
        judge("verl", verl(place, f"{MODEL}.path='{path}'"), BF16),  # Hydra reads a bare ~ as a deletion
        judge("openrlhf", openrlhf(place, "--actor.model_name_or_path", path), BF16),
    ):
        name, found, finding = only(checks)
        assert (name, found) == ("model", state) and message in finding
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if path == "org/name":
        assert only(judge("verl", verl(place, f"{MODEL}.path={path}"), BF16))[1] == "problem"


@pytest.mark.parametrize(
    ("gone", "name"), [("config.json", "model"), ("model.safetensors", "model"), ("tokenizer.json", "tokenizer")]
)
def test_a_model_folder_that_is_not_complete(place: Path, tmp_path: Path, gone: str, name: str) -> None:
    for file in place.iterdir():
        (tmp_path / file.name).touch()
    (tmp_path / gone).unlink()
    found = only(judge("verl", verl(tmp_path), BF16))
    assert found[:2] == (name, "problem") and str(tmp_path) in found[2]


def test_a_model_in_the_cache_is_checked(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its family and split are checked like a folder's, also by the driver."""
    monkeypatch.setattr(hub, "_cached", lambda name: str(place) if name == "org/name" else "")
    extra = (f"{MODEL}.path=org/name", f"{ROLLOUT}.tensor_model_parallel_size=4")
    found = only(judge("verl", verl(place, *extra), Config()))
    assert found[0] == "verl setting" and "cuts a block of 128" in found[2]


@pytest.mark.parametrize(
    ("extra", "state"),
    [
        ("data.train_files=/no/such.parquet", "problem"),
        ("data.val_files=['{0}/train.parquet','{0}/gone.parquet']", "problem"),
        ("data.train_files='{0}/*.parquet'", None),
        ("data.train_files=hdfs://a/b.parquet", "unknown"),
        ("reward.custom_reward_function.path=/no/reward.py", "problem"),
    ],
)
def test_data_and_code_of_verl(place: Path, extra: str, state: str | None) -> None:
    found = [kind for _, kind, _ in wrong(judge("verl", verl(place, extra.format(place)), BF16))]
    assert found == ([state] if state else [])


def test_data_that_a_class_of_the_users_own_reads(place: Path) -> None:
    extra = ("data.train_files=anything", f"data.custom_cls.path={place}/reward.py")
    assert only(judge("verl", verl(place, *extra), BF16))[:2] == ("data", "unknown")


@pytest.mark.parametrize(
    ("extra", "states"),
    [
        (["--data.prompt_dataset", "/no/such.jsonl"], ["problem"]),
        (["--data.prompt_dataset", "a.jsonl,b.jsonl"], ["problem", "problem"]),
        (["--data.prompt_dataset", "OpenRLHF/prompts"], ["unknown"]),
        (["--reward.remote_url", "gone.py"], ["problem"]),
        (["--reward.remote_url", "http://host/get"], []),
        (["--train.agent_func_path", "gone.py"], ["problem"]),
        (["--eval.dataset", "/gone.json"], ["problem"]),
    ],
)
def test_data_and_code_of_openrlhf(place: Path, extra: list[str], states: list[str]) -> None:
    assert [kind for _, kind, _ in wrong(judge("openrlhf", openrlhf(place, *extra), BF16))] == states


def test_openrlhf_without_data(place: Path) -> None:
    arguments = openrlhf(place)
    at = arguments.index("--data.prompt_dataset")
    assert only(judge("openrlhf", arguments[:at] + arguments[at + 2 :], BF16))[:2] == ("data", "problem")


def test_an_environment_of_its_own_for_the_workers(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = "uv -v run --frozen --all-packages --extra vllm --extra fsdp"
    monkeypatch.setattr(launch.shutil, "which", lambda name: None)
    assert only(judge("verl", verl(place, f"{PYTHON}='{command}'"), BF16))[:2] == ("environment", "problem")
    monkeypatch.setattr(launch.shutil, "which", lambda name: f"/bin/{name}")
    checks = judge("verl", verl(place, f"{PYTHON}='{command}'"), BF16)
    name, state, finding = only(checks)
    assert (name, state) == ("environment", "unknown") and "of which nothing was checked" in finding
    (check,) = [check for check in checks if check.state == "unknown"]
    assert f"{command} python -m jetrl_patch doctor -- …" in check.to_do and Report(checks=checks).status == 2
    monkeypatch.undo()
    assert starts(judge("verl", verl(place, f"{PYTHON}={sys.executable}"), BF16)) is True


@pytest.mark.parametrize(
    ("words", "state"),
    [
        ([], None),
        ([sys.executable, "-u"], None),
        (["torchrun", "--nproc_per_node", "2"], None),
        (["uv", "run", "--frozen", "python3"], "unknown"),
        (["/usr/bin/ssh", "host", sys.executable], "unknown"),
        (["ray", "job", "submit", "--", "python3"], "unknown"),
        (["/bin/sh", "/no/such/python3"], "problem"),
    ],
)
def test_who_starts_the_program(words: list[str], state: str | None) -> None:
    assert [check.state for check in check_command(words)] == ([state] if state else [])


def test_another_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python3").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    (check,) = check_command(["python3"])
    assert check.state == "unknown" and f"but {sys.executable} was checked" in check.finding


def test_all_problems_at_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.doctor.asked import doctor

    monkeypatch.setenv("JETRL_PRECISON", "x")
    monkeypatch.setenv("JETRL_MONITOR_EVERY", "often")
    extra = (
        f"{MODEL}.path={place}", f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.tensor_model_parallel_size=4",
        "trainer.n_gpus_per_node=16", "data.train_files=/gone.parquet", f"{PYTHON}=/gone/python",
    )  # fmt: skip
    found: dict[str, Any] = doctor("--", "jetrl", "verl", "--fp8-unified", *verl(place, *extra), status=1)
    text = "\n".join(check["finding"] for check in found["checks"] if check["state"] == "problem")
    parts = ("JETRL_PRECISON", "MONITOR_EVERY", "sglang", "cuts a block", "16 logical GPUs", "/gone.parquet", "/gone/python")
    assert [part for part in parts if part not in text] == []


def test_all_problems_of_a_model_at_once(tmp_path: Path, place: Path) -> None:
    """The unsupported family and the split, not only the first."""
    config_of("qwen3", use_sliding_window=True).save_pretrained(tmp_path)
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    extra = (f"{MODEL}.path={tmp_path}", f"{ROLLOUT}.tensor_model_parallel_size=4")
    found = [finding for _, state, finding in wrong(judge("verl", verl(place, *extra), Config())) if state == "problem"]
    assert len(found) == 2 and "cuts a block" in found[1]


def test_only_the_settings_are_judged_for_another_machine(place: Path) -> None:
    extra = ("trainer.n_gpus_per_node=64", "data.train_files=/gone", f"{PYTHON}='uv run'")
    assert starts(judge("verl", verl(place, *extra), BF16, here=False)) is True
    assert starts(judge("verl", verl(place, "nothing=1"), BF16)) is False


def test_the_verdicts() -> None:
    def verdict(*states: Any) -> tuple[bool | None, int, str]:
        report = Report(checks=[Check("x", state, "y") for state in states])
        return report.starts, report.status, report.verdict

    assert verdict("ok", "warning", "skipped") == (True, 0, "a run would start")
    assert verdict("problem", "unknown") == (False, 1, "a run would NOT start: 1 problem")
    words = "cannot tell whether a run would start: 2 things could not be checked"
    assert verdict("unknown", "ok", "unknown") == (None, 2, words)


def test_a_broken_torch_or_compiler_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jetrl_patch.native import build
    from tests.doctor.asked import doctor, named

    (tmp_path / "gcc").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "gcc").chmod(0o755)
    monkeypatch.setenv("CC", str(tmp_path / "gcc"))
    monkeypatch.setattr(build, "_loaded", build._loaded.__wrapped__)
    check = named(doctor(status=0), "compiler")
    assert check["state"] == "warning" and "found exit status 3" in check["finding"]
    monkeypatch.setattr(machine, "check_torch", lambda: (False, "torch cannot be imported (OSError: libcudart)"))
    check = named(doctor(status=1), "device")
    assert (check["state"], check["finding"]) == ("problem", "torch cannot be imported (OSError: libcudart)")
