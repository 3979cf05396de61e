"""top-k, top-p and min-p in verl: settings, what a server returns, which row of a micro-batch it belongs to, and whole runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from jetrl_patch.adapters.verl import logprob, support, turns
from jetrl_patch.adapters.verl.support import TEMPERATURE
from jetrl_patch.adapters.verl.yaml_settings import selector
from jetrl_patch.config import Config
from jetrl_patch.errors import AuditError
from jetrl_patch.exact.logprob import chained, edited
from jetrl_patch.exact.support import Support
from jetrl_patch.trainer.support import KEY
from tests import fp64
from tests.verl.composed import composer
from tests.verl.run_verl import A, M, R, Run, make_task
from tests.verl.test_e2e import TIMEOUT, assert_exact, finish

EXACT, LINEAR = Config(precision="fp8-unified"), Config(precision="fp8-unified", align="linear")


@pytest.fixture(scope="module")
def said() -> Iterator[Any]:
    with composer([f"{R}.name=vllm"]) as make:
        yield lambda config, *overrides: [str(error) for error in support.problems(selector(make(*overrides)), config)]


def test_what_exact_mode_needs(said: Any) -> None:
    limits = [f"{R}.top_p=0.9", f"{R}.top_k=20", f"+{R}.min_p=0.1"]
    assert said(EXACT) == said(EXACT, *limits) == []
    for supported in (f"{R}.multi_turn.enable=True", "trainer.v1.trainer_mode=colocate_async", "model_engine=megatron"):
        assert said(EXACT, *limits, supported) == []
    for override, required in (
        (f"{A}.strategy=veomni", f"{A}.strategy=fsdp, fsdp2 or megatron"),
        (f"{M}.use_fused_kernels=True", f"{M}.use_fused_kernels=False"),
        (f"+{R}.engine_kwargs.vllm.speculative_config.method=ngram", f"no {R}.engine_kwargs.vllm.speculative_config"),
        ("+async_training.partial_rollout=True", "a trainer without async_training"),
    ):
        (text,) = said(EXACT, *limits, override)
        assert text.startswith(f"verl setting {R}.top_p and verl setting {R}.top_k and verl setting {R}.min_p with precision=")
        assert f"required {required}, found top_p=0.9, top_k=20, min_p=0.1. Change that, draw from all tokens (" in text


@pytest.mark.parametrize("config", [LINEAR, Config(precision="bf16"), Config(precision="fp8-rollout")])
def test_a_correction_by_ratios_of_two_distributions_is_refused_in_every_precision(said: Any, config: Config) -> None:
    section = "algorithm.rollout_correction"
    assert said(config, f"{R}.top_p=0.9") == said(config, f"{section}.rollout_is=token") == []
    for override in ("rollout_is=token", "rollout_rs=seq_mean_k1", "bypass_mode=True"):
        (text,) = said(config, f"{R}.top_p=0.9", f"{section}.{override}")
        assert f"for the ratios of {section}, found top_p=0.9. Draw from all tokens (top_p=1, " in text
        (text,) = said(config, f"+{R}.presence_penalty=0.1", f"{section}.{override}")
        assert "found presence_penalty=0.1" in text


def test_the_plugins_own_correction_counts_too(said: Any) -> None:
    assert len(said(LINEAR.replace(correction="tis"), f"{R}.top_k=5")) == 1
    assert said(EXACT.replace(correction="tis"), f"{R}.top_k=5") == []


def test_a_server_adds_what_the_tokens_were_drawn_from() -> None:
    def returned(rows: Any, tokens: list[int]) -> dict[str, Any]:
        mask = None if rows is None else SimpleNamespace(token_ids=rows)
        output, found = SimpleNamespace(outputs=[SimpleNamespace(sampling_mask=mask, token_ids=tokens)]), {"own": 1}
        support.extract_prompt_logprobs(lambda **_: None)(output=output, num_prompt_logprobs=None, result_dict=found)
        return found

    counts, ids = returned([[3, 4], [5]], [4, 5])[KEY]
    assert counts.tolist() == [2, 1] and ids.tolist() == [3, 4, 5] and counts.dtype == ids.dtype == "int32"
    assert returned(None, [4]) == returned([[], []], [4, 5]) == {"own": 1}
    with pytest.raises(AuditError, match="found 1 of 2 tokens that are not in theirs"):
        returned([[3, 4], [5]], [4, 6])


# ---- Agent loops ---------------------------------------------------------------------------------

#: two turns that draw from few tokens, one that draws from all, and one more
TURNS: list[Any] = [([5, 6], Support.of([[5, 9], [6]])), ([7], None), ([8, 3], Support.of([[8], [3, 4]]))]


def test_turns_are_noted_beside_their_loop() -> None:
    """Two loops at once, the second of which returns two samples; a call outside a loop; no limits."""

    async def score(self: Any, outputs: Any, kwargs: Any) -> Any:
        return outputs

    def returned(tokens: list[int], drawn: Any = None) -> Any:
        return SimpleNamespace(token_ids=tokens, extra_fields={KEY: drawn.pack()} if drawn else {})

    async def call(self: Any, output: Any, sampling_params: Any) -> Any:
        await asyncio.sleep(0)
        return output

    ask, place = turns.generate(call), turns.compute_score(score)

    async def loop(self: Any, *given: Any, cut: int, temperatures: Any = (0.7, 0.7, 0.7)) -> Any:
        tokens: list[int] = []
        for one, temperature in zip(given, temperatures):
            tokens += (await ask(self, returned(*one), sampling_params={"temperature": temperature})).token_ids
        parts = [tokens[:cut], tokens[cut:]] if cut else [tokens]
        made = [SimpleNamespace(response_ids=part, response_mask=[1] * len(part), extra_fields={}) for part in parts]
        return await place(self, made, {})

    run = turns.run_agent_loop(loop)

    async def both() -> Any:
        greedy = run(None, ([4], None), cut=0, temperatures=[0])
        return await asyncio.gather(run(None, *TURNS, cut=0), run(None, *TURNS, cut=3), greedy)

    (whole,), parts, (free,) = asyncio.run(both())
    rows = [Support.unpack(one.extra_fields[KEY]) for one in (whole, *parts)]
    sizes = [one.counts.tolist() for one in rows]
    assert sizes == [[2, 1, 0, 1, 2], [2, 1, 0], [1, 2]] and KEY not in free.extra_fields
    assert [one.extra_fields[TEMPERATURE] for one in (whole, *parts, free)] == [0.7, 0.7, 0.7, 1.0]
    assert asyncio.run(ask(None, returned([4], Support.of([[4]])), sampling_params={})).extra_fields.keys() == {KEY}
    (hot,) = asyncio.run(run(None, *TURNS, cut=0, temperatures=(0.7, 0, 1.0)))
    assert TEMPERATURE not in hot.extra_fields
    with pytest.raises(AuditError, match=r"required one for all turns of a loop, found 0\.7, 1\.0"):
        support.of_rows(micro_batch(True, [None, None, None], error=hot.extra_fields[KEY]), (1, 12, 20))


@pytest.mark.parametrize("v1", [False, True])
def test_each_sample_brings_its_temperature(v1: bool) -> None:
    def given(*own: float | None, shared: Any = 0.7) -> Any:
        batch = micro_batch(v1, [None] * 3).set_non_tensor("temperature", shared)
        if v1:
            return batch.set_non_tensor("extra_fields", [{TEMPERATURE: one} for one in own])
        return batch.set_non_tensor(TEMPERATURE, list(own))

    batch = given(0.7, 1.0, 0.7)
    assert torch.equal(support.with_temperatures(batch)["temperature"], torch.tensor([0.7, 1.0, 0.7]))
    assert batch["temperature"] == 0.7
    for same in (given(0.7, 0.7, 0.7), given(0.7, None, 1.0), micro_batch(v1, DRAWN).set_non_tensor("temperature", 0.7)):
        assert support.with_temperatures(same) is same
    nobody = micro_batch(v1, DRAWN)  # verl says itself what it misses
    assert support.with_temperatures(nobody) is nobody


#: prompts of 2, 3 and 1 tokens, responses of 3, 1 and 2; the second may draw every token
DRAWN: list[Any] = [([1, 2, 1], [7, 8, 9, 6]), None, ([1, 1], [5, 4])]
PACKED = [[], [7], [8, 9], [6], [], *[[]] * 4, [5], [4], []]
PADDED = [[], [7], [8, 9], [6], [], *[[]] * 5, [5], [4], [], [], []]


def micro_batch(v1: bool, drawn: list[Any], error: str | None = None) -> Any:
    found: list[Any] = [one and tuple(torch.tensor(part, dtype=torch.int32).numpy() for part in one) for one in drawn]
    if error is not None:
        found[1] = error
    sizes = [5, 4, 3]
    data: dict[str, Any] = {"input_ids": torch.nested.nested_tensor([torch.zeros(n).long() for n in sizes], layout=torch.jagged)}
    if v1:
        responses = [torch.zeros(n).long() for n in (3, 1, 2)]
        return TensorDict(
            data | {"responses": torch.nested.nested_tensor(responses, layout=torch.jagged)}, 3
        ).set_non_tensor("extra_fields", [{KEY: one, "own": 1} for one in found])
    mask = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0]])
    rest = {"responses": torch.zeros(3, 3), "attention_mask": mask}
    return TensorDict(data | rest, 3).set_non_tensor(KEY, found)


@pytest.mark.parametrize("v1", [False, True])
@pytest.mark.parametrize(
    ("shape", "expected"),
    [((1, 12, 9), PACKED), ((12, 9), PACKED), ((1, 14, 9), [*PACKED, [], []]), ((3, 5, 9), PADDED)],
)
def test_each_row_gets_the_support_of_the_token_that_it_predicts(v1: bool, shape: Any, expected: Any) -> None:
    found = support.of_rows(micro_batch(v1, DRAWN), shape)
    assert found is not None
    assert [row.tolist() for row in found.ids.split(found.counts.tolist())] == expected


def test_a_sample_without_limits_needs_no_edit_and_one_with_too_few_is_an_error() -> None:
    for v1 in (False, True):
        assert support.of_rows(micro_batch(v1, [None] * 3), (1, 12, 20)) is None
    with pytest.raises(AuditError, match="required one for each of 2 tokens, found 1"):
        support.of_rows(micro_batch(True, [None, None, ([1], [5])]), (1, 12, 20))


def test_ranks_that_share_sequences_take_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.utils import ulysses

    whole = support.of_rows(micro_batch(True, DRAWN), (1, 14, 9))
    assert whole is not None
    monkeypatch.setattr(ulysses, "get_ulysses_sequence_parallel_world_size", lambda: 2)
    for rank, part in enumerate((whole.part(0, 7), whole.part(7, 14))):
        monkeypatch.setattr(ulysses, "get_ulysses_sequence_parallel_rank", lambda rank=rank: rank)
        found = support.of_rows(micro_batch(True, DRAWN), (1, 7, 9))
        assert found is not None and torch.equal(found.counts, part.counts) and torch.equal(found.ids, part.ids)


@pytest.mark.parametrize("shape", [(1, 12, 20), (12, 20)])
def test_the_banned_tokens_of_verl_are_left_out_too(shape: Any) -> None:
    logits, outside = torch.randn(shape), torch.arange(20) >= 18
    drawn = support.of_rows(micro_batch(True, DRAWN), shape)
    assert drawn is not None
    found = edited(logits, chained(lambda block, rows: logprob.ban(block, outside), drawn.edit)).view(12, 20)
    kept = [[*range(18)] if not row else sorted(row) for row in PACKED]
    assert [(row > -1e29).nonzero()[:, 0].tolist() for row in found] == kept
    expected = Support.of(PACKED).edit(logprob.ban(logits.view(12, 20), outside), slice(0, 12))
    assert torch.equal(found, expected)


def test_fewer_tokens_than_supports_are_a_truncated_response() -> None:
    found = support.of_rows(micro_batch(True, [([1, 1, 1, 2], [7, 8, 9, 6, 5]), None, None]), (1, 12, 20))
    assert found is not None and found.ids.tolist() == [7, 8, 9]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 100)
@pytest.mark.parametrize("v1", [False, True])
def test_runs_that_leave_out_tokens_are_exact(tmp_path: Any, v1: bool) -> None:
    """Two updates in each step, a reference model, and a pass over all samples. ReMax (V0) draws greedy samples beside them."""
    task = make_task(tmp_path)
    extra = [f"trainer.use_v1={v1}", f"{R}.top_p=0.95", f"{R}.top_k=50", f"{R}.temperature=0.7", f"{A}.use_kl_loss=True"]
    extra += [] if v1 else ["algorithm.adv_estimator=remax"]
    environ = {"JETRL_PRECISION": "fp8-unified", "JETRL_AUDIT_FRACTION": "1.0", **fp64.environ(tmp_path)}
    found = finish(Run(task, *extra, f"{A}.ppo_mini_batch_size=2", steps=3, environ=environ), 3)
    assert_exact(found)
    assert sum(step["jetrl/tokens"] for step in found) > 500
    of_updates = fp64.seen(tmp_path)
    assert of_updates.rows > 1500 and of_updates.kept < 200 and of_updates.apart < 1e-5, of_updates


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT + 100)
def test_outside_exact_mode_a_metric_says_that_two_distributions_are_compared(tmp_path: Any) -> None:
    run = Run(make_task(tmp_path), f"{R}.top_p=0.9", environ={"JETRL_PRECISION": "fp8-unified", "JETRL_ALIGN": "linear"})
    for step in finish(run):
        assert step["jetrl/support_mismatch"] == 1.0 and step["jetrl/logp_abs_diff_mean"] > 0.05
