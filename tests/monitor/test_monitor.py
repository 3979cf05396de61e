"""The monitor on a real model: what it samples, what it does with the results, and that computation is unchanged."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import jetrl_patch
from jetrl_patch.backends.quantize import dequantize_activation, quantize_activation
from jetrl_patch.config import Config
from jetrl_patch.errors import ConfigError, PrecisionError, SyncError
from jetrl_patch.fp8.linear import Fp8Linear
from jetrl_patch.measure.monitor import Monitor, Watch, below, findings, with_partners
from jetrl_patch.measure.statistics import MOST, Codes, Figures, sample
from jetrl_patch.sync.protocol import MANIFEST, Manifest
from jetrl_patch.sync.send import SyncStats
from jetrl_patch.trainer.preflight import model_problems
from jetrl_patch.trainer.source import Source, convert
from tests.models import build

LAYER = "model.layers.1.mlp.down_proj"


class Trainer:
    """A model, its source, and syncs without a receiver."""

    def __init__(self, ill: bool = False, precision: Any = "fp8-unified", **settings: Any) -> None:
        self.model = build("qwen3").float()
        if ill:
            mlp = self.model.model.layers[1].mlp
            with torch.no_grad():
                mlp.up_proj.weight[[3, 7]] *= 1e5
                mlp.down_proj.weight[:, [3, 7]] = 0
        jetrl_patch.enable(precision=precision, **settings)
        config = jetrl_patch.status().config
        assert config is not None
        shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        self.source: Source = convert(self.model, config, shapes, rollout_tp=1, device_type="cpu")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)
        self.ids = torch.randint(2, 380, (2, 40), generator=torch.Generator().manual_seed(0))

    def forward(self) -> Any:
        return self.model(input_ids=self.ids, labels=self.ids)

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.forward().loss
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def sync(self) -> tuple[dict[str, float], Manifest]:
        self.source.begin_sync(lambda: self.model.named_parameters())
        sent = dict(self.source.stream(self.model.named_parameters(), SyncStats()))
        return self.source.end_sync(), Manifest.decode(sent[MANIFEST])

    def hooks(self) -> int:
        return sum(len(m._forward_hooks) for m in self.model.modules() if isinstance(m, torch.nn.Linear))


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    yield
    jetrl_patch.disable()


def kinds(metrics: dict[str, float]) -> set[str]:
    return {name.split("/")[-1].split("_")[0] for name in metrics if name.startswith("jetrl/scale/")}


def test_sampled_are_the_first_sync_the_first_step_and_every_nth_from_there() -> None:
    trainer = Trainer(monitor_every=2)
    seen, hooks = [], []
    for _ in range(5):
        seen.append(kinds(trainer.sync()[0]))
        hooks.append(trainer.hooks())
        trainer.step()
        assert trainer.hooks() == 0, "a hook goes with the first forward that it sees"
    everything = {"weight", "activation", "gradient"}
    assert seen == [{"weight"}, everything, set(), everything, set()]
    assert hooks == [21, 0, 21, 0, 21]


def test_where_the_rollout_alone_is_fp8_its_view_is_measured() -> None:
    found, codes = [], []
    for precision in ("fp8-unified", "fp8-rollout"):
        trainer = Trainer(ill=True, precision=precision, monitor_every=3, monitor_layers=True)
        metrics = [trainer.sync()[0]]
        for _ in range(2):
            trainer.step()
            metrics.append(trainer.sync()[0])
        assert trainer.hooks() == 0 and not metrics[2]
        found.append(metrics[0])
        codes.append(metrics[1]["jetrl/scale/weight_unchanged_mean"])
        if precision == "fp8-rollout":
            assert kinds(metrics[1]) >= {"weight", "activation"} and "gradient" not in kinds(metrics[1])
            assert metrics[1]["jetrl/scale/activation_worst_layer"] == 13
            lines = trainer.source.take_lines()
            assert any(line.startswith("model.layers.1.mlp.up_proj: weight sqnr") for line in lines)
        jetrl_patch.disable()
    assert found[0] == found[1], "the same weights, the same quantizer"
    assert all(share > 0.9 for share in codes)


def test_a_guard_beside_a_tensor_parallel_rollout_is_refused() -> None:
    trainer = Trainer(monitor_every=1, guard_sqnr=20.0)
    config = jetrl_patch.status().config
    assert config is not None
    says = "required rollout tensor parallel size 1, found 2"
    with pytest.raises(ConfigError, match=says):
        convert(build("qwen3"), config, trainer.source.shapes, rollout_tp=2, device_type="cpu")
    (problem,) = model_problems(trainer.model.config, config, 2)
    assert isinstance(problem, ConfigError) and re.search(says, str(problem))
    assert not list(model_problems(trainer.model.config, config.replace(guard_sqnr=None), 2))


def test_bf16_has_nothing_to_measure() -> None:
    trainer = Trainer(precision="bf16", monitor_every=1)
    assert trainer.source.monitor is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_with_checkpointed_activations(reentrant: bool) -> None:
    trainer = Trainer(monitor_every=1)
    trainer.sync()
    trainer.model.train()
    trainer.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    trainer.model.enable_input_require_grads()
    trainer.step()
    metrics, _ = trainer.sync()
    assert kinds(metrics) == {"weight", "activation", "gradient"}
    assert metrics["jetrl/scale/gradient_sqnr_min"] > 25 and metrics["jetrl/scale/activation_sqnr_min"] > 25


def test_off_costs_nothing_and_logs_nothing() -> None:
    trainer = Trainer(monitor_every=0)
    assert trainer.source.monitor is None
    assert trainer.sync()[0] == {} and trainer.hooks() == 0


def test_the_models_results_are_the_same_bits_with_and_without() -> None:
    losses, weights = [], []
    for every in (0, 1):
        trainer = Trainer(monitor_every=every)
        trainer.sync()
        losses.append([float(trainer.step()) for _ in range(2)])
        weights.append([p.detach().clone() for p in trainer.model.parameters()])
        jetrl_patch.disable()
    assert losses[0] == losses[1]
    assert all(torch.equal(a, b) for a, b in zip(*weights))


def test_figures_of_a_layer_are_those_of_what_went_through_it() -> None:
    trainer = Trainer(monitor_every=1, monitor_layers=True)
    trainer.sync()
    seen: dict[str, torch.Tensor] = {}
    layer = trainer.model.get_submodule(LAYER)

    def spy(module: Any, arguments: Any, output: torch.Tensor) -> None:
        if not torch.is_grad_enabled():
            return
        seen["activation"] = arguments[0].detach()
        output.register_hook(lambda grad: seen.update(gradient=grad.detach()))

    layer.register_forward_hook(spy)
    with torch.no_grad():
        trainer.model(input_ids=trainer.ids[:1])  # a log-prob pass is not a training forward
    trainer.step()
    metrics, _ = trainer.sync()
    for kind, tensor in seen.items():
        x = tensor.reshape(-1, tensor.shape[-1]).bfloat16()
        y = dequantize_activation(*quantize_activation(x, "pow2")).double()
        sqnr = 10 * math.log10(x.double().square().sum() / (x.double() - y).square().sum())
        assert metrics[f"jetrl/scale/{LAYER}/{kind}_sqnr"] == pytest.approx(sqnr, rel=1e-9)
        assert metrics[f"jetrl/scale/{LAYER}/{kind}_amax"] == float(x.abs().max())
    lowest = min(
        trainer.source.layers,
        key=lambda name: min(
            metrics[f"jetrl/scale/{name}/activation_{figure}"] for figure in ("sqnr", "slice_sqnr")
        ),
    )
    assert trainer.source.layers[int(metrics["jetrl/scale/activation_worst_layer"])] == lowest


def test_codes_that_moved() -> None:
    trainer = Trainer(monitor_every=1, monitor_layers=True)
    trainer.sync()
    layer: Any = trainer.model.get_submodule(LAYER)
    before = layer.fp8.quantized(layer.weight).q.view(torch.uint8).clone()
    with torch.no_grad():
        layer.weight[:, ::2] *= -1
    metrics, _ = trainer.sync()
    after = layer.fp8.quantized(layer.weight).q.view(torch.uint8)
    assert metrics[f"jetrl/scale/{LAYER}/weight_unchanged"] == pytest.approx(float((before == after).double().mean()), abs=0.01)
    assert metrics["jetrl/scale/weight_unchanged_max"] == 1.0
    assert metrics["jetrl/scale/weight_unchanged_min"] == metrics[f"jetrl/scale/{LAYER}/weight_unchanged"] < 0.6


def test_a_sample_of_codes_is_small_and_walks_through_the_columns() -> None:
    q = torch.zeros(1024, 4096, dtype=torch.uint8)
    q[:, 5] = 1
    assert sample(torch.arange(100, dtype=torch.uint8).view(10, 10)).numel() == 100
    assert MOST // 2 < sample(q).numel() <= MOST and 0 < int(sample(q).sum()) < 40
    codes = Codes()
    assert codes.compare("a", q) is None and codes.compare("a", q) == 1.0
    assert float(codes.compare("a", 1 - q)) == 0.0  # type: ignore[arg-type]
    assert codes.compare("b", q) is None


def test_ill_layers_are_warned_of_once_by_name_figure_and_threshold() -> None:
    trainer = Trainer(ill=True, monitor_every=1)
    trainer.sync()
    first = trainer.source.take_lines()
    assert any(line.startswith("model.layers.1.mlp.up_proj: weight sqnr ") and "< 20 dB" in line for line in first)
    trainer.step()
    trainer.sync()
    second = trainer.source.take_lines()
    assert second and all(line.startswith(f"{LAYER}: activation") for line in second)
    assert trainer.source.take_lines() == []


def test_a_threshold_ends_the_run_with_an_error_that_names_it() -> None:
    trainer = Trainer(ill=True, monitor_every=1, monitor_action="stop", monitor_sqnr=25.0)
    with pytest.raises(PrecisionError, match=r"layers\.1\.mlp\.up_proj: weight sqnr \d+\.\d+ dB < 25 dB"):
        trainer.sync()


def test_the_guard_takes_ill_layers_out_with_their_partners_and_for_good() -> None:
    trainer = Trainer(ill=True, monitor_every=1, guard_sqnr=26.0, monitor_action="stop")
    mlp = trainer.model.model.layers[1].mlp
    metrics, manifest = trainer.sync()
    gate_up = ("model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj")
    assert manifest.guarded == gate_up and len(manifest.layers) == 19 and not set(manifest.layers) & set(gate_up)
    assert metrics["jetrl/guard_layers"] == 2
    for layer in (mlp.gate_proj, mlp.up_proj):
        assert not isinstance(layer, Fp8Linear) and isinstance(layer, torch.nn.Linear)
    x = torch.randn(3, 256).bfloat16()
    exact = x.double() @ mlp.gate_proj.weight.detach().bfloat16().double().t()
    assert torch.allclose(mlp.gate_proj(x).double(), exact, rtol=2**-8)
    trainer.step()
    metrics, manifest = trainer.sync()
    assert manifest.guarded == (LAYER, *gate_up) == tuple(sorted(jetrl_patch.status().guarded))
    assert metrics["jetrl/guard_layers"] == 3 and metrics["jetrl/scale/activation_worst_layer"] == 13
    for _ in range(2):
        trainer.step()
        metrics, manifest = trainer.sync()
    assert manifest.guarded == (LAYER, *gate_up) and metrics["jetrl/scale/activation_slice_sqnr_min"] > 26
    said = [line for line in trainer.source.take_lines() if line.startswith("precision guard")]
    assert len(said) == 2 and "gate_proj: fused with the others in vLLM" in said[0] and LAYER in said[1]


def test_a_layer_that_cannot_leave_fp8_is_a_sync_error_and_nothing_changes() -> None:
    trainer = Trainer(ill=True, monitor_every=1, guard_sqnr=26.0)
    up = trainer.model.model.layers[1].mlp.up_proj
    up.__class__ = type("Theirs", (Fp8Linear,), {})
    with pytest.raises(SyncError, match=r"could not take .*up_proj out of FP8: ModelError: .*up_proj is a Theirs"):
        trainer.sync()
    assert isinstance(trainer.model.model.layers[1].mlp.gate_proj, Fp8Linear)


FINE = Figures(1.0, 0.0, 0.0, 31.0, 31.0, 0.1, 0.2, 0.0)


def figures(**changes: float) -> Figures:
    return Figures(**{**vars(FINE), **changes})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, []),
        ({"sqnr": math.nan, "slice_sqnr": math.nan}, []),
        ({"slice_sqnr": 19.5}, ["a: weight sqnr 19.5 dB < 20 dB"]),
        ({"sqnr": 3.0}, ["a: weight sqnr 3 dB < 20 dB"]),
        ({"underflow": 0.25}, ["a: weight underflow 0.25 > 0.1"]),
        ({"saturated": 0.01}, ["a: weight saturated 0.01 > 0"]),
        ({"nonfinite": 2.0}, ["a: weight nonfinite 2 > 0"]),
    ],
)
def test_thresholds(changes: dict[str, float], says: list[str]) -> None:
    found = {("weight", "a"): figures(**changes), ("gradient", "b"): FINE}
    assert [line for _, line in findings(found, Config())] == says
    watch = Watch()
    assert len(watch.look(found, Config())) == len(says) and watch.look(found, Config()) == []


def test_all_ranks_decide_from_the_worst_of_all() -> None:
    """Two ranks see different micro-batches; both move the layers that either one finds below the floor."""
    layers = ["layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj", "layers.0.mlp.down_proj"]
    rng = torch.Generator().manual_seed(0)
    fine, ill = torch.randn(8, 256, generator=rng).bfloat16(), torch.randn(8, 256, generator=rng).bfloat16()
    ill[:, 9] *= 1e6
    from jetrl_patch.measure.statistics import _figures

    state: Any = build_state()
    taken, said = [], []
    everybody = [
        {("activation", name): _figures(x, state, slices=True).tolist() for name in layers}
        | {("activation", layers[2]): _figures(fine, state, slices=True).tolist()}
        for x in (fine, ill)
    ]
    for mine in everybody:
        monitor = Monitor(Config(monitor_every=1, guard_sqnr=20), layers, {}, gather=lambda _: everybody)
        monitor._observer._figures = {key: torch.tensor(values) for key, values in mine.items()}
        taken.append(monitor.begin())
        said.append(monitor.take_lines())
    assert taken == [layers[:2], layers[:2]] and said[0] == said[1] and len(said[0]) == 1


def build_state() -> Any:
    from jetrl_patch.fp8.linear import Fp8State

    return Fp8State("pow2", "torch")


def test_who_is_below_and_who_goes_along() -> None:
    layers = [f"layers.{i}.{n}_proj" for i in (0, 1) for n in ("q", "k", "v", "o", "gate", "up", "down")]
    found = {("weight", layers[1]): figures(slice_sqnr=5.0), ("gradient", layers[1]): figures(sqnr=4.0)}
    found |= {("weight", layers[9]): figures(sqnr=math.nan, slice_sqnr=math.nan), ("weight", layers[13]): figures(sqnr=9.0)}
    reasons = below(found, 10.0)
    assert reasons == {layers[1]: "weight 5.0 dB, gradient 4.0 dB", layers[13]: "weight 9.0 dB"}
    assert with_partners(reasons, layers) == [*layers[:3], layers[13]]
    assert with_partners([layers[11]], layers) == [layers[11], layers[12]]  # gate with up
