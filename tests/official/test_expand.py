"""A script with stubs in its PATH: every launch is recorded, and nothing else happens."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.official.expand import expand
from tests.official.scripts import HEAD, grpo, write


def only(folder: Path, work: Path, **texts: str):
    found = expand(write(folder, **texts), work)
    assert len(found) == 1
    return found[0]


def test_the_launch_is_recorded_word_for_word(tmp_path):
    found = only(tmp_path / "checkout", tmp_path / "work", run=grpo())
    assert found.failure == "" and len(found.launches) == 1  # its `sleep infinity` is a stub
    launch = found.launches[0]
    home = tmp_path / "work" / "home"
    assert launch.command[:8] == ("uv", "run", "--frozen", "--extra", "vllm", "python3", "-m", "verl.trainer.main_ppo")
    assert launch.command[8] == f"data.train_files=['{home}/data/train.parquet', '{home}/data/more.parquet']"
    assert "data.max_response_length=2048" in launch.command
    assert launch.environ["SOME_SWITCH"] == "1" and launch.own_environment
    assert launch.name == "examples/some_trainer/run.sh"


def test_nothing_outside_the_workplace_changes(tmp_path):
    outside = tmp_path / "outside"
    text = (
        HEAD + f"mkdir -p {outside} ckpt\nrm -rf {tmp_path}\ntouch {tmp_path}/new\npython3 train.py --out {outside}\n"
    )
    checkout = tmp_path / "checkout"
    found = only(checkout, tmp_path / "work", run=text)
    assert [launch.command for launch in found.launches] == [("python3", "train.py", "--out", str(outside))]
    assert found.failure == "" and not outside.exists() and not (tmp_path / "new").exists()
    assert [path.name for path in checkout.rglob("*")] == ["examples", "some_trainer", "run.sh"]
    assert (tmp_path / "work" / "checkout" / "ckpt").is_dir()


def test_several_launches_of_one_script_and_a_command_in_a_text(tmp_path):
    text = HEAD + (
        "for i in 1 2; do torchrun --nnodes=1 -m verl.trainer.sft_trainer n=$i; done\n"
        'srun bash -c "pip install x && /root/ray job submit -- python3 -m openrlhf.cli.train_ppo_ray --a 1" &\nwait\n'
    )
    commands = [launch.command for launch in only(tmp_path / "checkout", tmp_path / "work", run=text).launches]
    assert [command[-1] for command in commands] == ["n=1", "n=2", "1"]
    assert commands[2][-4:] == ("-m", "openrlhf.cli.train_ppo_ray", "--a", "1")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (HEAD + 'echo "no data" >&2; exit 7\n', "exit status 7: no data"),
        (HEAD + "while :; do :; done\n", "no end in 2 s"),
        (HEAD + "unknown-program\n", "exit status 127"),
    ],
)
def test_a_script_that_does_not_come_to_its_end_says_why(tmp_path, text, why):
    found = expand(write(tmp_path / "checkout", run=text), tmp_path / "work", limit=2 if "while" in text else 60)
    assert why in found[0].failure and found[0].launches == ()


def test_a_placeholder_is_filled_in(tmp_path):
    text = "ROOT=<PLACE_OF_THE_CODE>\npython3 -m verl.trainer.main_ppo root=$ROOT\n"
    found = only(tmp_path / "checkout", tmp_path / "work", run=text)
    assert found.launches[0].command[-1] == "root=/place_of_the_code"


def test_a_folder_without_scripts_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no script"):
        expand(tmp_path / "empty", tmp_path / "work")
