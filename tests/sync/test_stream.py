"""The sender: what it yields, and what it refuses to send."""

import dataclasses

import pytest
import torch

from jetrl_patch.backends.quantize import quantize_weight
from jetrl_patch.errors import SyncError
from jetrl_patch.sync import send as stream_module
from jetrl_patch.sync.digest import digest, formula, read
from jetrl_patch.sync.protocol import COMMIT, MANIFEST, Manifest, decode_json
from jetrl_patch.sync.send import SyncStats, quantized_stream
from tests.sync.fake_engine import LAYERS, SHAPES, TERMS, weights


def _stream(tensors, **changes):
    stats = SyncStats()
    arguments = {"terms": TERMS, "layers": LAYERS, "shapes": SHAPES, "stats": stats} | changes
    return quantized_stream(iter(tensors.items()), **arguments), stats


def test_sends_the_bytes_of_a_direct_quantization_of_the_bf16_value():
    tensors = weights()
    stream, stats = _stream(tensors)
    sent = dict(stream)
    assert list(sent) == [
        MANIFEST,
        "layers.0.self_attn.q_proj.weight",
        "layers.0.self_attn.q_proj.weight_scale_inv",
        "layers.0.mlp.down_proj.weight",
        "layers.0.mlp.down_proj.weight_scale_inv",
        "norm.weight",
        COMMIT,
    ]
    for layer in LAYERS:
        q, s = quantize_weight(tensors[layer + ".weight"].to(torch.bfloat16), "pow2")
        assert torch.equal(sent[layer + ".weight"].view(torch.uint8), q.view(torch.uint8))
        assert torch.equal(sent[layer + ".weight_scale_inv"], s)
    assert sent["norm.weight"].dtype is torch.bfloat16
    assert decode_json(sent[COMMIT], COMMIT)["digests"] == {
        name: digest(tensor) for name, tensor in sent.items() if name not in (MANIFEST, COMMIT)
    }
    fp8 = 256 * 128 + 100 * 256
    scales = 4 * (2 * 1 + 1 * 2)
    assert (stats.quantized, stats.quantized_as_bf16, stats.total) == (fp8 + scales, 2 * fp8, fp8 + scales + 2 * 128)
    assert (stats.layers, stats.tensors) == (2, 5)
    assert stats.quantized <= 0.55 * stats.quantized_as_bf16


def test_fp8_rollout_sends_bf16_and_names_the_layers():
    terms = dataclasses.replace(TERMS, precision="fp8-rollout", align="none", backend="")
    stream, stats = _stream(weights(), terms=terms)
    sent = dict(stream)
    assert Manifest.decode(sent[MANIFEST]).layers == tuple(sorted(LAYERS))
    assert {t.dtype for n, t in sent.items() if n in SHAPES} == {torch.bfloat16}
    assert stats.quantized == stats.quantized_as_bf16


def test_takes_the_trainers_own_bytes_when_it_gives_them():
    asked = []

    def own(layer, weight):
        asked.append((layer, weight.dtype))
        return quantize_weight(weight, "fp32")

    sent = dict(_stream(weights(), quantize=own)[0])
    assert asked == [(layer, torch.bfloat16) for layer in LAYERS]
    expected = quantize_weight(weights()[LAYERS[0] + ".weight"], "fp32").s
    assert torch.equal(sent[LAYERS[0] + ".weight_scale_inv"], expected)


def test_holds_one_tensor_at_a_time():
    alive = []

    def source():
        for name, shape in SHAPES.items():
            alive.append(name)
            yield name, torch.ones(shape)

    stream = quantized_stream(source(), terms=TERMS, layers=LAYERS, shapes=SHAPES, stats=SyncStats())
    for name, _ in stream:
        if name in SHAPES:
            assert alive[-1] == name  # nothing was read ahead


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3.4e38])
@pytest.mark.parametrize("name", list(SHAPES))
def test_nan_or_inf_in_a_weight_stops_the_sync_with_its_name(name, value):
    tensors = weights()
    tensors[name].view(-1)[7] = value  # 3.4e38 is finite in FP32 and Inf in BF16
    with pytest.raises(SyncError, match=f"{name} holds NaN or Inf"):
        list(_stream(tensors)[0])


def test_a_tensor_that_is_never_sent():
    tensors = weights()
    del tensors["norm.weight"]
    with pytest.raises(SyncError, match=r"never sent them: norm\.weight"):
        list(_stream(tensors)[0])


def test_a_tensor_that_was_not_announced():
    with pytest.raises(SyncError, match="sends extra, which its model did not have"):
        list(_stream(weights() | {"extra": torch.ones(2)})[0])


def test_a_tensor_of_another_shape():
    with pytest.raises(SyncError, match=r"norm\.weight with shape \(3,\); the model was built with \(128,\)"):
        list(_stream(weights() | {"norm.weight": torch.ones(3)})[0])


def test_a_tensor_sent_twice():
    twice = [*weights().items(), ("norm.weight", torch.ones(128))]
    stream = quantized_stream(iter(twice), terms=TERMS, layers=LAYERS, shapes=SHAPES, stats=SyncStats())
    with pytest.raises(SyncError, match=r"norm\.weight twice"):
        list(stream)


def test_an_fp8_layer_without_a_weight():
    with pytest.raises(SyncError, match=r"without a weight .* layers\.9\.q\.weight"):
        list(_stream(weights(), layers=(*LAYERS, "layers.9.q"))[0])


def test_nothing_of_a_quantized_layer_is_sent_if_its_weight_is_not_finite():
    tensors = weights()
    tensors[LAYERS[0] + ".weight"][0, 0] = float("nan")
    stream = _stream(tensors)[0]
    assert next(stream)[0] == MANIFEST
    with pytest.raises(SyncError, match="holds NaN or Inf"):
        next(stream)


def test_digests_on_a_device_are_read_once_a_bucket(monkeypatch):
    """On a device the stream does not wait for each tensor, and never reaches the commit with a bad one."""
    reads = []

    def on_device(tensor):
        return formula(tensor.view(1, -1) if tensor.dim() == 1 else tensor)

    def read_all(started):
        reads.append(len(started))
        return read(started)

    monkeypatch.setattr(stream_module, "start", on_device)
    monkeypatch.setattr(stream_module, "read", read_all)
    sent = dict(_stream(weights())[0])
    assert reads == [5]
    monkeypatch.undo()
    assert torch.equal(sent[COMMIT], dict(_stream(weights())[0])[COMMIT])
    monkeypatch.setattr(stream_module, "start", on_device)
    bad = weights()
    bad["layers.0.mlp.down_proj.weight"][50, 200] = float("inf")
    names = []
    with pytest.raises(SyncError, match=r"down_proj\.weight holds NaN or Inf"):
        names.extend(name for name, _ in _stream(bad)[0])
    assert COMMIT not in names
