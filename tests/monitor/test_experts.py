"""The monitor and the guard on a real mixture: the experts of a block count as one layer, and the worst expert is named."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import jetrl_patch
from jetrl_patch.backends.quantize import dequantize_activation, dequantize_weight, quantize_activation, quantize_weight
from jetrl_patch.errors import PrecisionError, SyncError
from jetrl_patch.fp8.convert import experts_of, per_expert
from jetrl_patch.measure.monitor import Watch
from jetrl_patch.measure.statistics import MOST
from jetrl_patch.sync.protocol import MANIFEST, Manifest
from jetrl_patch.sync.send import SyncStats
from jetrl_patch.trainer.source import Source, convert
from tests.models import build

UNIT = "model.layers.1.mlp.experts"
#: the expert whose up has two rows of 1e5; what they feed is cut off behind it
ILL = f"{UNIT}.5.up_proj"


class Trainer:
    """A mixture of 8 experts, 3 a token, in three blocks; syncs without a receiver."""

    def __init__(self, ill: bool = False, precision: Any = "fp8-unified", **settings: Any) -> None:
        self.model = build("qwen3_moe").float()
        if ill:
            experts = self.model.model.layers[1].mlp.experts
            with torch.no_grad():
                experts.gate_up_proj[5, 128:][[3, 7]] *= 1e5
                experts.down_proj[5][:, [3, 7]] = 0
        jetrl_patch.enable(precision=precision, monitor_every=1, **settings)
        config = jetrl_patch.status().config
        assert config is not None
        shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        self.source: Source = convert(self.model, config, shapes, rollout_tp=1, device_type="cpu")
        self.ids = torch.randint(2, 380, (2, 40), generator=torch.Generator().manual_seed(0))

    def step(self) -> torch.Tensor:
        self.model.zero_grad()
        loss = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def sync(self) -> tuple[dict[str, float], Manifest]:
        self.source.begin_sync(lambda: self.model.named_parameters())
        sent = dict(self.source.stream(self.model.named_parameters(), SyncStats()))
        return self.source.end_sync(), Manifest.decode(sent[MANIFEST])


@pytest.fixture(autouse=True)
def off() -> Iterator[None]:
    yield
    jetrl_patch.disable()


def db(x: torch.Tensor, y: torch.Tensor) -> float:
    error, signal = (x.double() - y.double()).square(), x.double().square()
    slices = []
    for axis in (0, 1):
        ratios = [e / v for e, v in zip(error.sum(axis).tolist(), signal.sum(axis).tolist(), strict=True) if v]
        slices.append(-10 * math.log10(sum(ratios) / len(ratios)))
    return min(-10 * math.log10(error.sum() / signal.sum()), *slices)


def test_the_worst_expert_is_found_and_named() -> None:
    trainer = Trainer(ill=True, monitor_layers=True)
    metrics, _ = trainer.sync()
    found = {}
    for name, weight in trainer.model.named_parameters():
        for own, matrix in per_expert(name, weight.detach().bfloat16()):
            if own.startswith(f"{UNIT}."):
                found[own.removesuffix(".weight")] = db(matrix, dequantize_weight(*quantize_weight(matrix, "pow2")))
    assert len(found) == 8 * 3 and min(found, key=lambda name: found[name]) == ILL and found[ILL] < 15
    ours = min(metrics[f"jetrl/scale/{UNIT}/weight_{figure}"] for figure in ("sqnr", "slice_sqnr"))
    assert ours == pytest.approx(found[ILL], rel=1e-9)
    assert metrics[f"jetrl/scale/{UNIT}/weight_worst_expert"] == metrics["jetrl/scale/weight_worst_expert"] == 5
    units = trainer.source.monitor.layers  # type: ignore[union-attr]
    assert {units[int(metrics[f"jetrl/scale/weight_worst_{what}"])] for what in ("experts", "layer")} == {UNIT}
    lines = trainer.source.take_lines()
    assert lines[0] == f"{ILL}: weight sqnr {found[ILL]:.4g} dB < 20 dB"
    assert all(line.startswith(f"{ILL}: weight ") for line in lines)
    trainer.sync()
    assert trainer.source.take_lines() == []


@pytest.mark.parametrize("precision", ["fp8-unified", "fp8-rollout"])
def test_the_number_of_metrics_and_of_transfers_does_not_grow_with_the_experts(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(precision=precision, monitor_layers=True)
    trainer.sync()
    trainer.step()
    trainer.source.begin_sync(lambda: trainer.model.named_parameters())
    list(trainer.source.stream(trainer.model.named_parameters(), SyncStats()))
    reads: list[str] = []
    for name in ("tolist", "item", "__float__", "__int__", "__bool__", "cpu"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda *a, name=name, original=original: (reads.append(name), original(*a))[1])
    metrics = trainer.source.end_sync()
    assert reads == ["tolist", "tolist"]  # figures, and shares of codes
    units = trainer.source.monitor.layers  # type: ignore[union-attr]
    assert len(units) == 3 * (4 + 1) and units[4] == "model.layers.0.mlp.experts"
    per_layer = {name.rpartition("/")[0] for name in metrics if ".layers." in name}
    assert per_layer == {f"jetrl/scale/{unit}" for unit in units}
    kinds = 3 if precision == "fp8-unified" else 2
    assert len(metrics) <= kinds * (8 + 1) * len(units) + len(units) + kinds * 14 + 3
    of_experts = {name.rpartition("/")[2] for name in metrics if name.startswith(f"jetrl/scale/{UNIT}/")}
    wanted = {"weight_sqnr", "activation_sqnr", "weight_unchanged", "weight_worst_expert", "activation_worst_expert"}
    assert wanted | ({"gradient_sqnr"} if kinds == 3 else set()) <= of_experts
    assert metrics["jetrl/scale/weight_unchanged_min"] == 1.0


def test_codes_of_a_block_are_as_many_as_of_a_layer() -> None:
    trainer = Trainer()
    trainer.sync()
    monitor: Any = trainer.source.monitor
    kept = [codes.numel() for name, codes in monitor._codes._last.items() if name.startswith(f"{UNIT}.")]
    assert len(kept) == 8 * 3 and MOST // 4 < sum(kept) <= MOST
    with torch.no_grad():
        trainer.model.model.layers[1].mlp.experts.down_proj.mul_(-1)  # a third of the matrices
    metrics, _ = trainer.sync()
    assert metrics["jetrl/scale/weight_unchanged_min"] == pytest.approx(2 / 3, abs=0.01)


def test_activations_and_gradients_are_those_that_the_products_read() -> None:
    """Against FP64, from the operands that the test forms itself, expert by expert."""
    trainer = Trainer(monitor_layers=True)
    trainer.sync()
    experts, seen = trainer.model.model.layers[1].mlp.experts, {}
    own: Any = experts_of(experts)

    def see(module: Any, arguments: Any, output: torch.Tensor) -> None:
        seen.update(zip(("x", "ids", "weights"), (t.detach() for t in arguments), strict=True))
        if torch.is_grad_enabled():
            output.register_hook(lambda grad: seen.update(dy=grad.detach()))

    experts.register_forward_hook(see)
    with torch.no_grad():
        trainer.model(input_ids=trainer.ids, use_cache=False)  # no step: it is not measured
    trainer.step()
    metrics, _ = trainer.sync()
    operands: dict[str, dict[str, torch.Tensor]] = {"activation": {}, "gradient": {}}
    for expert in range(8):
        token, _ = (seen["ids"] == expert).nonzero(as_tuple=True)
        w = own.quantized(expert, experts.gate_up_proj, experts.down_proj)
        x, dy = (seen[name].reshape(-1, 256)[token].bfloat16() for name in ("x", "dy"))
        a, b = (own.backend.fprop(x, m) for m in (w.gate, w.up))
        operands["activation"] |= {f"{expert}.gate_proj": x, f"{expert}.down_proj": (F.silu(a.float()).bfloat16() * b)}
        operands["gradient"][f"{expert}.down_proj"] = dy
    for kind, of_kind in operands.items():
        found = {}
        for name, value in of_kind.items():
            y = dequantize_activation(*quantize_activation(value, "pow2")).double()
            error, signal = (value.double() - y).square().sum(), value.double().square().sum()
            found[name] = -10 * math.log10(error / signal)
        lowest = min(found.values())
        ours = metrics[f"jetrl/scale/{UNIT}/{kind}_sqnr"]
        if kind == "activation":
            assert ours == pytest.approx(lowest, rel=1e-9)
            assert metrics[f"jetrl/scale/{UNIT}/{kind}_amax"] == max(float(v.abs().max()) for v in of_kind.values())
        else:  # gate and up have gradients too
            assert 25 < ours <= lowest * (1 + 1e-9)
            assert metrics[f"jetrl/scale/{UNIT}/{kind}_amax"] >= max(float(v.abs().max()) for v in of_kind.values())


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_the_models_results_are_the_same_bits_with_and_without(reentrant: bool | None) -> None:
    found = []
    for layers in (True, False):
        trainer = Trainer(monitor_layers=layers)
        if not layers:
            trainer.source.monitor = None
        trainer.model.train()
        if reentrant is not None:
            trainer.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            trainer.model.enable_input_require_grads()
        trainer.sync()
        loss = trainer.step()
        metrics, _ = trainer.sync()
        assert not layers or {f"jetrl/scale/{UNIT}/{kind}_sqnr" for kind in ("activation", "gradient")} <= set(metrics)
        found.append([loss, *(p.grad.clone() for p in trainer.model.parameters())])
        jetrl_patch.disable()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_threshold_ends_the_run_with_an_error_that_names_the_expert() -> None:
    trainer = Trainer(ill=True, monitor_action="stop")
    with pytest.raises(PrecisionError, match=rf"statistics cross their thresholds: {ILL}: weight sqnr \d+\.\d+ dB < 20 dB"):
        trainer.sync()


def test_another_expert_of_the_same_block_is_not_told_again() -> None:
    from jetrl_patch.config import Config
    from jetrl_patch.measure.statistics import Figures

    watch = Watch()
    for number, new in ((4, 1), (7, 0)):
        found = {("weight", UNIT): Figures(1, 0, 0, 30, 12, 1, 1, 0, {"sqnr": 9, "slice_sqnr": number})}
        assert len(watch.look(found, Config())) == new


def test_the_guard_moves_all_experts_of_the_block_and_a_resumed_run_decides_alike() -> None:
    trainer = Trainer(ill=True, guard_sqnr=20.0, monitor_action="stop")
    metrics, manifest = trainer.sync()
    moved = [f"{UNIT}.{expert}.{part}_proj" for expert in range(8) for part in ("gate", "up", "down")]
    assert manifest.guarded == tuple(sorted(moved)) and len(manifest.layers) == 3 * (4 + 24) - 24
    assert metrics["jetrl/guard_layers"] == 1
    (line,) = [line for line in trainer.source.take_lines() if line.startswith("precision guard")]
    assert line.startswith("precision guard: 1 layers run in BF16 on both sides from now on, 1 in all; floor 20 dB: ")
    assert f"{UNIT}: weight " in line and line.endswith(" dB in 5.up_proj")
    assert f"24 in BF16 by the precision guard: {UNIT}\n" in str(jetrl_patch.status())
    experts = trainer.model.model.layers[1].mlp.experts
    own: Any = experts_of(experts)
    assert own.plain is not None and own.plain.exact and not set(trainer.source.modules) & set(moved)
    trainer.step()
    for _ in range(2):
        metrics, again = trainer.sync()
        assert again.guarded == manifest.guarded and own.watch is None
        trainer.step()
    jetrl_patch.disable()

    weights = trainer.model.state_dict()
    resumed = Trainer(guard_sqnr=20.0)
    resumed.model.load_state_dict(weights)
    assert resumed.sync()[1].guarded == manifest.guarded


def test_a_reference_model_follows_by_the_names_of_the_manifest() -> None:
    trainer, follower = Trainer(guard_sqnr=5.0), Trainer.__new__(Trainer)
    follower.model = build("qwen3_moe").float()
    config, shapes = jetrl_patch.status().config, dict(trainer.source.shapes)
    assert config is not None
    follower.source = convert(follower.model, config, shapes, rollout_tp=1, device_type="cpu", reference=True)
    moved = [name for name in trainer.source.layers if name.startswith(f"{UNIT}.")]
    for source in (trainer.source, follower.source):
        source.to_bf16(moved)
        source.to_bf16(moved[:1])  # a second time there is nothing to change
        assert source.guarded == moved and not set(source.layers) & set(moved)
    ids = trainer.ids
    with torch.no_grad():
        ours, theirs = (model(input_ids=ids, use_cache=False).logits for model in (trainer.model, follower.model))
    assert torch.equal(ours, theirs)


def test_experts_that_cannot_leave_fp8_are_a_sync_error_and_nothing_changes() -> None:
    trainer = Trainer(ill=True, guard_sqnr=20.0)
    attention: Any = trainer.model.model.layers[1].self_attn.o_proj
    attention.__class__ = type("Theirs", (type(attention),), {})
    with pytest.raises(SyncError, match=r"could not take .*1\.self_attn\.o_proj, .*experts out of FP8: .*is a Theirs"):
        trainer.source.to_bf16(["model.layers.1.self_attn.o_proj", UNIT])
    own: Any = experts_of(trainer.model.model.layers[1].mlp.experts)
    assert own.plain is None and not trainer.source.guarded
