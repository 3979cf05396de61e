"""What the tokens of an agent loop's response were drawn from: recorded at each turn, and put in place when the loop returns.

verl's loops return lists of tokens, of which some are the model's and others a tool's or the user's. The supports of a turn do
not pass through them, so each turn is noted beside the loop, in the loop's own task.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from jetrl_patch.patching.patch import replacement
from jetrl_patch.trainer.support import KEY, Turn, of_turns

#: the turns of the loop that runs in this task
_turns: ContextVar[list[Turn] | None] = ContextVar("jetrl_turns", default=None)


@replacement
async def run_agent_loop(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``AgentLoopWorker._run_agent_loop``, which runs one loop and postprocesses what it returns."""
    token = _turns.set([])
    try:
        return await original(self, *args, **kwargs)
    finally:
        _turns.reset(token)


@replacement
async def generate(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``LLMServerClient.generate``. An asynchronous client calls it again for a turn that a weight sync has cut."""
    output = await original(self, *args, **kwargs)
    turns = _turns.get()
    if turns is not None:
        from jetrl_patch.exact.support import Support

        packed = output.extra_fields.pop(KEY, None)
        turns.append((list(output.token_ids), None if packed is None else Support.unpack(packed)))
    return output


@replacement
async def compute_score(original: Any, self: Any, outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    """Wrap ``AgentLoopWorker._compute_score``, with which all workers postprocess what a loop returns: give each its supports."""
    turns = _turns.get() or []
    if any(drawn is not None for _, drawn in turns):
        left = iter(turns)
        for output in outputs:
            output.extra_fields[KEY] = of_turns(output.response_ids, output.response_mask, left).pack()
    return await original(self, outputs, *args, **kwargs)
