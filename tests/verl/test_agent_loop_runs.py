"""Real verl with agent loops of the user's own: one with tools, and one that drops the rollout's log-probs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.verl.run_verl import A, R, Run, make_task
from tests.verl.test_e2e import assert_exact, finish

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


TOOLS = """
from verl.experimental.agent_loop.agent_loop import register
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall
from verl.tools.schemas import ToolResponse

class Always:
    stop_token_ids = []

    async def extract_tool_calls(self, response_ids, tools):
        return "", [FunctionCall(name="dice", arguments="{}")]

@register("rolls")
class Rolls(ToolAgentLoop):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tool_parser = Always()

    async def _handle_generating_state(self, agent_data, sampling_params, **kwargs):
        return await super()._handle_generating_state(agent_data, {**sampling_params, "max_tokens": 6}, **kwargs)

    async def _call_tool(self, *_):
        return ToolResponse(text="4"), 0.0, {}
"""


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 100)
@pytest.mark.parametrize("mode", ["v0", "sync", "colocate_async"])
def test_several_turns_with_tools_that_leave_out_tokens(tmp_path: Path, mode: str) -> None:
    """Two updates in each step. A sample has the model's tokens of several turns, and a tool's in between."""
    task = make_task(tmp_path)
    template = task / "model" / "chat_template.jinja"  # what verl adds for a tool ends without a prompt to generate
    template.write_text(template.read_text().replace("=", "{% if add_generation_prompt %}={% endif %}"))
    (task / "rolling.py").write_text(TOOLS)
    (task / "loops.yaml").write_text("- name: rolls\n  _target_: rolling.Rolls\n")
    words = [f"{R}.agent.default_agent_loop=rolls", f"{R}.agent.agent_loop_config_path={task}/loops.yaml"]
    words += [f"{R}.multi_turn.enable=True", f"{R}.multi_turn.max_assistant_turns=3", "data.max_response_length=32"]
    words += [f"{R}.top_p=0.9", f"{R}.top_k=50", f"{R}.temperature=0.8", f"{A}.ppo_mini_batch_size=2"]
    words += [f"trainer.use_v1={mode != 'v0'}"] + [f"trainer.v1.trainer_mode={mode}"] * (mode != "v0")
    environ = {"JETRL_PRECISION": "fp8-unified", "PYTHONPATH": str(task)}
    found = finish(Run(task, *words, steps=3, environ=environ), 3)
    current = [step for step in found if step["jetrl/stale_fraction"] == 0]  # an asynchronous trainer has older samples too
    assert_exact(current)
    assert len(current) == 3 or mode == "colocate_async"
    assert sum(step["jetrl/tokens"] for step in current) > 250
