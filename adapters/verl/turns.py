"""How the tokens of an agent loop's response were drawn: recorded at each turn, and given to the sample when the loop returns.

verl's loops return lists of tokens, of which some are the model's and others a tool's or the user's. What the tokens of a turn
were drawn from, and at which temperature, does not pass through them. So each turn is noted beside the loop, in the loop's task.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from jetrl_patch.adapters.verl.support import TEMPERATURE
from jetrl_patch.errors import ConfigError, JetrlError, explain
from jetrl_patch.patching.patch import replacement
from jetrl_patch.trainer.support import KEY, Turn, of_turns

#: the turns of the loop that runs in this task, and their temperatures
_turns: ContextVar[list[tuple[Turn, float]] | None] = ContextVar("jetrl_turns", default=None)


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
        drawn = None if packed is None else Support.unpack(packed)
        temperature = kwargs["sampling_params"].get("temperature", 1.0) or 1.0  # greedy tokens have log-probs at 1
        turns.append(((list(output.token_ids), drawn), float(temperature)))
    return output


@replacement
async def compute_score(original: Any, self: Any, outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    """Wrap ``AgentLoopWorker._compute_score``, by which all workers postprocess what a loop returns: say how it was drawn.

    Samples bring an error to the trainer, which ends the run: verl's V1 workers log an exception and go on without them.
    """
    if turns := _turns.get():
        try:
            _describe(outputs, turns)
        except JetrlError as error:
            for output in outputs:
                output.extra_fields[KEY] = str(error)
    return await original(self, outputs, *args, **kwargs)


def _describe(outputs: Sequence[Any], turns: Sequence[tuple[Turn, float]]) -> None:
    """Add to each sample how it was drawn. Raises ConfigError for several temperatures, AuditError as ``of_turns``."""
    temperature, *others = sorted({temperature for _, temperature in turns})
    if others:
        required, found = "one for all turns of a loop", ", ".join(map(str, (temperature, *others)))
        fix = "pass the loop's sampling_params on as they are, or use align='linear'"
        raise ConfigError(explain("the temperature of an agent loop in exact mode", required=required, found=found, fix=fix))
    limited, left = any(drawn is not None for (_, drawn), _ in turns), (turn for turn, _ in turns)
    for output in outputs:
        output.extra_fields[TEMPERATURE] = temperature
        if limited:
            output.extra_fields[KEY] = of_turns(output.response_ids, output.response_mask, left).pack()
