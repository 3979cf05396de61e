"""``measure_routes`` in verl: the routes of a sample against those of verl's own engine, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import jetrl_patch
from jetrl_patch.adapters.verl import routes, settings
from jetrl_patch.adapters.verl.state import WORKER
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, ModelError
from tests import models

LENGTHS, LAYERS, K = (3, 5), 4, 2


def jagged(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def split(found, chosen):
    return found[0], chosen, found[1]


@pytest.mark.parametrize("packed", [True, False])
def test_routes_are_found_where_the_tokens_are(packed):
    """Layers 1 and 3 have experts. The last token of a sample, and what is zero in all layers, is not compared."""
    generator = torch.Generator().manual_seed(0)
    own = [torch.rand(n, LAYERS, 8, generator=generator).argsort(-1)[..., :K] for n in LENGTHS]
    theirs = [rows.flip(-1).to(torch.int16) for rows in own]
    for rows in theirs:
        rows[-1] = 0
    theirs[1][3] = 0  # after the last turn of the rollout
    theirs[0][1, 3, 0] = (set(range(8)) - set(own[0][1, 3].tolist())).pop()
    width = max(LENGTHS)
    padded = own if packed else [torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, width - len(rows))) for rows in own]
    everything = torch.cat([*padded, torch.zeros(2 if packed else 0, LAYERS, K, dtype=torch.long)])  # verl pads packed rows too
    ids = jagged([torch.arange(n) for n in LENGTHS])
    found = routes.compare_routes(*split(routes.recorded(ids, jagged(theirs), packed), {n: everything[:, n] for n in (1, 3)}))
    assert (found.compared, found.differ) == (2 * (2 + 3), 1)


@pytest.fixture
def engine():
    """verl's wrapped ``forward_step`` around a real mixture."""
    jetrl_patch.enable(precision="bf16", measure_routes=True)
    model = models.build("qwen3_moe")
    found = SimpleNamespace(engine_config=SimpleNamespace(forward_only=False), model=model)
    routes.attach(found, model)
    WORKER.__init__()
    yield found
    WORKER.__init__()


def step(engine, forward_only, given=None):
    from verl.utils import tensordict_utils as tu

    ids = torch.arange(2, 14)
    tensors = {"input_ids": jagged([ids])} | ({} if given is None else {"routed_experts": jagged([given])})
    batch = tu.get_tensordict(tensors, {"use_remove_padding": True})
    wrapped = routes.forward_step(lambda self, micro_batch, loss, only: self.model(input_ids=ids[None]).logits)
    return wrapped(engine, batch, None, forward_only)


def test_only_passes_with_the_weights_that_sampled_count(engine):
    with engine._jetrl_routes.recording() as chosen:
        engine.model(input_ids=torch.arange(2, 14)[None])
    given = torch.stack([chosen[layer] for layer in range(3)], 1)
    wrong = given.clone()
    wrong[0, 0] = torch.tensor([i for i in range(8) if i not in given[0, 0]][:3])
    assert torch.equal(step(engine, True), step(engine, True, given))
    assert routes.report() == {routes.ROUTES: (33, 0, 0)} and routes.report() == {}
    step(engine, False, wrong)  # an update whose loss compared nothing
    assert routes.report() == {}
    WORKER.compared = True
    step(engine, False, wrong)
    assert routes.metrics([routes.report(), {routes.ROUTES: (33, 0, 0)}, {}]) == {
        "jetrl/route_mismatch": 1 / 66,
        "jetrl/routes": 66.0,
    }
    assert routes.metrics([{}]) == {}


def test_a_dense_model_has_none():
    jetrl_patch.enable(precision="bf16", measure_routes=True)
    found = SimpleNamespace(engine_config=SimpleNamespace(forward_only=False))
    with pytest.raises(ModelError, match=r"measure_routes=True: required a mixture .*'qwen3'\. Ask"):
        routes.attach(found, models.build("qwen3"))
    found.engine_config.forward_only = True  # the reference model
    routes.attach(found, models.build("qwen3"))
    assert not hasattr(found, "_jetrl_routes")


@pytest.mark.parametrize("precision", ["bf16", "fp8-rollout", "fp8-unified"])
def test_the_driver_asks_the_rollout_for_its_routes(base, precision):
    config, verl_config = Config(precision=precision, measure_routes=True), base()
    settings.prepare(verl_config, config)
    settings.prepare(verl_config, config)  # the trainer loop repeats it
    assert verl_config.actor_rollout_ref.rollout.enable_rollout_routing_replay is True
    left = base()
    settings.prepare(left, Config(precision=precision))
    assert left.actor_rollout_ref.rollout.enable_rollout_routing_replay is False


REFUSED = [
    ("actor_rollout_ref.model.lora_rank=8", "lora_rank"),
    ("actor_rollout_ref.actor.strategy=megatron", "actor.strategy"),
    ("actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 actor_rollout_ref.model.use_remove_padding=True", "ulysses"),
    ("+actor_rollout_ref.actor.fsdp_config.router_replay.mode=R3", "router_replay"),
]


@pytest.mark.parametrize(("override", "path"), REFUSED)
def test_what_is_not_comparable_is_refused(base, override, path):
    config, verl_config = Config(precision="fp8-rollout", measure_routes=True), base(*override.split())
    found = [str(problem) for problem in settings.problems(verl_config, config) if isinstance(problem, ConfigError)]
    assert any(path in text and "required" in text for text in found), found


def test_openrlhf_does_not_carry_them():
    from jetrl_patch.adapters.openrlhf.settings import problems

    args = SimpleNamespace(vllm=SimpleNamespace(num_engines=1), rollout=SimpleNamespace())
    first = next(iter(problems(args, Config(precision="bf16", measure_routes=True))))
    assert "measure_routes=True: required verl" in str(first)
