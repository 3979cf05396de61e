"""``measure_routes`` and ``router_replay``: compare the rollout's routes with the trainer's, or replay them.

With verl's R3 (``rollout.enable_rollout_routing_replay``) vLLM returns each token's experts, as ``routed_experts`` of a sample.
They reach the training workers, but verl 0.9.1's FSDP engine ignores them. The plugin compares them in every forward pass with
the weights that sampled: the pass for old log-probs or, without it, the first update. With ``router_replay`` every forward pass
of the policy uses them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jetrl_patch import session
from jetrl_patch.adapters.verl.state import RECORD, WORKER
from jetrl_patch.errors import ModelError, explain
from jetrl_patch.patching.patch import replacement
from jetrl_patch.trainer.rules import route_setting

if TYPE_CHECKING:
    from torch import Tensor

    from jetrl_patch.measure.routes import Recorder, Replay

#: key in a worker's report -> the sums of ``WORKER.routes``
ROUTES = "routes"

_RECORDED = "routed_experts"


def observers(engine: Any, module: Any) -> tuple[Recorder | None, Replay | None]:
    """Return what records and what replays the routes of the policy's model, which verl has not wrapped yet.

    Raises ModelError for a dense model and, with ``router_replay``, for a model with one expert per token.
    """
    config = session.active_config()
    if not config.returns_routes or engine.engine_config.forward_only:
        return None, None
    from jetrl_patch.fp8.convert import expert_modules
    from jetrl_patch.measure.routes import Recorder, Replay

    if not expert_modules(module):
        required, found = "a mixture of experts that the plugin supports", f"model_type={module.config.model_type!r}"
        raise ModelError(explain(route_setting(config), required=required, found=found, fix="turn routes off"))
    replay = None
    if config.router_replay != "none":
        if module.config.get_text_config().num_experts_per_tok == 1:
            required = "two experts per token or more, because verl writes expert 0 where the rollout recorded none"
            raise ModelError(explain(route_setting(config), required=required, found="one", fix="set router_replay='none'"))
        replay = Replay(module)
    return Recorder(module), replay


@replacement
def forward_step(original: Any, self: Any, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
    """Wrap ``FSDPEngineWithLMHead.forward_step``: compare a micro-batch's routes with the rollout's, or replay those.

    After a training step the replay stays on, because the backward pass may run the forward pass again. Only an update whose loss
    compared log-probs is compared: later updates have other weights than the rollout.
    """
    prepared = RECORD.get(self)
    if prepared is None or prepared.recorder is None:
        return original(self, micro_batch, loss_function, forward_only)
    recorder, replay = prepared.recorder, prepared.replay
    if micro_batch.get(_RECORDED, None) is None:
        if replay is not None:
            required, fix = "the rollout's experts with every sample", "use an agent loop that returns routed_experts"
            raise ModelError(explain("router_replay", required=required, found="a micro-batch without any", fix=fix))
        return original(self, micro_batch, loss_function, forward_only)
    from verl.utils import tensordict_utils as tu

    from jetrl_patch.measure.routes import compare

    packed = tu.get_non_tensor_data(data=micro_batch, key="use_remove_padding", default=True)
    rollout, rows = recorded(micro_batch["input_ids"], micro_batch[_RECORDED], packed)
    if replay is not None:
        replay.follow(rollout, rows)
    with recorder.recording() as used:
        result = original(self, micro_batch, loss_function, forward_only)
    if forward_only or WORKER.compared:
        own = used if replay is None else dict(replay.own)
        found, other = compare(rollout, own, rows), compare(rollout, used, rows)
        WORKER.routes.append((found.compared, found.differ, other.differ))
    if replay is not None and forward_only:
        replay.stop()
    return result


def recorded(input_ids: Any, routed_experts: Any, packed: bool) -> tuple[Tensor, Tensor]:
    """Return the rollout's routes [T, layers, k] of a micro-batch, and the index [T] of each token among the trainer's.

    Args:
        input_ids: jagged [B, length].
        routed_experts: the rollout's routes, jagged [B, length, layers, k]. A row of zeros belongs to a token that the rollout
            never fed to the model: the last one and, in a multi-turn sample, those after the last generated turn.
        packed: True if the trainer's tokens are packed in one row, False if each sample has a row padded on the right.
    """
    import torch

    offsets = input_ids.offsets()
    starts, lengths = offsets[:-1].tolist(), offsets.diff().tolist()
    firsts = [start if packed else row * max(lengths) for row, start in enumerate(starts)]
    own = torch.cat([first + torch.arange(length - 1) for first, length in zip(firsts, lengths, strict=True)])
    theirs = torch.cat([start + torch.arange(length - 1) for start, length in zip(starts, lengths, strict=True)])
    rollout = routed_experts.values()[theirs.to(offsets.device)]
    own = own.to(offsets.device)
    if rollout.shape[-1] > 1:  # a recorded token has k different experts, so not only zeros
        recorded_ones = (rollout != 0).flatten(1).any(-1)
        rollout, own = rollout[recorded_ones], own[recorded_ones]
    return rollout, own


def metrics(reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the step's metrics from the workers' reports; empty if nothing was compared."""
    parts = [report[ROUTES] for report in reports if ROUTES in report]
    compared, differ, other = (sum(part[i] for part in parts) for i in range(3))
    if not compared:
        return {}
    found = {"jetrl/route_mismatch": differ / compared, "jetrl/routes": float(compared)}
    if session.active_config().router_replay != "none":
        found["jetrl/routes_replayed"] = 1 - other / compared
    return found


def report() -> dict[str, tuple[int, int, int]]:
    """At a weight sync, report the sums of ``WORKER.routes`` since the last one; empty if nothing was compared."""
    found, WORKER.routes = WORKER.routes, []
    if not found:
        return {}
    compared, differ, other = (sum(part[i] for part in found) for i in range(3))
    return {ROUTES: (compared, differ, other)}
