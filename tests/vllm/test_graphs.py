"""CUDA graphs of decoding steps are proven before they serve; graphs compiled under other settings are not found again.

No GPU here: a double captures and replays for vLLM's own wrapper, runner and dispatcher, in a real engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.compilation import cuda_graph
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.compilation.monitor import set_cudagraph_capturing_enabled
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import get_forward_context, override_forward_context

import jetrl_patch
from jetrl_patch import Config
from jetrl_patch.adapters.vllm import graphs
from jetrl_patch.adapters.vllm.graphs import KEY, mark_settings, prove_graphs
from jetrl_patch.errors import ConflictError, ModelError
from jetrl_patch.measure.parity import Job

#: settings that vLLM's own hash ignores, except for the first
OTHERS: tuple[dict[str, Any], ...] = (
    {"precision": "fp8-unified", "align": "linear"},
    {"precision": "fp8-rollout"},
    {"precision": "fp8-rollout", "scale_format": "fp32"},
    {"precision": "fp8-rollout", "exclude": ("down_proj",)},
    {"precision": "fp8-rollout", "rollout_granularity": "channel"},
)


def hash_with(backend: str = "triton", attention: str = "", **settings: Any) -> str:
    vllm_config = VllmConfig(additional_config={"theirs": 1})
    mark_settings(vllm_config, Config(**settings), backend, attention)
    assert isinstance(vllm_config.additional_config, dict) and vllm_config.additional_config["theirs"] == 1
    return vllm_config.compute_hash()


def test_every_setting_has_graphs_of_its_own() -> None:
    first = OTHERS[0]
    hashes = [hash_with(**other) for other in OTHERS]
    hashes += [hash_with("deep_gemm", **first), hash_with(attention="flash3", **first)]
    assert len(set(hashes)) == len(hashes) and hash_with(**first) == hashes[0]
    assert VllmConfig(additional_config={"theirs": 1}).compute_hash() not in hashes


def test_a_worker_names_its_own(checkpoint: Any, engine: Any) -> None:
    jetrl_patch.enable(precision="fp8-unified")
    llm = engine(Job(model=checkpoint("qwen2"), config=jetrl_patch.status().config))
    (report,) = llm.collective_rpc("jetrl_report", kwargs={"digests": False})
    (named,) = llm.collective_rpc(lambda worker: worker.vllm_config.additional_config[KEY])
    assert named == {**report["config"], "backend": report["backend"], "attention": report["attention"]}
    (there,) = llm.collective_rpc(lambda worker: worker.model_runner.vllm_config is worker.vllm_config)
    assert there  # whose hash names the graphs


def test_what_cannot_be_added_to_is_refused() -> None:
    with pytest.raises(ConflictError, match=r"additional_config.*required a dict.*found SimpleNamespace"):
        mark_settings(SimpleNamespace(additional_config=SimpleNamespace()), Config(), "", "")  # type: ignore[arg-type]


class Tape:
    """The model inside vLLM's wrapper: remembers how it was called last."""

    def __init__(self, model: Any) -> None:
        self.model, self.last = model, ({}, None, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, **inputs: Any) -> Any:
        output = self.model(**inputs)
        self.last = inputs, get_forward_context(), output
        return output


class Graph:
    """A captured step: a replay reads the tensors and the metadata of the capture, and writes where the capture wrote.

    ``flaw`` changes what one replay computes: called with this graph's number of tokens and its output.
    """

    flaw: Callable[[int, torch.Tensor], None]

    def __init__(self, tape: Tape) -> None:
        self.tape, self.replays = tape, 0

    def captured(self) -> None:
        self.inputs, self.context, self.output = self.tape.last

    def replay(self) -> None:
        self.replays += 1
        with override_forward_context(self.context):
            self.output.copy_(self.tape.model(**self.inputs))
        self.flaw(len(self.output), self.output)


SIZES = [1, 2, 4]


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[int, Graph]]:
    """``capture(worker, flaw)``: vLLM's own runner captures decoding steps of ``SIZES``; returns the graphs."""

    @contextmanager
    def capturing(graph: Graph, pool: Any, stream: Any) -> Iterator[None]:
        yield
        graph.captured()

    def capture(worker: Any, flaw: Any = lambda size, output: None) -> dict[int, Graph]:
        runner, tape = worker.model_runner, Tape(worker.model_runner.model)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(tape))
        monkeypatch.setattr(torch.cuda, "graph", capturing)
        monkeypatch.setattr(Graph, "flaw", staticmethod(flaw), raising=False)
        for name in ("current_stream", "set_graph_pool_id"):
            monkeypatch.setattr(cuda_graph, name, lambda *_: None)
        monkeypatch.setattr(cuda_graph, "weak_ref_tensors", lambda tensors: tensors)
        monkeypatch.setattr(type(cuda_graph.current_platform), "graph_pool_handle", lambda self: object(), raising=False)
        worker.model_config.enforce_eager = False
        settings = runner.compilation_config
        settings.cudagraph_mode, settings.cudagraph_capture_sizes = CUDAGraphMode.FULL_DECODE_ONLY, SIZES
        settings.max_cudagraph_capture_size = SIZES[-1]
        runner.cudagraph_dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_DECODE_ONLY)
        for builder in (group.get_metadata_builder() for groups in runner.attn_groups for group in groups):
            if hasattr(builder, "use_full_cuda_graph"):
                builder.use_full_cuda_graph = True  # as with these settings from the start
        runner.model = wrapper = CUDAGraphWrapper(tape, runner.vllm_config, CUDAGraphMode.FULL)
        set_cudagraph_capturing_enabled(True)
        for size in reversed(SIZES):
            full = {"cudagraph_runtime_mode": CUDAGraphMode.FULL, "uniform_decode": True, "is_graph_capturing": True}
            runner._dummy_run(size, skip_eplb=True, remove_lora=False, **full)
        set_cudagraph_capturing_enabled(False)
        return {key.num_tokens: entry.cudagraph for key, entry in wrapper.concrete_cudagraph_entries.items()}

    return capture


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the engine logs. vLLM keeps its loggers from pytest's."""
    lines: list[str] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(graphs.formats.logger, level, lambda words, *values: lines.append(words % values))
    return lines


def worker_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def greedy(llm: Any) -> list[tuple[list[int], list[float]]]:
    """Prompts of different lengths, which end at different steps: batches of 4, 3 (padded to 4), 2 and 1.

    The last prompt begins when the first answer has ended, in a step of single tokens, like a decoding one.
    """
    from vllm import SamplingParams

    prompts = [list(range(5, 5 + length)) for length in (3, 40, 7, 21, 1)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=tokens, logprobs=0, ignore_eos=True, detokenize=False)
        for tokens in (12, 9, 6, 3, 4)
    ]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    done = [output.outputs[0] for output in outputs]
    return [(list(o.token_ids), [e[t].logprob for e, t in zip(o.logprobs, o.token_ids)]) for o in done]


@pytest.mark.e2e
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "qwen3_next"])
def test_graphs_that_are_proven_serve_with_the_bits_of_eager_steps(
    family: str, checkpoint: Any, engine: Any, capture: Callable[..., dict[int, Graph]], said: list[str]
) -> None:
    jetrl_patch.enable(precision="fp8-unified")
    llm = engine(Job(model=checkpoint(family), config=jetrl_patch.status().config, batch=4))
    worker, eager = worker_of(llm), greedy(llm)
    captured = capture(worker)
    assert sorted(captured) == SIZES and not any(graph.replays for graph in captured.values())
    prove_graphs(worker)
    assert "the CUDA graphs of 3 decoding steps have the bits of the eager steps" in said[-1]
    assert [graph.replays for graph in captured.values()] == [2 if family == "qwen3_next" else 1] * 3  # the second from a state
    assert isinstance(worker.model_runner.model, CUDAGraphWrapper) and not worker.model_config.enforce_eager
    for cache in worker.model_runner.kv_caches:  # as before the trial
        assert not any(part.any() for part in ([cache[0]] if isinstance(cache, torch.Tensor) else cache))
    assert greedy(llm) == eager
    assert all(graph.replays > 1 for graph in captured.values())


def one_bit(size: int, output: torch.Tensor) -> None:
    if size == 2:
        output.view(torch.int16)[1, 7] ^= 1


@pytest.mark.e2e
@pytest.mark.parametrize("way", ["non_spec_state_indices_tensor", "has_initial_state", "what the first step leaves"])
def test_a_graph_with_other_states_never_serves(
    way: str, checkpoint: Any, engine: Any, capture: Callable[..., dict[int, Graph]], said: list[str]
) -> None:
    jetrl_patch.enable(precision="fp8-unified")
    llm = engine(Job(model=checkpoint("qwen3_next"), config=jetrl_patch.status().config, batch=4))
    worker, eager = worker_of(llm), greedy(llm)
    net = worker.model_runner.get_model().model.layers[0].linear_attn

    def disturb(size: int, output: torch.Tensor) -> None:
        if size == 2:
            net.kv_cache[0][1] += 1.0

    captured = capture(worker, disturb if way.startswith("what") else lambda size, output: None)
    if not way.startswith("what"):
        for step in captured[2].context.attn_metadata.values():
            if hasattr(step, way):
                setattr(step, way, getattr(step, way).clone())
    prove_graphs(worker)
    assert said[-1].endswith("of 3, those for [2] tokens differ from the eager step (rank 0)")
    assert greedy(llm) == eager


@pytest.mark.e2e
@pytest.mark.parametrize("way", ["one bit of one graph", "an input that was baked in", "another rank"])
def test_a_graph_with_other_bits_never_serves(
    way: str,
    checkpoint: Any,
    engine: Any,
    capture: Callable[..., dict[int, Graph]],
    monkeypatch: pytest.MonkeyPatch,
    said: list[str],
) -> None:
    jetrl_patch.enable(precision="fp8-unified")
    llm = engine(Job(model=checkpoint("qwen3"), config=jetrl_patch.status().config, batch=4))
    worker, eager = worker_of(llm), greedy(llm)
    captured = capture(worker, one_bit if way == "one bit of one graph" else lambda size, output: None)
    words = "those for [2] tokens differ from the eager step (rank 0)"
    if way == "another rank":
        monkeypatch.setattr(graphs, "gathered", lambda mine: [mine, [4]])
        words = "those for [4] tokens differ from the eager step (rank 1)"
    elif way == "an input that was baked in":
        captured[2].inputs["positions"] = captured[2].inputs["positions"].clone()
    said.clear()
    prove_graphs(worker)
    (line,) = said
    assert line == f"jetrl_patch: decoding runs eagerly, without CUDA graphs: of 3, {words}"
    assert worker.model_config.enforce_eager and not worker.model_runner.model.concrete_cudagraph_entries
    assert worker.vllm_config.compilation_config.cudagraph_mode == CUDAGraphMode.NONE
    assert greedy(llm) == eager
    assert [graph.replays for graph in captured.values()] == [1, 1, 1]  # in the trial
    prove_graphs(worker)
    assert [graph.replays for graph in captured.values()] == [1, 1, 1]


@pytest.mark.parametrize(("setting", "falls_back"), [("auto", True), (True, False)])
def test_experts_in_bf16_keep_an_engine_eager(
    setting: Any, falls_back: bool, monkeypatch: pytest.MonkeyPatch, checkpoint: Any, engine: Any
) -> None:
    """They run one by one, as many as have tokens: no graph can hold that. Only ``decode_graphs=True`` makes it an error."""
    from jetrl_patch.adapters.vllm import worker

    why: list[str] = []

    def refuse(model: Any, eager: bool) -> None:
        raise ModelError("BF16 experts")

    monkeypatch.setattr(worker, "check_eager", refuse)
    monkeypatch.setattr(worker, "run_eagerly", lambda worker, reason: why.append(reason))
    jetrl_patch.enable(precision="fp8-unified", decode_graphs=setting)
    job = Job(model=checkpoint("qwen3"), config=jetrl_patch.status().config)
    if falls_back:
        engine(job)
        assert why == ["BF16 experts"]
    else:
        with pytest.raises(ModelError, match="BF16 experts"):
            engine(job)


def test_the_proof_runs_where_vllm_has_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu_worker import Worker

    done: list[Any] = []
    original = Worker.compile_or_warm_up_model
    monkeypatch.setattr(Worker, "compile_or_warm_up_model", lambda self: done.append("captured") or 7)
    monkeypatch.setattr(graphs, "prove_graphs", lambda worker: done.append("proven"))
    jetrl_patch.enable(precision="fp8-unified")
    assert Worker.compile_or_warm_up_model(object()) == 7 and done == ["captured", "proven"]
    jetrl_patch.disable()
    for settings in ({"decode_graphs": False}, {"align": "linear"}, {"guard_sqnr": 20.0}):
        jetrl_patch.enable(precision="fp8-unified", **settings)
        done.clear()
        assert Worker.compile_or_warm_up_model(object()) == 7 and done == ["captured"]
        jetrl_patch.disable()
    assert original is not None
