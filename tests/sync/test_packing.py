"""Weights in the bits of their format on the way: every bit comes back, and what packing cannot have made is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from jetrl_patch.backends import quantize
from jetrl_patch.config.formats import FORMATS
from jetrl_patch.errors import SyncError
from jetrl_patch.sync.packing import packing_of
from jetrl_patch.sync.protocol import COMMIT, MANIFEST
from jetrl_patch.sync.receive import Receiver
from jetrl_patch.sync.send import SyncStats, quantized_stream

from .fake_engine import LAYERS, SHAPES, TERMS, Engine, weights

#: bytes of a weight [256, 128] as it travels
BYTES = {"pow2": 128 * 256 + 4 * 2, "fp32": 128 * 256 + 4 * 2, "mxfp8": 128 * 256 + 4 * 256, "nvfp4": 64 * 256 + 8 * 256 + 4}


@pytest.mark.parametrize("scale_format", list(FORMATS))
@pytest.mark.parametrize("shape", [(1, 1), (7, 31), (16, 16), (130, 257), (3, 512)])
@pytest.mark.parametrize("spread", [0, 2, 60])
def test_every_bit_comes_back(scale_format, shape, spread):
    g = torch.Generator().manual_seed(sum(shape))
    w = torch.randn(shape, generator=g) * torch.exp2(torch.randint(-spread, spread + 1, shape, generator=g).float())
    w[0, 0] = -0.0
    for weight in (w, torch.zeros_like(w), w * 1e-30):
        q, s = quantize.quantize_weight(weight, scale_format)
        packing = packing_of(scale_format)
        elements = packing.unpacked_elements(packing.elements(q), tuple(q.shape))
        scales = packing.unpacked_scales(packing.scales(s), tuple(s.shape))
        assert elements.dtype == q.dtype and torch.equal(elements.view(torch.uint8), q.view(torch.uint8))
        assert scales.dtype == s.dtype and torch.equal(scales.view(torch.int32), s.view(torch.int32))


def test_a_byte_that_is_no_exponent_is_nan():
    found = packing_of("mxfp8").unpacked_scales(torch.tensor([[255, 254, 0]], dtype=torch.uint8), (1, 3))
    assert found.isnan().tolist() == [[True, False, False]]


@pytest.mark.parametrize("scale_format", list(FORMATS))
def test_a_sync_sends_the_bits_of_the_format(scale_format):
    terms, stats = dataclasses.replace(TERMS, scale_format=scale_format), SyncStats()
    sent = dict(quantized_stream(iter(weights().items()), terms=terms, layers=LAYERS, shapes=SHAPES, stats=stats))
    name = "layers.0.self_attn.q_proj.weight"
    assert sent[name].nbytes + sent[name + "_scale_inv"].nbytes == BYTES[scale_format]
    engine = Engine(height=FORMATS[scale_format].height)
    receiver = Receiver(engine, terms)
    receiver.on_bucket(list(sent.items()))
    receiver.finish()  # compares the digests of what the engine holds with those of the trainer's bytes
    quantized = quantize.quantize_weight(weights()[name], scale_format)
    assert torch.equal(engine.tensors[name].view(torch.uint8), quantized.q.view(torch.uint8))


@pytest.mark.parametrize("scale_format", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("suffix", ["", "_scale_inv"])
@pytest.mark.parametrize("change", ["dtype", "shape", "bit"])
def test_what_packing_cannot_have_made(scale_format, suffix, change):
    terms = dataclasses.replace(TERMS, scale_format=scale_format)
    sent = dict(quantized_stream(iter(weights().items()), terms=terms, layers=LAYERS, shapes=SHAPES, stats=SyncStats()))
    name = "layers.0.self_attn.q_proj.weight" + suffix
    if change == "bit":
        raw = sent[name] = sent[name].clone()
        raw.view(torch.uint8).view(-1)[5] ^= 1
    else:
        sent[name] = sent[name].view(torch.uint8)[:-1] if change == "shape" else sent[name].to(torch.float32)
    receiver = Receiver(Engine(height=1), terms)
    receiver.on_bucket(list(sent.items()))
    with pytest.raises(SyncError, match=r"changed on the way|a packed weight: required uint8|announced shape and dtype"):
        receiver.finish()
    assert MANIFEST in sent and COMMIT in sent
