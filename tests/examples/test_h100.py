"""The scripts for 8 H100, as far as checked without GPUs: shell, configuration, arguments, the plugin's rules."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cost import H100, NETS, WAYS, step
from benchmarks.scaling import LOADS
from examples.openrlhf.h100.reward import reward_func
from jetrl_patch import registry
from jetrl_patch.cli.doctor import examine, launch
from jetrl_patch.patching import guards
from tests.doctor.asked import eight_gpus

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*/h100/*_*.sh"))
LENGTHS = {"8k": 8192, "16k": 16384}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config.json of each model, with empty weights."""
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    folder = tmp_path_factory.mktemp("models")
    shared: dict[str, Any] = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    qwen = Qwen3Config(**shared, vocab_size=151936, intermediate_size=12288, num_hidden_layers=36)
    llama = LlamaConfig(**shared, vocab_size=128256, intermediate_size=14336, num_hidden_layers=32)
    small = Qwen2Config(
        hidden_size=3584, num_attention_heads=28, num_key_value_heads=4, vocab_size=152064, intermediate_size=18944,
        num_hidden_layers=28,
    )  # fmt: skip
    for config, name in ((small, "qwen2_5_7b"), (qwen, "qwen3_8b"), (llama, "llama3_1_8b")):
        config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
        config.save_pretrained(folder / name)
    for model in folder.iterdir():
        for name in ("model.safetensors", "tokenizer.json"):  # a checkpoint that looks complete
            (model / name).touch()
    return folder


def command(script: Path, models: Path, *extra: str, **environ: str) -> list[str]:
    """The words of the command that the script would start."""
    say = models / "say.py"
    say.write_text("import json, sys; print(json.dumps(sys.argv[1:]))")
    model = models / script.stem.rsplit("_", 1)[0]
    settings = {"JETRL": f"{sys.executable} {say}", "MODEL": str(model), "HOME": "/home/user", **environ}
    done = subprocess.run(
        [str(script), *extra], capture_output=True, text=True, env={"PATH": os.environ["PATH"], **settings}
    )
    assert done.returncode == 0, done.stderr
    return ["jetrl", *json.loads(done.stdout)]


def states(report: Any) -> dict[str, str]:
    return {check.name: check.state for check in report.checks}


def test_every_model_and_length_is_there_for_both_frameworks() -> None:
    names = {f"{model}_{length}" for model in ("qwen2_5_7b", "qwen3_8b", "llama3_1_8b") for length in LENGTHS}
    for framework in ("verl", "openrlhf"):
        assert {script.stem for script in SCRIPTS if script.parts[-3] == framework} == names
    for script in (*SCRIPTS, *EXAMPLES.glob("*/h100/common.sh")):
        subprocess.run(["bash", "-n", str(script)], check=True)
        assert os.access(script, os.X_OK) == (script.stem != "common")


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend to be the machine that the scripts assume: 8 H100, a CUDA build of vLLM, flash-attn, and the user's data."""
    eight_gpus(monkeypatch, "H100")
    monkeypatch.setattr("jetrl_patch.backends.capability.check_exact_cuda", lambda *sm: (True, "H100"))
    real = guards.is_installed
    monkeypatch.setattr(guards, "is_installed", lambda name: name == "flash_attn" or real(name))
    monkeypatch.setattr(launch, "_data", lambda needs: iter(()))


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_a_run_would_start(script: Path, models: Path) -> None:
    framework, length = script.parts[-3], LENGTHS[script.stem.rsplit("_", 1)[1]]
    words = command(script, models)
    report = examine.examine({}, words)
    assert report.verdict == "a run would start", [check for check in report.checks if check.state == "problem"]
    found = states(report)
    assert found["command"] == found[f"{framework} settings"] == found["switched on"] == found["flash-attn"] == "ok"
    assert report.config is not None and report.config.exact and report.config.decode_graphs
    arguments = examine.recognise(words).arguments
    if framework == "verl":
        config = registry.launches("verl").read(arguments)
        assert config.data.max_response_length == length
        assert config.actor_rollout_ref.rollout.max_model_len == length + 1024
        assert config.trainer.n_gpus_per_node == 8
        written = {f"{folder}/{split}.parquet" for folder in ("gsm8k", "math") for split in ("train", "test")}
        assert {path.removeprefix("/home/user/data/") for path in (*config.data.train_files, *config.data.val_files)} == written
        _verl_accepts(config)
    else:
        args = registry.launches("openrlhf").read(arguments)
        assert args.rollout.max_new_tokens == length and args.data.max_len == length + 1024
        assert args.actor.num_gpus_per_node == args.vllm.num_engines * args.vllm.tensor_parallel_size == 8
        assert args.data.prompt_dataset == ",".join(f"/home/user/data/{folder}/train.jsonl" for folder in ("gsm8k", "math"))


def test_the_tensor_parallelism_is_the_estimates(models: Path) -> None:
    """That of exact mode, the scripts' default, for each model and length."""
    nets = {re.sub(r"\W", "", net.block.name.lower()): net for net in NETS}
    (exact,) = (way for way in WAYS if way.name == "exact")
    for script in SCRIPTS:
        model, length = script.stem.rsplit("_", 1)
        load = next(load for load in LOADS if load.longest == LENGTHS[length])
        words = " ".join(command(script, models))
        (tp,) = re.findall(r"(?:tensor_model_parallel_size=|--vllm.tensor_parallel_size )(\d)", words)
        assert int(tp) == step(nets[model.replace("_", "")], exact, load, H100).tp, script


def _verl_accepts(config: Any) -> None:
    """verl's own validation."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))


@pytest.mark.parametrize("framework", ["verl", "openrlhf"])
def test_another_alignment(framework: str, models: Path) -> None:
    words = command(EXAMPLES / framework / "h100" / "qwen3_8b_8k.sh", models, ALIGN="linear")
    assert examine.recognise(words).overrides == {"precision": "fp8-unified", "align": "linear"}


@pytest.mark.parametrize("framework", ["verl", "openrlhf"])
def test_a_run_in_another_precision_has_another_folder(framework: str, models: Path) -> None:
    script = EXAMPLES / framework / "h100" / "qwen3_8b_8k.sh"
    folders = set()
    for environ in ({}, {"ALIGN": "linear"}, {"PRECISION": "bf16"}, {"PRECISION": "fp8-rollout"}):
        settings = registry.launches(framework).read(examine.recognise(command(script, models, **environ)).arguments)
        folders.add(settings.trainer.default_local_dir if framework == "verl" else settings.ckpt.path)
    stem = "outputs/qwen3_8b_8k"
    end = "" if framework == "verl" else "/checkpoints"
    assert folders == {f"{stem}-{precision}{end}" for precision in ("fp8-unified", "fp8-unified-linear", "bf16", "fp8-rollout")}


@pytest.mark.parametrize("framework", ["verl", "openrlhf"])
def test_variables_and_arguments_of_the_user_have_the_last_word(framework: str, models: Path) -> None:
    script = EXAMPLES / framework / "h100" / "qwen3_8b_8k.sh"
    extra = ["trainer.total_epochs=7"] if framework == "verl" else ["--train.num_episodes", "7"]
    words = command(script, models, *extra, PRECISION="bf16", TP="2", GPUS="4")
    started = examine.recognise(words)
    assert started.overrides == {"precision": "bf16"} and "--fp8-unified" not in words
    if framework == "verl":
        config = registry.launches("verl").read(started.arguments)
        assert config.trainer.total_epochs == 7
        assert (config.trainer.n_gpus_per_node, config.actor_rollout_ref.rollout.tensor_model_parallel_size) == (4, 2)
    else:
        args = registry.launches("openrlhf").read(started.arguments)
        assert args.train.num_episodes == 7
        assert (args.actor.num_gpus_per_node, args.vllm.num_engines, args.vllm.tensor_parallel_size) == (4, 2, 2)


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        (r"so \boxed{42}", "42", 1.0),
        (r"first \boxed{1}, then \boxed{\frac{1}{2}}.", r"\frac{1}{2}", 1.0),
        (r"\boxed{$1,000$}", "1000", 1.0),
        ("it is 3, no, 4.", "4", 1.0),
        ("it is 3", "4", 0.0),
        (r"\boxed{4", "4", 1.0),
        ("nothing", "4", 0.0),
    ],
)
def test_the_reward(response: str, label: str, score: float) -> None:
    found = reward_func(["4 + 0 = " + response], ["4 + 0 = "], [label])
    assert found == {"rewards": score, "scores": score, "extra_logs": {}}
