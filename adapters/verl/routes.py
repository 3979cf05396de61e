"""``measure_routes`` and ``router_replay``: the experts that verl's rollout chose, compared with the trainer's and replayed.

verl's R3 has vLLM return the experts of each token, as ``routed_experts`` of a sample
(``rollout.enable_rollout_routing_replay``). They travel to the training workers whether or not an engine replays them; verl
0.9.1's FSDP engine ignores them. Here each forward pass that runs with the weights that sampled is compared with them: the pass
for old log-probs, or without it the first update. With ``router_replay`` each forward pass of the policy replays them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jetrl_patch import session
from jetrl_patch.adapters.verl.rollout_settings import beside
from jetrl_patch.adapters.verl.state import WORKER
from jetrl_patch.errors import ModelError, explain

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ROUTES", "attach", "forward_step", "metrics", "report"]

#: key of what was compared in a worker's report: routes, how many differ, how many were computed with other experts
ROUTES = "routes"

_RECORDED = "routed_experts"


def attach(engine: Any, module: Any) -> None:
    """Let the policy's engine record the routes of its model, which is not wrapped yet. Raises ModelError for a dense model."""
    config = session.active_config()
    if not config.returns_routes or engine.engine_config.forward_only:
        return
    from jetrl_patch.fp8.convert import expert_modules
    from jetrl_patch.measure.routes import Recorder

    if not expert_modules(module):
        required, found = "a mixture of experts that the plugin knows", f"model_type={module.config.model_type!r}"
        raise ModelError(explain(beside(config), required=required, found=found, fix="ask for no routes"))
    if config.router_replay != "none":
        from jetrl_patch.measure.routes import Replay

        if module.config.get_text_config().num_experts_per_tok == 1:
            required = "two experts per token or more, because verl fills what the rollout did not record with expert 0"
            raise ModelError(explain(beside(config), required=required, found="one", fix="set router_replay='none'"))
        engine._jetrl_replay = Replay(module)
    engine._jetrl_routes = Recorder(module)


def forward_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``FSDPEngineWithLMHead.forward_step``: compare the routes of a micro-batch with those of its samples, or replay them.

    What is replayed stays so after the step: backward may compute the forward pass again. An update counts if its loss
    compared log-probs as well: later ones have other weights than the rollout.
    """

    def forward_step(self: Any, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        recorder, replay = getattr(self, "_jetrl_routes", None), getattr(self, "_jetrl_replay", None)
        if recorder is None:
            return original(self, micro_batch, loss_function, forward_only)
        if micro_batch.get(_RECORDED, None) is None:
            if replay is not None:
                required, fix = "the rollout's experts with every sample", "use an agent loop that returns routed_experts"
                raise ModelError(explain("router_replay", required=required, found="a micro-batch without any", fix=fix))
            return original(self, micro_batch, loss_function, forward_only)
        from verl.utils import tensordict_utils as tu

        packed = tu.get_non_tensor_data(data=micro_batch, key="use_remove_padding", default=True)
        rollout, rows = recorded(micro_batch["input_ids"], micro_batch[_RECORDED], packed)
        if replay is not None:
            replay.follow(rollout, rows)
        with recorder.recording() as used:
            result = original(self, micro_batch, loss_function, forward_only)
        if forward_only or WORKER.compared:
            own = used if replay is None else dict(replay.own)
            found, other = compare_routes(rollout, own, rows), compare_routes(rollout, used, rows)
            WORKER.routes.append((found.compared, found.differ, other.differ))
        if replay is not None and forward_only:
            replay.stop()
        return result

    return forward_step


def compare_routes(rollout: Tensor, chosen: Mapping[int, Tensor], rows: Tensor) -> Any:
    """``measure.observe.compare``, loaded with torch."""
    from jetrl_patch.measure.routes import compare

    return compare(rollout, chosen, rows)


def recorded(input_ids: Any, routed_experts: Any, packed: bool) -> tuple[Tensor, Tensor]:
    """Return the rollout's routes [T, layers, k] of a micro-batch, and where their tokens are among the trainer's [T].

    Args:
        input_ids: jagged [B, length].
        routed_experts: the rollout's, jagged [B, length, layers, k]. The rollout never computed with the last token, and in
            turns of several not with what follows the last of them: these rows are zeros.
        packed: whether the trainer's tokens come one after the other, else in rows that are padded on the right.
    """
    import torch

    offsets = input_ids.offsets()
    starts, lengths = offsets[:-1].tolist(), offsets.diff().tolist()
    places = [start if packed else row * max(lengths) for row, start in enumerate(starts)]
    own = torch.cat([place + torch.arange(length - 1) for place, length in zip(places, lengths, strict=True)])
    theirs = torch.cat([start + torch.arange(length - 1) for start, length in zip(starts, lengths, strict=True)])
    rollout = routed_experts.values()[theirs.to(offsets.device)]
    own = own.to(offsets.device)
    if rollout.shape[-1] > 1:  # the experts of a token are different ones
        there = (rollout != 0).flatten(1).any(-1)
        rollout, own = rollout[there], own[there]
    return rollout, own


def metrics(reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the step's metric from the workers' reports; empty if nothing was compared."""
    parts = [report[ROUTES] for report in reports if ROUTES in report]
    compared, differ, other = (sum(part[i] for part in parts) for i in range(3))
    if not compared:
        return {}
    found = {"jetrl/route_mismatch": differ / compared, "jetrl/routes": float(compared)}
    if session.active_config().router_replay != "none":
        found["jetrl/routes_replayed"] = 1 - other / compared
    return found


def report() -> dict[str, tuple[int, int, int]]:
    """At a weight sync, report what was compared since the last one, as in ``WORKER.routes``; empty if nothing was."""
    found, WORKER.routes = WORKER.routes, []
    if not found:
        return {}
    compared, differ, other = (sum(part[i] for part in found) for i in range(3))
    return {ROUTES: (compared, differ, other)}
