"""``measure_routes`` and ``router_replay`` in verl: a sample's routes, compared and replayed, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import jetrl_patch
from jetrl_patch.adapters.verl import routes, settings
from jetrl_patch.adapters.verl.state import WORKER
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, ModelError, VersionError
from jetrl_patch.measure.routes import compare
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
    found = compare(*split(routes.recorded(ids, jagged(theirs), packed), {n: everything[:, n] for n in (1, 3)}))
    assert (found.compared, found.differ) == (2 * (2 + 3), 1)


@pytest.fixture
def engine(request):
    """verl's wrapped ``forward_step`` around a real mixture."""
    jetrl_patch.enable(**getattr(request, "param", {"precision": "bf16", "measure_routes": True}))
    model = models.build("qwen3_moe")
    found = SimpleNamespace(engine_config=SimpleNamespace(forward_only=False), model=model)
    recorder, replay = routes.observers(found, model)
    found._jetrl = SimpleNamespace(recorder=recorder, replay=replay)
    WORKER.__init__()
    yield found
    WORKER.__init__()


REPLAYED = pytest.mark.parametrize("engine", [{"precision": "fp8-rollout", "router_replay": "R3"}], indirect=True)


def step(engine, forward_only, given=None):
    from verl.utils import tensordict_utils as tu

    ids = torch.arange(2, 14)
    tensors = {"input_ids": jagged([ids])} | ({} if given is None else {"routed_experts": jagged([given])})
    batch = tu.get_tensordict(tensors, {"use_remove_padding": True})
    wrapped = routes.forward_step(lambda self, micro_batch, loss, only: self.model(input_ids=ids[None]).logits)
    return wrapped(engine, batch, None, forward_only)


def test_only_passes_with_the_weights_that_sampled_count(engine):
    with engine._jetrl.recorder.recording() as chosen:
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


def any_routes(seed=0):
    return torch.rand(12, 3, 8, generator=torch.Generator().manual_seed(seed)).argsort(-1)[..., :3].to(torch.int16)


@REPLAYED
def test_every_pass_of_the_policy_uses_the_given_experts(engine):
    given = any_routes()
    given[-1] = 0  # as verl pads the last token, with which the rollout never computed
    WORKER.compared = True
    replayed = step(engine, True, given)
    assert torch.equal(step(engine, False, given), replayed)
    engine._jetrl.replay.stop()
    assert not torch.equal(engine.model(input_ids=torch.arange(2, 14)[None]).logits, replayed)
    (compared, differ, other), found = WORKER.routes[0], routes.metrics([routes.report()])
    assert compared == 33 and differ > 0 and other == 0
    assert found == {"jetrl/route_mismatch": differ / 33, "jetrl/routes": 66.0, "jetrl/routes_replayed": 1.0}


@REPLAYED
def test_backward_replays_what_it_computes_again(engine):
    """The gradients with activation checkpointing, which runs each block again after the step, are those without."""
    gradients = []
    for checkpointing in (False, True):
        engine.model.train().zero_grad()
        if checkpointing:
            engine.model.gradient_checkpointing_enable({"use_reentrant": False})
        step(engine, False, any_routes()).square().mean().backward()
        gradients.append({name: p.grad.clone() for name, p in engine.model.named_parameters()})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


@REPLAYED
def test_replay_needs_routes_with_every_sample(engine):
    with pytest.raises(ModelError, match=r"router_replay: required the rollout's experts .* without any\. Use an agent loop"):
        step(engine, False)


def test_one_expert_a_token_is_refused():
    jetrl_patch.enable(precision="fp8-rollout", router_replay="R3")
    found = SimpleNamespace(engine_config=SimpleNamespace(forward_only=False))
    with pytest.raises(ModelError, match=r"router_replay='R3': required two experts .* found one\. Set"):
        routes.observers(found, models.build("qwen3_moe", num_experts_per_tok=1))


def test_a_dense_model_has_none():
    jetrl_patch.enable(precision="bf16", measure_routes=True)
    found = SimpleNamespace(engine_config=SimpleNamespace(forward_only=False))
    with pytest.raises(ModelError, match=r"measure_routes=True: required a mixture .*'qwen3'\. Turn"):
        routes.observers(found, models.build("qwen3"))
    found.engine_config.forward_only = True  # the reference model
    assert routes.observers(found, models.build("qwen3")) == (None, None)


@pytest.mark.parametrize(
    ("precision", "asked"),
    [
        *((name, {"measure_routes": True}) for name in ("bf16", "fp8-rollout", "fp8-unified")),
        ("fp8-rollout", {"router_replay": "R3"}),
    ],
)
def test_the_driver_asks_the_rollout_for_its_routes(base, precision, asked):
    config, verl_config = Config(precision=precision, **asked), base()
    settings.prepare(verl_config, config)
    settings.prepare(verl_config, config)  # the trainer loop repeats it
    assert verl_config.actor_rollout_ref.rollout.enable_rollout_routing_replay is True
    left = base()
    settings.prepare(left, Config(precision=precision))
    assert left.actor_rollout_ref.rollout.enable_rollout_routing_replay is False


REFUSED = [
    ("actor_rollout_ref.model.lora_rank=8", "lora_rank"),
    ("actor_rollout_ref.model.lora.rank=8", "lora.rank"),
    ("actor_rollout_ref.model.lora_adapter_path=own", "lora_adapter_path"),
    ("actor_rollout_ref.actor.strategy=megatron", "actor.strategy"),
    ("actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 actor_rollout_ref.model.use_remove_padding=True", "ulysses"),
    ("+actor_rollout_ref.actor.fsdp_config.router_replay.mode=R3", "router_replay"),
]


ASKED = {"measure_routes=True": {"measure_routes": True}, "router_replay='R3'": {"router_replay": "R3"}}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize(("override", "path"), REFUSED)
def test_what_is_not_comparable_is_refused(base, override, path, asked):
    config, verl_config = Config(precision="fp8-rollout", **ASKED[asked]), base(*override.split())
    found = [str(problem) for problem in settings.problems(verl_config, config) if isinstance(problem, ConfigError)]
    assert any(path in text and "required" in text and ("mode" in text or asked in text) for text in found), found


@pytest.mark.parametrize("asked", ASKED)
def test_a_vllm_that_returns_no_routes_stops_the_driver(base, asked, monkeypatch):
    """The version that verl pins; with ``bf16`` vLLM's own routers choose and return."""
    monkeypatch.setattr("jetrl_patch.adapters.vllm.compat.installed_version", lambda _: "0.24.0")
    with pytest.raises(VersionError, match=rf"^{asked}: required vllm>=0\.28,<0\.31, found 0\.24\.0\. Install vllm>="):
        settings.check(base(), Config(precision="fp8-rollout", **ASKED[asked]))
    settings.check(base(), Config(precision="bf16", measure_routes=True))
    settings.check(base(), Config(precision="fp8-rollout"))


@pytest.mark.parametrize("asked", ASKED)
def test_openrlhf_does_not_carry_them(asked):
    from jetrl_patch.adapters.openrlhf.settings import problems

    args = SimpleNamespace(vllm=SimpleNamespace(num_engines=1), rollout=SimpleNamespace())
    first = next(iter(problems(args, Config(precision="fp8-rollout", **ASKED[asked]))))
    assert f"{asked}: required verl" in str(first)
