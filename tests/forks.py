"""Scripts that run in processes forked from one that has done the slow imports, with their own environment and output.

    found = facts(SCRIPT, 2, "fsdp2", path)  # as torchrun --nproc_per_node=2 SCRIPT fsdp2 path

A script starts as in a fresh process that has imported some libraries, which takes most of a short test. Each set of environment
variables has a process of its own, which ends with pytest.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
#: no CPU-seconds in threads that wait for work
ENVIRON = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
#: what the frameworks import; none of these starts a thread
LIBRARIES = ("torch", "transformers", "tensordict", "ray", "peft", "pandas", "datasets")
WITH_VLLM = (*LIBRARIES, "vllm.v1.worker.gpu_model_runner")


class Done(NamedTuple):
    """How a script ended: the first status other than 0, and the output of its ranks, one after the other."""

    returncode: int
    stdout: str
    stderr: str


def run(
    script: Path | str,
    *words: str,
    ranks: int = 0,
    imports: Sequence[str] = LIBRARIES,
    environ: Mapping[str, str] = {},
    timeout: float = 500,
) -> Done:
    """Run a Python file with these arguments.

    Args:
        ranks: how many processes run it, with torchrun's variables. 0: one, without them.
        imports: the modules that are imported before.
        environ: variables beyond this process's and ``ENVIRON``.

    Raises:
        TimeoutError: it had not ended after ``timeout`` seconds. Its processes are killed.
    """
    key = (*imports, *sorted(environ.items()))
    environment = {**os.environ, **ENVIRON, **environ}  # with what the test has set
    if key not in _PARENTS:
        _PARENTS[key] = _Parent(imports, environment)
    with tempfile.TemporaryDirectory() as folder:
        job = {"script": str(script), "words": words, "ranks": ranks, "out": folder, "environ": environment}
        status = _PARENTS[key].run(job, timeout)
        if status is None:
            _PARENTS.pop(key)
        texts = ["".join(file.read_text() for file in sorted(Path(folder).glob(f"*.{kind}"))) for kind in ("out", "err")]
    if status is None:
        raise TimeoutError(f"{script} ran longer than {timeout} s: {texts[0][-2000:]}{texts[1][-6000:]}")
    return Done(status, *texts)


def facts(script: Path | str, ranks: int, *words: str, environ: Mapping[str, str] = {}) -> Any:
    """What a script prints after FACTS."""
    done = run(script, *words, ranks=ranks, environ=environ)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("FACTS "))
    return json.loads(line.removeprefix("FACTS "))


class _Parent:
    """The process that is forked from, and a line of JSON each way for each script."""

    def __init__(self, imports: Sequence[str], environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "tests.forks", *imports]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes)
        atexit.register(self._end)

    def run(self, job: Mapping[str, Any], timeout: float) -> int | None:
        """The status, or None after the timeout."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            self._end()
            return None
        answer = self._process.stdout.readline()
        assert answer, f"the process that imports {self._process.args} has ended"
        return int(answer)

    def _end(self) -> None:
        atexit.unregister(self._end)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


_PARENTS: dict[tuple[Any, ...], _Parent] = {}


# ---- In the process that is forked from ----------------------------------------------------------

def _serve(modules: Sequence[str]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints
    started = set(os.environ)
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # collections in the children neither visit nor copy what they share
    for line in sys.stdin:
        job = json.loads(line)
        for name in started - job["environ"].keys():  # set by the test that started this process
            os.environ.pop(name, None)
        print(_status(job), file=answers, flush=True)


def _status(job: Mapping[str, Any]) -> int:
    """Fork a process for each rank. If one fails, the others are killed, as torchrun does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = {os.fork() or _child(job, rank, port) for rank in range(max(job["ranks"], 1))}
    failed = 0
    while running:
        pid, status = os.wait()
        running.discard(pid)
        code = os.waitstatus_to_exitcode(status)
        if code and not failed:
            failed = code
            for other in running:
                os.kill(other, signal.SIGKILL)
    return failed


def _child(job: Mapping[str, Any], rank: int, port: int) -> Any:
    os.environ.update(job["environ"])
    if job["ranks"]:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job["ranks"], "LOCAL_WORLD_SIZE": job["ranks"]}
        os.environ.update({name: str(value) for name, value in {**ranks, "MASTER_PORT": port}.items()})
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    for number, kind in ((1, "out"), (2, "err")):
        file = os.open(f"{job['out']}/{rank}.{kind}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code = 1
    try:
        sys.argv = [job["script"], *job["words"]]
        sys.path[0] = str(Path(job["script"]).parent)
        if str(ROOT) not in sys.path:
            sys.path.append(str(ROOT))
        runpy.run_path(job["script"], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # reported by the status: the child must not go on in the parent's loop
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
            atexit._run_exitfuncs()
        os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[1:])
