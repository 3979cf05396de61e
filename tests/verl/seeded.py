"""A task whose samples are the same in every run: a hook seeds each one by its step, its prompt and its number.

verl and OpenRLHF do not restore the rollout engine's random generator, and requests reach it in another order each time.
"""

from __future__ import annotations

from pathlib import Path

from tests.verl.run_verl import make_task

SEEDS = """
import wrapt

@wrapt.when_imported("verl.experimental.agent_loop.agent_loop")
def _(module):
    original = module.AgentLoopWorker._run_agent_loop
    async def _run_agent_loop(self, sampling_params, trajectory, **kwargs):
        number = int(kwargs.get("session_id", trajectory["rollout_n"]))  # the trainer V1 has a session, V0 a rollout
        seed = 100_000 * int(trajectory["step"]) + 100 * int(trajectory["sample_index"]) + number
        return await original(self, {**sampling_params, "seed": seed}, trajectory, **kwargs)
    module.AgentLoopWorker._run_agent_loop = _run_agent_loop
"""


def make_seeded_task(folder: Path, more: str = "") -> Path:
    """Write a task and its hook, a sitecustomize in ``hook`` for PYTHONPATH, with ``more`` of the test's own."""
    make_task(folder)
    (folder / "hook").mkdir()
    (folder / "hook" / "sitecustomize.py").write_text(SEEDS + more)
    return folder
