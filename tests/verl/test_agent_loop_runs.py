"""Real verl with agent loops of the user's own: one that drops the rollout's log-probs ends the run in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.verl.run_verl import R, Run, make_task

TIMEOUT = 900
LOOP = """
from uuid import uuid4
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register

@register("forgets")
class Forgets(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        prompt = list(await self.ct_build_initial_tokens(list(kwargs["raw_prompt"])))
        found = await self.server_manager.generate(request_id=uuid4().hex, prompt_ids=prompt, sampling_params=sampling_params)
        tokens = list(found.token_ids)
        extra = {**found.extra_fields, "turn_scores": [], "tool_rewards": []}
        return AgentLoopOutput(
            prompt_ids=prompt, response_ids=tokens, response_mask=[1] * len(tokens), num_turns=2, metrics={}, extra_fields=extra
        )
"""


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 100)
@pytest.mark.parametrize("v1", [True, False])
def test_a_loop_without_log_probs(tmp_path: Path, v1: bool) -> None:
    task = make_task(tmp_path)
    (task / "forgetful.py").write_text(LOOP)
    (task / "loops.yaml").write_text("- name: forgets\n  _target_: forgetful.Forgets\n")
    words = [f"{R}.agent.default_agent_loop=forgets", f"{R}.agent.agent_loop_config_path={task}/loops.yaml"]
    environ = {"JETRL_PRECISION": "fp8-unified", "PYTHONPATH": str(task)}
    run = Run(task, f"trainer.use_v1={v1}", *words, environ=environ)
    assert run.wait(TIMEOUT) != 0
    assert "KeyError" not in run.text.splitlines()[-1] and not run.metrics()
    assert "ConfigError: samples of an agent loop with align='exact': required response_logprobs for every token" in run.text
