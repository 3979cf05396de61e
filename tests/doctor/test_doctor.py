"""``jetrl doctor``: it finds these problems and changes nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from jetrl_patch import registry
from jetrl_patch import session as runtime
from jetrl_patch.adapters import cpu
from jetrl_patch.backends import capability
from jetrl_patch.cli.doctor import checks
from jetrl_patch.cli.main import app
from jetrl_patch.config import Config
from jetrl_patch.config.modes import ROLLOUT_FORMATS
from jetrl_patch.errors import VersionError
from jetrl_patch.native import machine as support
from jetrl_patch.patching import guards, patch
from jetrl_patch.trainer import record
from tests.doctor import judged
from tests.openrlhf.run_openrlhf import arguments as openrlhf_arguments
from tests.openrlhf.run_openrlhf import make_task as openrlhf_task
from tests.verl.run_verl import command as verl_command
from tests.verl.run_verl import make_task as verl_task

R, M = "actor_rollout_ref.rollout", "actor_rollout_ref.model"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return judged.furnish(tmp_path_factory.mktemp("model"))


def verl(model: Path, *extra: str) -> list[str]:
    return [sys.executable, "-m", "verl.trainer.main_ppo", *judged.verl(model, *extra, gpus=1)]


def openrlhf(model: Path, *extra: str) -> list[str]:
    return ["jetrl", "openrlhf", "--fp8-unified", *judged.openrlhf(model, *extra, gpus=1)]


def doctor(*words: str, status: int | None = None) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["doctor", "--json", *words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    found: dict[str, Any] = json.loads(result.stdout)
    assert result.exit_code == {True: 0, False: 1, None: 2}[found["starts"]]
    if status is not None:
        assert result.exit_code == status, [c for c in found["checks"] if c["state"] == "problem"]
    return found


def named(found: dict[str, Any], name: str) -> dict[str, str]:
    (check,) = [check for check in found["checks"] if check["name"] == name]
    return check  # type: ignore[no-any-return]


def test_this_machine_passes_and_nothing_is_changed() -> None:
    environ, loaded, finders = dict(os.environ), set(sys.modules), list(sys.meta_path)
    found = doctor(status=0)
    assert found["verdict"] == "a run would start"
    assert not runtime.is_active()
    assert dict(os.environ) == environ and sys.meta_path == finders
    assert not {"vllm", "verl", "openrlhf"} & {name.split(".")[0] for name in set(sys.modules) - loaded}
    targets = {patch["target"] for patch in found["patches"]}
    assert "verl.workers.engine.fsdp.transformer_impl.FSDPEngine._build_module" in targets
    assert "vllm.v1.worker.gpu_worker.Worker.load_model" in targets
    assert named(found, "GEMM backend")["finding"] == "native"
    assert {patch["state"] for patch in found["patches"]} == {"waiting"}


@pytest.mark.parametrize("name", ["torch", "vllm", "verl", "openrlhf", "transformers", "ray"])
def test_a_version_out_of_range(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    real = guards.installed_version
    monkeypatch.setattr(guards, "installed_version", lambda asked: "0.0.1" if asked == name else real(asked))
    found = doctor(status=1)
    check = named(found, name)
    assert check["state"] == "problem" and "found 0.0.1" in check["finding"]
    assert check["to_do"].startswith(f"Install {name}>=")
    assert found["verdict"] == "a run would NOT start: 1 problem"
    assert named(found, "patches")["state"] == "skipped" and not found["patches"]


def test_a_version_out_of_range_stops_other_frameworks_too(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    real = guards.installed_version
    monkeypatch.setattr(guards, "installed_version", lambda asked: "0.0.1" if asked == "openrlhf" else real(asked))
    found = doctor("--", *verl(model), status=1)  # enable() refuses this too
    assert named(found, "openrlhf")["state"] == "problem"
    assert named(found, "openrlhf")["finding"].endswith("this stops the plugin, although the command runs verl")
    with pytest.raises(VersionError, match="openrlhf"):
        runtime.preview(Config())


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    version, importable = guards.installed_version, guards.is_installed
    monkeypatch.setattr(guards, "installed_version", lambda asked: None if asked in names else version(asked))
    for module in (guards, support, registry, sys.modules["jetrl_patch.cli.doctor.examine"]):
        monkeypatch.setattr(module, "is_installed", lambda asked: asked not in names and importable(asked))


@pytest.mark.parametrize("name", ["torch", "vllm"])
def test_a_missing_part_of_every_run(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    without(monkeypatch, name)
    check = named(doctor(status=1), name)
    assert check["state"] == "problem" and "found no installation" in check["finding"]


@pytest.mark.parametrize("name", ["verl", "openrlhf"])
def test_a_missing_framework_stops_its_own_runs_only(monkeypatch: pytest.MonkeyPatch, model: Path, name: str) -> None:
    without(monkeypatch, name)
    commands = {"verl": verl(model), "openrlhf": openrlhf(model)}
    found = doctor("--", *commands.pop(name), status=1)
    assert named(found, name)["state"] == "problem" and "found no installation" in named(found, name)["finding"]
    for rest in ([], next(iter(commands.values()))):
        check = named(doctor("--", *rest, status=0), name)
        assert (check["state"], check["to_do"]) == ("skipped", "")
        assert check["finding"] == f"not installed; only runs of {name} need it"


def test_no_framework_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "verl", "openrlhf", "deepspeed")
    found = doctor(status=1)
    for name in ("verl", "openrlhf"):
        check = named(found, name)
        assert check["state"] == "problem" and check["to_do"] == "install the framework that you train with: verl or openrlhf"
    assert named(found, "deepspeed")["state"] == "skipped"


def test_openrlhf_without_deepspeed(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    without(monkeypatch, "deepspeed")
    found = named(doctor("--", *openrlhf(model), status=1), "deepspeed")
    assert found["to_do"] == f"install deepspeed==0.19.6, which openrlhf {metadata.version('openrlhf')} pins"
    assert found["state"] == "problem"
    assert named(doctor("--", *verl(model), status=0), "deepspeed")["state"] == "skipped"


def test_without_a_command_each_framework_gets_its_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only OpenRLHF misses does not stop verl's runs."""
    without(monkeypatch, "deepspeed")
    found = doctor(status=0)
    assert found["verdict"] == "a run would start, but not one of openrlhf: see deepspeed"
    assert named(found, "deepspeed")["state"] == "warning"
    assert named(found, "deepspeed")["finding"] == "not installed, but OpenRLHF trains with it; other runs start"
    without(monkeypatch, "deepspeed", "verl")
    found = doctor(status=1)
    assert named(found, "deepspeed")["state"] == "problem"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend that these versions are installed, None for a missing package. The frameworks' own requirements stay."""

    def install(**versions: str | None) -> None:
        without(monkeypatch, *(name for name, version in versions.items() if version is None))
        real = guards.installed_version
        monkeypatch.setattr(guards, "installed_version", lambda asked: versions.get(asked) or real(asked))

    return install


def test_a_user_of_verl_is_advised_what_verl_pins(installed: Callable[..., None], model: Path) -> None:
    """Without a command, the installed framework decides; OpenRLHF's packages are not checked."""
    installed(openrlhf=None, deepspeed=None, vllm="0.15.0", torch="2.4.0", transformers="5.15.0")
    for command in ([], verl(model)):
        found = doctor("--", *command, status=1)
        wanted = {"vllm": "0.24.0", "torch": "2.11.0", "transformers": "5.9.0"}
        for name, version in wanted.items():
            assert named(found, name)["to_do"] == f"install {name}=={version}, which verl 0.9.1 pins"
        assert "but verl 0.9.1 requires" in named(found, "transformers")["finding"]  # supported by us, and it breaks verl
        assert named(found, "transformers")["state"] == "warning" and named(found, "vllm")["state"] == "problem"
        assert named(found, "openrlhf")["state"] == named(found, "deepspeed")["state"] == "skipped"
        assert "openrlhf" not in json.dumps([check["to_do"] for check in found["checks"]]).lower()


def test_a_user_of_openrlhf_is_advised_what_openrlhf_pins(installed: Callable[..., None]) -> None:
    installed(verl=None, transformers="5.9.0", vllm="0.15.0")
    found = doctor(status=1)
    assert named(found, "transformers")["to_do"] == "install transformers==5.15.0, which openrlhf 0.11.2 pins"
    assert named(found, "vllm")["to_do"] == "install vllm==0.29.0, which openrlhf 0.11.2 pins"


def test_no_pin_is_advised_that_breaks_another_framework(installed: Callable[..., None], model: Path) -> None:
    """verl refuses the transformers that OpenRLHF pins, so the doctor says nothing about it where both are installed."""
    found = doctor("--", *openrlhf(model), status=0)
    assert named(found, "transformers")["state"] == "ok"
    installed(transformers="5.1.0")
    assert named(doctor("--", *openrlhf(model), status=1), "transformers")["to_do"].startswith("Install transformers>=5.5.3")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "vllm_cpu_version", lambda: None)
    monkeypatch.setattr(support, "check_cuda", lambda: (True, "Some GPU"))
    for module in (support, capability):
        monkeypatch.setattr(module, "check_hopper", lambda *sm: (True, "Some GPU"))
    monkeypatch.setattr(support, "count_gpus", lambda: 8)


@pytest.mark.usefixtures("gpu")
def test_flash_attn_absent_on_a_gpu(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    without(monkeypatch, "flash_attn")
    linear = ("--align", "linear", "--")
    unknown = named(doctor("--align=linear", status=0), "flash-attn")
    assert unknown["state"] == "warning" and "and verl with its default attention" in unknown["finding"]
    found = named(doctor(*linear, *openrlhf(model), status=1), "flash-attn")
    assert found["finding"] == "not installed, but --ds.attn_implementation flash_attention_2 needs it"
    assert named(doctor(*linear, *verl(model), status=1), "flash-attn")["state"] == "problem"
    other = openrlhf(model, "--ds.attn_implementation", "sdpa")
    assert "OpenRLHF itself" in named(doctor(*linear, *other, status=1), "flash-attn")["finding"]
    other = verl(model, f"+{M}.override_config.attn_implementation=sdpa", f"{M}.use_remove_padding=False")
    assert named(doctor(*linear, *other, status=0), "flash-attn")["finding"] == "not installed; the command works without it"


def test_flash_attn_absent_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "flash_attn")
    assert named(doctor(status=0), "flash-attn")["finding"] == "not installed; a CPU run works without it"
    monkeypatch.setattr(guards, "is_installed", lambda _: True)
    assert checks.check_flash_attn(False, "packing").state == "ok"


@pytest.mark.usefixtures("gpu")
def test_exact_alignment_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    check = named(doctor(status=1), "exact alignment")  # this machine has no CUDA device
    assert check["state"] == "problem" and check["to_do"] == "Use align='linear' on CUDA"
    monkeypatch.setattr("jetrl_patch.backends.capability.check_exact_cuda", lambda *sm: (True, "Some GPU"))
    assert named(doctor(status=0), "exact alignment")["state"] == "ok"
    assert named(doctor("--align", "linear", status=0), "GEMM backend")["state"] in ("ok", "warning")


@pytest.fixture
def capable(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], None]:
    """Pretend that the machine has a GPU of this compute capability."""

    def pretend(found: tuple[int, int]) -> None:
        monkeypatch.setattr(cpu, "vllm_cpu_version", lambda: None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: found)

    return pretend


ADVICE = "use precision='bf16' or 'fp16' on this GPU; for FP8 use an H100 or H200"


@pytest.mark.parametrize("found", [(8, 9), (10, 0), (12, 0)], ids=["Ada", "Blackwell", "RTX 50"])
def test_device_and_backend_get_one_answer(capable: Callable[[tuple[int, int]], None], found: tuple[int, int]) -> None:
    capable(found)
    report = doctor("--align", "linear", status=0)
    device, backend = (named(report, name) for name in ("device", "GEMM backend"))
    assert device["state"] == backend["state"] == "warning" and backend["finding"].startswith("torch: ")
    expected = f"it needs compute capability 9.0 (Hopper), and this device has {found[0]}.{found[1]}"
    assert device["finding"].startswith(f"Some GPU has no fast FP8 kernel: {expected}; ")
    assert device["to_do"] == ADVICE


@pytest.mark.parametrize(
    ("found", "precision", "least"),
    [((8, 0), "fp8-unified", "8.9"), ((8, 6), "fp8-rollout", "8.9"), ((7, 0), "int8-rollout", "7.5")],
)
def test_a_gpu_on_which_vllm_refuses_the_format(
    capable: Callable[[tuple[int, int]], None], found: tuple[int, int], precision: str, least: str
) -> None:
    """vLLM compares ``JetrlQuantConfig.get_min_capability`` with the GPU before an engine starts."""
    capable(found)
    device = named(doctor("--precision", precision, status=1), "device")
    assert device["state"] == "problem" and device["to_do"] == ADVICE
    said = f"compute capability {found[0]}.{found[1]}, and vLLM serves {precision} from compute capability {least} on"
    assert device["finding"] == f"Some GPU has {said}"


@pytest.mark.parametrize("precision", ["bf16", "fp16", "int8-rollout"])
def test_a_precision_without_fp8_needs_no_hopper_gpu(capable: Callable[[tuple[int, int]], None], precision: str) -> None:
    """The precision that the advice names passes, without a warning about kernels that it does not use."""
    capable((8, 0))
    report = doctor("--precision", precision, status=0)
    assert (named(report, "device")["state"], named(report, "GEMM backend")["state"]) == ("ok", "skipped")


def test_the_page_about_gpus_says_what_the_doctor_says() -> None:
    """``docs/install.md`` names the compute capabilities that the code accepts."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "install.md").read_text()
    table = " ".join(page[page.index("### Which GPU") : page.index("**DeepGEMM compiles")].split())

    def said(capability: int) -> str:
        return f"{capability // 10}.{capability % 10}"

    least = {found.is_fp8: said(found.capability) for found in ROLLOUT_FORMATS.values()}
    assert f"(compute capability {support.HOPPER[0]}.{support.HOPPER[1]})" in table
    assert f"vLLM needs compute capability {least[True]} for FP8" in table
    assert f"INT8 in vLLM needs compute capability {least[False]}" in table
    assert 'use `precision="bf16"` or `"fp16"`' in table and "precision='bf16' or 'fp16'" in ADVICE


def test_no_gpu_for_a_gpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "vllm_cpu_version", lambda: None)
    monkeypatch.setattr(support, "check_cuda", lambda: (False, "torch sees no CUDA device"))
    assert named(doctor("--align", "linear", status=1), "device")["finding"] == "torch sees no CUDA device"


def test_a_backend_that_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    from jetrl_patch.native import build

    monkeypatch.setattr(build, "available", lambda: (False, "no C compiler"))
    found = doctor(status=0)
    assert named(found, "compiler")["state"] == named(found, "GEMM backend")["state"] == "warning"
    assert named(doctor("--set", "backend=native", status=1), "GEMM backend")["finding"].endswith("no C compiler")


def test_a_target_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    real = guards.module_exists
    monkeypatch.setattr(patch, "module_exists", lambda name: name != "verl.utils.tracking" and real(name))
    check = named(doctor(status=1), "patches")
    assert check["state"] == "problem" and "verl.utils.tracking.Tracking.log is missing" in check["finding"]


@pytest.mark.parametrize(
    "words", [("--precision", "fp9"), ("--precision=bf16", "--align=exact"), ("--set", "nothing=1"), ("--set", "align")]
)
def test_options_that_are_wrong(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, ["doctor", *words])
    assert result.exit_code != 0
    assert result.exception is not None or "problem" in result.output


def test_a_verl_run_that_would_start(model: Path) -> None:
    found = doctor("--", "JETRL_PRECISION=fp8-unified", "JETRL_DECODE_GRAPHS=0", *verl(model), status=0)
    assert named(found, "command")["finding"] == "verl.trainer.main_ppo, 7 arguments read"
    assert named(found, "switched on")["state"] == named(found, "verl settings")["state"] == "ok"
    assert f"{R}.enforce_eager=True, which was False" in named(found, "verl changes")["finding"]
    assert named(found, "model")["finding"] == str(model)


def test_the_runs_of_the_end_to_end_tests_would_start(tmp_path: Path) -> None:
    """These commands do start: see ``tests/verl/test_e2e.py`` and its OpenRLHF counterpart."""
    (ours, theirs) = (tmp_path / "verl", tmp_path / "openrlhf")
    ours.mkdir()
    theirs.mkdir()
    doctor("--", "JETRL_PRECISION=fp8-unified", *verl_command(verl_task(ours), "/tmp/jr"), status=0)
    doctor("--", "jetrl", "openrlhf", "--fp8-unified", *openrlhf_arguments(openrlhf_task(theirs)), status=0)


def test_a_preset_of_verl_is_read(model: Path) -> None:
    found = doctor("--", *verl(model, "+jetrl=linear", "jetrl.exclude=[o_proj]"), status=0)
    assert found["config"]["align"] == "linear" and found["config"]["exclude"] == ["o_proj"]
    assert named(found, "switched on")["state"] == "ok"
    found = doctor("--", "jetrl", "verl", "--fp8-unified", *verl(model, "+jetrl=linear")[3:], status=1)
    assert "required align='linear', found align='exact'" in named(found, "verl setting")["finding"]
    found = doctor("--", *verl(model, "+jetrl.precision=fp9"), status=1)
    assert "unknown precision 'fp9'" in named(found, "settings")["finding"]


def test_a_command_that_nothing_switches_on(model: Path) -> None:
    found = doctor("--", *verl(model), status=0)
    assert named(found, "switched on")["state"] == "warning"
    command = ["JETRL_PRECISION=bf16", sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *openrlhf(model)[3:]]
    assert "only vLLM and verl load it" in named(doctor("--", *command, status=1), "switched on")["finding"]


def test_what_the_launcher_would_refuse(model: Path) -> None:
    command = ["jetrl", "verl", "--align", "linear", *verl(model)[3:]]
    assert "without a precision" in named(doctor("--", *command, status=1), "switched on")["finding"]
    doctor("--", "JETRL_PRECISION=fp8-unified", *command, status=0)
    command = ["JETRL_ENABLED=0", "jetrl", "verl", "--fp8-unified", *verl(model)[3:]]
    assert "JETRL_ENABLED=0" in named(doctor("--", *command, status=1), "switched on")["finding"]
    (check,) = doctor("--", "jetrl", "run", "--bad", status=1)["checks"]
    assert check["name"] == "command" and "found --bad" in check["finding"]


def test_verl_quantizes_twice(model: Path) -> None:
    found = doctor("--", *verl(model, f"{R}.quantization=fp8", "+jetrl=unified"), status=1)
    check = named(found, "verl setting")
    assert f"{R}.quantization" in check["finding"] and "found 'fp8'" in check["finding"]
    assert check["to_do"] == "Set it to null"


def test_verl_with_a_split_that_cuts_a_block_and_another_problem(model: Path) -> None:
    found = doctor("--", *verl(model, f"{R}.tensor_model_parallel_size=4", f"{R}.top_p=0.9"), status=1)
    problems = [check["finding"] for check in found["checks"] if check["state"] == "problem"]
    assert len(problems) == 2 and found["verdict"] == "a run would NOT start: 2 problems"
    assert f"{R}.top_p" in problems[0]
    assert "tensor parallel size 4 cuts a block of 128" in problems[1] and "o_proj" in problems[1]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("nothing.there=3", "Could not override 'nothing.there'"),
        ("a b", "Hydra cannot compose"),
        ("+jetrl=other", "jetrl/other"),
        ("--config-name=gone", "gone"),
    ],
)
def test_a_verl_configuration_that_does_not_compose(model: Path, argument: str, message: str) -> None:
    check = named(doctor("--", *verl(model, argument), status=1), "command")
    assert check["state"] == "problem" and message in check["finding"] and "\n" not in check["finding"]


def test_a_configuration_folder_of_the_users_own(tmp_path: Path, model: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "hydra: {searchpath: [pkg://verl.trainer.config]}\n"
        "defaults: [ppo_trainer, jetrl: unified, _self_]\n"
        f"jetrl: {{align: linear}}\n{R.split('.')[0]}: {{rollout: {{name: vllm}}, model: {{path: {model}}}}}\n"
    )
    # in a separate process: hydra imports verl for this, without plugins
    command = [sys.executable, "-m", "jetrl_patch", "doctor", "--json", "--", "python", "-m", "verl.trainer.main_ppo"]
    command += [f"--config-path={tmp_path}", "--config-name=mine"]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert done.returncode == 1, done.stdout + done.stderr  # verl's defaults: 8 GPUs, data in the home folder
    assert json.loads(done.stdout)["config"]["align"] == "linear"


def test_an_openrlhf_run_that_would_start(model: Path) -> None:
    found = doctor("--", "JETRL_DECODE_GRAPHS=0", *openrlhf(model), status=0)
    assert named(found, "switched on")["state"] == named(found, "openrlhf settings")["state"] == "ok"
    assert "enforce_eager" in named(found, "openrlhf changes")["finding"]


def test_openrlhf_with_a_split_that_cuts_a_block(model: Path) -> None:
    found = doctor("--", *openrlhf(model, "--vllm.tensor_parallel_size", "4"), status=1)
    assert "tensor parallel size 4 cuts a block of 128" in named(found, "openrlhf setting")["finding"]
    doctor("--", *openrlhf(model, "--vllm.tensor_parallel_size", "2"), status=0)
    left = doctor("--set", "on_cut=bf16", "--", *openrlhf(model, "--vllm.tensor_parallel_size", "4"), status=0)
    assert "cuts a block of 128 in 3 layers (o_proj;" in named(left, "openrlhf changes")["finding"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ds.zero_stag", "3", "--vllm.nothing", "1"], "unrecognized arguments"),
        (["--ds.zero_stage", "three"], "invalid int value: 'three'"),
        (["--rollout.n_samples_per_prompt", "1"], "group_norm requires n_samples_per_prompt > 1"),
        (["--help"], "Remove --help"),
    ],
)
def test_openrlhf_refuses_its_own_arguments(model: Path, arguments: list[str], message: str) -> None:
    check = named(doctor("--", *openrlhf(model, *arguments), status=1), "command")
    assert check["state"] == "problem" and message in check["finding"] + check["to_do"]


@pytest.mark.parametrize("estimator", ["gae", "group_norm"])
@pytest.mark.parametrize("start", [["jetrl", "openrlhf", "--fp8-unified"], ["python", "-m", "openrlhf.cli.train_ppo_ray"]])
def test_openrlhf_without_a_reward_is_one_message(model: Path, start: list[str], estimator: str) -> None:
    words = openrlhf(model)[3:]
    at = words.index("--reward.remote_url")
    command = [*start, *words[:at], *words[at + 2 :], "--algo.advantage.estimator", estimator]
    check = named(doctor("--", *command, status=1), "command")
    assert "required a reward" in check["finding"] and check["to_do"].startswith("Add --reward.remote_url FILE.py")


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (["--rollout.micro_batch_size", "0"], "end in ZeroDivisionError"),
        (["--ds.ring_attn_size", "0"], "end in ZeroDivisionError"),
    ],
)
def test_a_traceback_of_openrlhfs_own_checks_is_one_message(model: Path, extra: list[str], says: str) -> None:
    check = named(doctor("--", *openrlhf(model, *extra), status=1), "command")
    assert says in check["finding"] and re.search(r"Look at line \d+ of .*train_ppo_ray\.py", check["to_do"])


def test_other_commands_cannot_be_judged() -> None:
    assert named(doctor("--", sys.executable, "train.py", status=2), "command")["state"] == "unknown"
    found = named(doctor("--", sys.executable, "-m", "verl.model_merger", status=2), "command")
    assert found["state"] == "unknown" and "only the arguments of verl.trainer.main_ppo" in found["finding"]


@pytest.mark.parametrize(
    ("program", "instead"),
    [
        ("verl.trainer.main_generation_server", "verl.trainer.main_ppo"),
        ("verl.trainer.sft_trainer", "verl.trainer.main_ppo"),
        ("openrlhf.cli.train_sft", "openrlhf.cli.train_ppo_ray"),
    ],
)
def test_a_program_that_is_not_supported_is_a_problem(program: str, instead: str) -> None:
    check = named(doctor("--", "python", "-m", program, status=1), "command")
    assert check["state"] == "problem" and program in check["finding"] and f"required {instead}" in check["finding"]


@pytest.mark.parametrize("command", [verl, openrlhf])
def test_a_mixture_of_experts_would_not_start(command: Any, tmp_path: Path) -> None:
    from tests.trainer.test_structure import experts

    experts().save_pretrained(tmp_path)
    for option in (("--align", "linear"), ("--precision", "fp8-rollout")):
        found = doctor(*option, "--", *command(tmp_path), status=1)
        assert any("num_experts=4" in check["finding"] for check in found["checks"] if check["state"] == "problem")


def test_the_table_says_what_to_do(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(app, ["doctor", *verl(model, f"{R}.quantization=fp8")])  # without --
    assert result.exit_code == 1
    assert "→ Set it to null" in result.output
    assert result.output.strip().splitlines()[-1] == "a run would NOT start: 1 problem"


def states(output: str) -> list[str]:
    """The column of states, in the order of the table."""
    return [found[1] for found in re.finditer(r"^ \S.*? +(problem|unknown|warning|change|ok|skipped) ", output, re.M)]


def test_the_table_shows_problems_first_and_what_is_right_last(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    wrong = ["trainer.n_gpus_per_node=3", f"{R}.quantization=fp8", "data.val_files=somebody/data"]
    words = ["python3.99", *verl(model, *wrong)[1:]]
    output = CliRunner().invoke(app, ["doctor", "--", *words]).output
    order = ["problem", "unknown", "warning", "change", "ok", "skipped"]
    ranks = [order.index(state) for state in states(output)]
    assert ranks == sorted(ranks) and {"problem", "unknown", "warning", "ok", "skipped"} <= set(states(output))
    assert "change" not in states(output)  # nothing enables the plugin
    assert len(ranks) == len(doctor("--", *words)["checks"])


def test_the_table_says_what_a_run_would_change(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    command = ["jetrl", "verl", "--fp8-unified", "--set", "decode_graphs=false", *verl(model)[3:]]
    output = CliRunner().invoke(app, ["doctor", "--", *command]).output
    found = states(output)
    assert found[:2] == ["change", "change"] and "change" not in found[2:]
    targets = [patch["target"] for patch in doctor("--", *command)["patches"]]
    number = sum(target.split(".")[0].split(":")[0] == "verl" for target in targets)
    assert f"verl: {number} patches (bug fixes: " in output and "vllm: " in output
    lines = output[: output.index("python  ")]
    assert "enforce_eager=True" in lines
    assert "openrlhf: " not in lines and "deepspeed" not in lines  # a run of verl never imports them
    alone = CliRunner().invoke(app, ["doctor"]).output
    assert "openrlhf: " in alone and "deepspeed" in alone


def test_a_checkpoint_of_another_precision_is_a_problem_of_the_command(tmp_path: Path, model: Path) -> None:
    actor = tmp_path / "global_step_20" / "actor"
    actor.mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    record.write(actor, Config(precision="bf16"))
    command = ["jetrl", "verl", "--fp8-unified", *verl(model, f"trainer.default_local_dir={tmp_path}")[3:]]
    check = named(doctor("--", *command, status=1), "verl setting")
    assert f"resuming {actor}" in check["finding"] and "found precision='bf16'" in check["finding"]
    assert "another trainer.default_local_dir" in check["to_do"]
