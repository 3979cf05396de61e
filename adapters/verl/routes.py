"""``measure_routes``: of a mixture of experts, the share of routes in which verl's trainer differs from its rollout.

verl's R3 has vLLM return the experts of each token, as ``routed_experts`` of a sample
(``rollout.enable_rollout_routing_replay``). They travel to the training workers whether or not an engine replays them; verl
0.9.1's FSDP engine ignores them. Here each forward pass that runs with the weights that sampled is compared with them: the pass
for old log-probs, or without it the first update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jetrl_patch import runtime
from jetrl_patch.adapters.verl.routes_settings import BESIDE
from jetrl_patch.adapters.verl.state import WORKER
from jetrl_patch.errors import ModelError, explain
from jetrl_patch.gate import while_config

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ROUTES", "attach", "forward_step", "metrics", "report"]

#: key of what was compared in a worker's report: routes, and how many differ
ROUTES = "routes"

_RECORDED = "routed_experts"


def attach(engine: Any, module: Any) -> None:
    """Let the policy's engine record the routes of its model, which is not wrapped yet. Raises ModelError for a dense model."""
    if not runtime.active_config().measure_routes or engine.engine_config.forward_only:
        return
    from jetrl_patch.fp8.expert_layers import expert_modules
    from jetrl_patch.monitor.routes import Recorder

    if not expert_modules(module):
        required, found = "a mixture of experts that the plugin knows", f"model_type={module.config.model_type!r}"
        raise ModelError(explain(BESIDE, required=required, found=found, fix="drop measure_routes"))
    engine._jetrl_routes = Recorder(module)


@while_config(lambda config: config.measure_routes)
def forward_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``FSDPEngineWithLMHead.forward_step``: compare the routes of a micro-batch with those of its samples.

    An update counts if its loss compared log-probs as well: later ones have other weights than the rollout.
    """

    def forward_step(self: Any, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        recorder = getattr(self, "_jetrl_routes", None)
        if recorder is None or micro_batch.get(_RECORDED, None) is None:
            return original(self, micro_batch, loss_function, forward_only)
        with recorder.recording() as chosen:
            result = original(self, micro_batch, loss_function, forward_only)
        if forward_only or WORKER.compared:
            from verl.utils import tensordict_utils as tu

            packed = tu.get_non_tensor_data(data=micro_batch, key="use_remove_padding", default=True)
            WORKER.routes.append(compared(micro_batch["input_ids"], micro_batch[_RECORDED], chosen, packed))
        return result

    return forward_step


def compared(input_ids: Any, routed_experts: Any, chosen: Mapping[int, Tensor], packed: bool) -> tuple[int, int]:
    """Compare the routes of a micro-batch; return how many there are, and how many differ.

    Args:
        input_ids: jagged [B, length].
        routed_experts: the rollout's, jagged [B, length, layers, k]. The rollout never computed with the last token, and in
            turns of several not with what follows the last of them: these rows are zeros.
        chosen: number of a layer -> the trainer's experts, [N, k] of the tokens one after the other if ``packed``, else of rows
            that are padded on the right.
    """
    import torch

    from jetrl_patch.monitor.routes import compare

    offsets = input_ids.offsets()
    starts, lengths = offsets[:-1].tolist(), offsets.diff().tolist()
    places = [start if packed else row * max(lengths) for row, start in enumerate(starts)]
    own = torch.cat([place + torch.arange(length - 1) for place, length in zip(places, lengths, strict=True)])
    theirs = torch.cat([start + torch.arange(length - 1) for start, length in zip(starts, lengths, strict=True)])
    rollout = routed_experts.values()[theirs.to(offsets.device)]
    own = own.to(offsets.device)
    if rollout.shape[-1] > 1:  # the experts of a token are different ones
        recorded = (rollout != 0).flatten(1).any(-1)
        rollout, own = rollout[recorded], own[recorded]
    found = compare(rollout, chosen, own)
    return found.compared, found.differ


def metrics(reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the step's metric from the workers' reports; empty if nothing was compared."""
    parts = [report[ROUTES] for report in reports if ROUTES in report]
    compared, differ = (sum(part[i] for part in parts) for i in (0, 1))
    return {"jetrl/route_mismatch": differ / compared, "jetrl/routes": float(compared)} if compared else {}


def report() -> dict[str, tuple[int, int]]:
    """At a weight sync, report what was compared since the last one: routes, and how many differ; empty if nothing was."""
    found, WORKER.routes = WORKER.routes, []
    return {ROUTES: (sum(compared for compared, _ in found), sum(differ for _, differ in found))} if found else {}
