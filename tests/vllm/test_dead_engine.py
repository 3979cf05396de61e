"""A call into an engine's process ends with an error if the process is killed before it answers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

#: the process is stopped before the call, so it cannot answer, and killed during it
KILLED = """
import asyncio, os, signal, sys
import jetrl_patch
jetrl_patch.enable(precision="fp8-unified")
from vllm import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

async def main():
    arguments = AsyncEngineArgs(
        model=sys.argv[1], skip_tokenizer_init=True, max_model_len=64, max_num_seqs=2, kv_cache_memory_bytes=1 << 24,
        enforce_eager=True, disable_log_stats=True,
    )
    engine = AsyncLLM.from_engine_args(arguments)
    assert (await engine.collective_rpc("jetrl_report", kwargs={"digests": False}))[0]["state"] == "serving"
    (process,) = engine.engine_core.resources.engine_manager.processes
    os.kill(process.pid, signal.SIGSTOP)
    calls = [asyncio.create_task(engine.pause_generation()), asyncio.create_task(engine.collective_rpc("jetrl_report"))]
    await asyncio.sleep(1)
    assert not any(call.done() for call in calls)
    os.kill(process.pid, signal.SIGKILL)
    found = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)
    assert [type(error) for error in found] == [EngineDeadError] * 2, found
    print("both calls ended", flush=True)
    os._exit(0)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.e2e
def test_calls_end_with_the_engine(checkpoint: Callable[..., str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"  # a file, because vLLM spawns the engine's process
    script.write_text(KILLED)
    done = subprocess.run([sys.executable, script, checkpoint("qwen3")], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0 and "both calls ended" in done.stdout, done.stdout[-3000:] + done.stderr[-6000:]
