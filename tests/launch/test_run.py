"""``jetrl run`` as a real process: arguments, exit status, signals, environment."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

JETRL = [str(Path(sys.executable).with_name("jetrl")), "run"]
#: a program that prints what it can see of how it was started
DUMP = """
import json, os, sys
mine = sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "wrapt", "vllm", "verl", "ray"))
print(json.dumps({
    "argv": [os.fsencode(word).hex() for word in sys.argv], "name": __name__, "file": __file__,
    "spec": __spec__ and __spec__.name, "path": sys.path[0], "main": sys.modules["__main__"].__file__,
    "environ": dict(os.environ), "modules": mine, "patched": "jetrl_patch.session" in sys.modules,
}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    (folder / "dump.py").write_text(DUMP)
    (folder / "pack").mkdir()
    (folder / "pack" / "__init__.py").touch()
    (folder / "pack" / "__main__.py").write_text(DUMP)
    (folder / "pack" / "dump.py").write_text(DUMP)
    (folder / "child.py").write_text(
        "import multiprocessing, os\n"
        "def work(q): q.put((__name__, os.environ.get('JETRL_PRECISION')))\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn'); queue = context.Queue()\n"
        "    child = context.Process(target=work, args=(queue,)); child.start(); print(queue.get()); child.join()\n"
    )
    return folder


def start(folder, words, *, command=JETRL, **environ):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("JETRL_", "COV", "RANK"))}
    return subprocess.run([*command, *words], capture_output=True, cwd=folder, env={**clean, **environ}, timeout=500)


def seen(done):
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return json.loads(done.stdout)


WORD = st.one_of(
    st.sampled_from([b"", b"--", b"-m", b"--help", b"--set", b"a b", b"\xff\xfe", "é".encode(), b"--fp8"]),
    st.binary(min_size=1, max_size=6).map(lambda raw: raw.replace(b"\0", b"0")),
)


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(WORD, max_size=8))
def test_arguments_arrive_byte_for_byte(folder, words):
    found = seen(start(folder, ["dump.py", *words]))
    assert [bytes.fromhex(word) for word in found["argv"]] == [b"dump.py", *words]


@pytest.mark.parametrize("words", [["dump.py"], ["-m", "pack.dump"], ["-m", "pack"], ["./pack"]])
def test_a_program_without_a_precision_finds_what_python_gives_it(folder, words):
    words = [*words, "x", "--", "--fp8-unified"]
    ours = seen(start(folder, words))
    theirs = seen(start(folder, words, command=[sys.executable]))
    for found in (ours, theirs):
        # runpy leaves a folder's path relative; Python 3.12 has ./ in a folder's files, which runpy leaves out
        found |= {key: os.path.realpath(folder / found[key]) for key in ("path", "main", "file") if found[key]}
    assert ours == theirs


def test_a_module_is_also_run_by_python_m_jetrl_patch(folder):
    command = [sys.executable, "-m", "jetrl_patch", "run"]
    found = seen(start(folder, ["-m", "pack.dump", "x"], command=command))
    assert found == seen(start(folder, ["-m", "pack.dump", "x"], command=[sys.executable]))
    assert seen(start("/", [str(folder / "dump.py")], command=command))["path"] == str(folder)


@pytest.mark.parametrize(
    "words",
    [
        ["--fp8-unified", "dump.py", "a", "--", "--fp8-unified"],
        ["dump.py", "a", "--fp8-unified", "--", "--fp8-unified"],
    ],
)
def test_the_flag_in_either_place_patches_and_says_so(folder, words):
    done = start(folder, words)
    found = seen(done)
    assert [bytes.fromhex(word) for word in found["argv"]] == [b"dump.py", b"a", b"--", b"--fp8-unified"]
    assert found["patched"] and found["environ"]["JETRL_PRECISION"] == "fp8-unified"
    assert found["environ"]["JETRL_ALIGN"] == "exact"
    (line,) = done.stderr.decode().splitlines()
    said = re.fullmatch(r"jetrl: precision fp8-unified, align exact, (\d+) changes in process \d+, of which (\d+) wait .*", line)
    assert said and 0 < int(said[2]) < int(said[1])


def test_spawned_children_find_the_program_and_the_settings(folder):
    done = start(folder, ["child.py"], JETRL_PRECISION="bf16")
    assert done.stdout.decode().strip() == "('__mp_main__', 'bf16')", done.stderr.decode()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("raise SystemExit(7)", 7),
        ("import sys; sys.exit('why')", 1),
        ("import os; os._exit(9)", 9),
        ("raise ValueError('x')", 1),
        ("from jetrl_patch import ConfigError; raise ConfigError('x')", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("pass", 0),
    ],
)
def test_the_exit_status_is_the_programs(folder, body, status):
    program = folder / "end.py"
    program.write_text(body)
    done = start(folder, ["end.py"])
    assert done.returncode == status
    plain = start(folder, ["end.py"], command=[sys.executable])
    assert plain.returncode == status
    if b"Error: x" in plain.stderr:
        assert done.stderr.splitlines()[-1] == plain.stderr.splitlines()[-1] and b"Traceback" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("handled", [True, False])
def test_signals_reach_the_program(folder, number, handled):
    program = folder / "wait.py"
    handler = "lambda *_: sys.exit(43)" if handled else "signal.SIG_DFL"
    program.write_text(
        f"import signal, sys, time\nsignal.signal({int(number)}, {handler})\nprint('up', flush=True)\ntime.sleep(3600)"
    )
    process = subprocess.Popen([*JETRL, "wait.py"], cwd=folder, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    process.send_signal(number)
    assert process.wait(500) == (43 if handled else -number)


@pytest.mark.parametrize(
    ("words", "environ", "says"),
    [
        (["nowhere.py"], {}, "required nowhere.py, found no such file"),
        (["--fp8-unified", "nowhere.sh"], {}, "required nowhere.sh, found no such file. Give a script, a command, or -m MODULE"),
        (["--fp8-unified", "run.sh"], {"JETRL_PRECISON": "bf16"}, "JETRL_PRECISON"),
        (["--set", "nothing=1", "bash", "run.sh"], {}, "unknown setting 'nothing'"),
        (["--align", "exact", "run.sh"], {}, "no precision"),
        (["-m", "pack.nowhere"], {}, "required -m pack.nowhere, found no such module"),
        (["-m", ".pack"], {}, "no such module"),
        (["--align", "exact", "dump.py"], {}, "no precision"),
        (["--fp8-unified", "dump.py"], {"JETRL_ENABLED": "0"}, "JETRL_ENABLED=0"),
        (["--set", "nothing=1", "dump.py"], {}, "unknown setting 'nothing'"),
        (["dump.py"], {"JETRL_PRECISION": "fp9"}, "unknown precision 'fp9'"),
        (["--fp8-unified", "dump.py"], {"JETRL_PRECISON": "bf16"}, "JETRL_PRECISON"),
    ],
)
def test_our_errors_are_one_line_before_the_program_starts(folder, words, environ, says):
    (folder / "run.sh").write_text("python dump.py\n")
    done = start(folder, words, **environ)
    assert done.returncode == 2 and done.stdout == b""
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("jetrl: ConfigError: ") and says in line


TORCH = """
import json, os, sys, torch, jetrl_patch
now, align = jetrl_patch.status(), os.environ.get("JETRL_ALIGN")
print(json.dumps({"argv": sys.argv[1:], "precision": now.enabled and now.config.precision, "align": align}))
sys.exit(7)
"""


@pytest.mark.parametrize("command", [["run.sh"], ["./started.sh"], ["bash", "run.sh"], ["env", "bash", "run.sh"]])
def test_a_shell_script_runs_as_it_is(folder, command):
    script = f'#!/usr/bin/env bash\nexec {sys.executable} torch_program.py "$@"\n'
    (folder / "torch_program.py").write_text(TORCH)
    (folder / "run.sh").write_text(script.partition("\n")[2])
    (folder / "started.sh").write_text(script)
    (folder / "started.sh").chmod(0o755)
    words = ["two words", "--", "--fp8-unifed", "$HOME"]
    done = start(folder, ["--fp8-unified", "--align=linear", *command, *words])
    assert done.returncode == 7, done.stderr
    assert json.loads(done.stdout) == {"argv": words, "precision": "fp8-unified", "align": "linear"}
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("jetrl: precision fp8-unified, align linear; what ")
    done = start(folder, [*command, *words])
    assert json.loads(done.stdout) == {"argv": words, "precision": False, "align": None}
    assert b"so nothing is patched" in done.stderr


@pytest.mark.parametrize("words", [["--help"], ["--fp8-unified", "-h"]])
def test_help_before_the_program_is_ours(folder, words):
    done = start(folder, words)
    assert done.returncode == 0 and done.stdout.startswith(b"usage: jetrl run")


@pytest.mark.e2e
@pytest.mark.slow
def test_under_torchrun_where_only_the_first_rank_tells(folder):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--no-python"]
    (folder / "rank.py").write_text(
        "import os, sys, jetrl_patch\n"
        "print('rank', os.environ['RANK'], jetrl_patch.status().config.precision, sys.argv[1:], flush=True)"
    )
    done = start(folder, ["--precision", "bf16", "rank.py", "--", "x"], command=[*torchrun, *JETRL])
    assert done.returncode == 0, done.stderr.decode()
    lines = sorted(line for line in done.stdout.decode().splitlines() if line.startswith("rank"))
    assert lines == [f"rank {n} bf16 ['--', 'x']" for n in (0, 1)]
    assert done.stderr.decode().count("jetrl: precision bf16") == 1
