"""The trial of the exact ops passes correct ops and names one that depends on its batch."""

from __future__ import annotations

import pytest
import torch

from jetrl_patch.backends import capability
from jetrl_patch.errors import ConfigError, ModelError
from jetrl_patch.exact import dispatch, latent, ops, trial

SIZES = trial.Sizes(hidden=256, intermediate=320, heads=4, kv_heads=2, head_dim=64, vocab=1001)
LENGTHS = (1, 33, 130, 64, 77)


def verdicts():
    return dict(trial.compare_ops(SIZES, "cpu", LENGTHS))


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_ops_that_keep_the_promise_pass(backend, monkeypatch):
    monkeypatch.setitem(dispatch._chosen, "cpu", backend)
    found = verdicts()
    assert len(found) == 8 and all(verdict.ok for verdict in found.values()), found


def test_latent_attention_is_tried_with_its_products(monkeypatch):
    monkeypatch.setitem(dispatch._chosen, "cpu", "native")
    sizes = trial.Sizes(hidden=256, intermediate=320, heads=4, kv_heads=1, head_dim=144, vocab=1001, latent=80)
    assert all(verdict.ok for verdict in dict(trial.compare_ops(sizes, "cpu", LENGTHS)).values())
    original = latent.into_latent
    monkeypatch.setattr(latent, "into_latent", lambda x, w: original(x, w) * (1 + (len(x) == 7) / 64))
    failed = {name: verdict.found for name, verdict in dict(trial.compare_ops(sizes, "cpu", LENGTHS)).items() if not verdict.ok}
    assert list(failed) == ["attention"] and "7 rows differ" in failed["attention"]


def paged_with_another_sum(original):
    def attention_paged(q, *args):  # like a kernel that splits long contexts: correct up to single bits
        return original(q.roll(1, 1), *args).roll(-1, 1)

    return attention_paged


BREAKS = {
    "attention": ("attention_paged", paged_with_another_sum),
    "RMSNorm of width 256": ("rms_norm", lambda f: lambda x, w, eps: f(x, w, eps) * (1 + (x.shape[0] == 7) / 128)),
    "SiLU": ("silu_mul", lambda f: lambda g, u: f(g, u) if g.shape[0] > 1 else f(g, u).nextafter(u)),
    "rotary embedding": ("apply_rotary", lambda f: lambda x, c, s, p: f(x.flip(0), c, s, p.flip(0)).flip(0) * 1.01),
    "lm_head": ("linear", lambda f: lambda x, w: (x.float() @ w.float().t() + (len(x) == 64) / 8).to(x.dtype)),
    "BF16 partial sums": ("partial_sum", lambda f: lambda x, w: f(x, w) + 1e-5 * (x.shape[0] == 1)),
    "log-softmax over 1001": ("token_log_probs", lambda f: lambda x, y, t: f(x, y, t + 1e-3 * (len(x) == 7))),
}


@pytest.mark.parametrize("name", BREAKS)
def test_an_op_that_depends_on_its_batch_is_named(name, monkeypatch):
    function, broken = BREAKS[name]
    monkeypatch.setattr(ops, function, broken(getattr(ops, function)))
    found = verdicts()
    failed = {name for name, verdict in found.items() if not verdict.ok}
    norms = {"RMSNorm of width 256", "RMSNorm of width 64"}
    assert failed == (norms if name in norms else {name}), found
    monkeypatch.setattr(trial, "compare_ops", lambda *_: iter(found.items()))
    with pytest.raises(ModelError, match=rf"on cuda:0, {name}: required rows .* Use align='linear'"):
        trial.require_exact_ops(SIZES, torch.device("cuda:0"))


def split(original):  # like a kernel that shares long contexts among programs
    return lambda q, k, v, table, seen, *rest, **kw: original(q, k * (1 + (seen.max() > 200) / 64), v, table, seen, *rest, **kw)


def crowded(original):  # like a launch that has no place for so many requests
    def attention_paged(q, k, v, table, seen, *rest, **kw):
        out = original(q, k, v, table, seen, *rest, **kw)
        out[270:] = out[270:].nextafter(out[270:] + 1)
        return out

    return attention_paged


@pytest.mark.parametrize("broken", [split, crowded])
def test_attention_is_tried_with_a_long_context_and_with_many_requests(broken, monkeypatch):
    assert len(trial.LARGE[0]) == 1 and trial.LARGE[0][0] == 32768 and len(trial.LARGE[1]) == 1000
    large = ((260,), tuple(1 + r % 3 for r in range(300)))
    heads, width = (SIZES.heads, SIZES.kv_heads), SIZES.head_dim
    assert trial.compare_attention(heads, width, "cpu", lengths=LENGTHS, large=large).ok
    monkeypatch.setattr(ops, "attention_paged", broken(ops.attention_paged))
    assert trial.compare_attention(heads, width, "cpu", lengths=(1, 33)).ok
    found = trial.compare_attention(heads, width, "cpu", lengths=(1, 33), large=large)
    assert not found.ok and f"of {1 if broken is split else 300} sequences" in found.found


def test_the_formulas_are_not_tried_with_large_batches(monkeypatch):
    """They would hold 32k x 32k scores of each head."""
    monkeypatch.setitem(dispatch._chosen, "cpu", "torch")
    assert trial.compare_attention((4, 2), 64, "cpu", lengths=(1, 33), large=((1 << 40,),)).ok


@pytest.mark.parametrize(("name", "function"), [("lm_head", "linear"), ("BF16 partial sums", "partial_sum")])
def test_a_product_whose_columns_depend_on_the_weights_height_is_named(name, function, monkeypatch):
    original = getattr(ops, function)
    monkeypatch.setattr(ops, function, lambda x, w: original(x, w) * (1 + (len(w) < 1001) / 64))
    failed = {name: verdict.found for name, verdict in verdicts().items() if not verdict.ok}
    assert list(failed) == [name] and "a rank that holds rows from 48 on" in failed[name]


def test_an_op_that_cannot_run_is_named(monkeypatch):
    def fails(*args):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(ops, "silu_mul", fails)
    assert verdicts()["SiLU"] == (False, "RuntimeError: no kernel image is available")


def test_it_is_tried_once_and_never_on_a_cpu(monkeypatch):
    calls = []
    monkeypatch.setattr(trial, "compare_ops", lambda *args: calls.append(args) or iter(()))
    monkeypatch.setattr(trial, "_proven", set())
    trial.require_exact_ops(SIZES, torch.device("cpu"))
    assert not calls
    for _ in range(2):
        trial.require_exact_ops(SIZES, torch.device("cuda:0"))
    assert len(calls) == 1


@pytest.mark.parametrize("backend", ["auto", "triton", "deep_gemm", "torch"])
def test_which_ops_serve_on_cuda(backend, monkeypatch):
    monkeypatch.setattr(dispatch, "_chosen", {})
    monkeypatch.setattr(dispatch, "choose_backend", lambda name, *asked: name)
    monkeypatch.setattr(capability, "check_exact_cuda", lambda *sm: (True, "Some GPU"))
    assert dispatch.configure(backend, "cuda") == ("torch" if backend == "torch" else "triton")
    monkeypatch.setattr(capability, "check_exact_cuda", lambda *sm: (False, "none"))
    if backend == "torch":
        assert dispatch.configure(backend, "cuda") == "torch"
    else:
        with pytest.raises(ConfigError, match=r", found none. Use align='linear' if"):
            dispatch.configure(backend, "cuda")


def test_what_a_gpu_must_have(monkeypatch):
    assert capability.check_exact_cuda()[0] == (torch.cuda.is_available() and torch.version.hip is None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "6.3")
    assert capability.check_exact_cuda() == (
        False, "a torch built for ROCm 6.3",
    )  # fmt: skip


def test_frequencies_are_the_cpus_whatever_the_default_device_is():
    from transformers import LlamaConfig

    config = LlamaConfig(hidden_size=256, num_attention_heads=4)
    expected = ops.rope_frequencies(config)
    with torch.device("meta"):
        cos, _ = ops.rotary_table(ops.rope_frequencies(config), 10)
    assert cos.device.type == "cpu" and torch.equal(cos, ops.rotary_table(expected, 10)[0])


def test_a_trainer_without_the_ops_is_refused_before_its_model_changes(monkeypatch):
    import jetrl_patch
    from jetrl_patch.trainer.prepare import prepare_model

    from ..models import build

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(dispatch, "_chosen", {})
    jetrl_patch.enable(precision="fp8-unified")
    model = build("qwen3", num_hidden_layers=1)
    before = [type(module) for module in model.modules()]
    with pytest.raises(ConfigError, match=r"sees no CUDA device\. Use align='linear' if"):
        prepare_model(model, jetrl_patch.Config(precision="fp8-unified").resolved(), device_type="cuda")
    assert [type(module) for module in model.modules()] == before


@pytest.mark.parametrize("kind", ["gated delta net", "vision tower"])
def test_a_part_that_depends_on_its_batch_is_refused(kind, monkeypatch):
    """On a GPU; here the trial itself runs on the CPU."""
    gpu, sizes, tower = torch.device("cuda:0"), trial.Sizes(256, 0, 4, 2, 64, 0), kind == "vision tower"

    def require(device):
        if tower:
            trial.require_exact_tower(256, 4, device, LENGTHS)
        else:
            trial.require_exact_delta_net((2, 4, 64, 64), sizes, device, LENGTHS)

    module, function = (trial.tower, "whole_attention") if tower else (trial.delta_net, "delta_net_paged")
    original, made = getattr(module, function), trial._Trial
    monkeypatch.setattr(trial, "_Trial", lambda sizes, device, lengths: made(sizes, "cpu", lengths))
    monkeypatch.setattr(trial, "_proven", set())
    require(gpu)
    trial._proven.clear()
    monkeypatch.setattr(module, function, lambda x, *rest: original(x, *rest) * (1 + (len(x) < 20) / 64))
    require(torch.device("cpu"))
    with pytest.raises(ModelError, match=rf"on cuda:0, {kind}: required .* do not depend on the batch, found .* differ"):
        require(gpu)


def test_the_states_of_a_delta_net_are_fp32_under_any_default_dtype(monkeypatch):
    """vLLM loads a model with BF16 as torch's default dtype."""
    found = []

    def paged(*given):
        found.append(given[5][1].dtype)
        raise RuntimeError("enough")

    monkeypatch.setattr(trial.delta_net, "delta_net", lambda x, *_: x)
    monkeypatch.setattr(trial.delta_net, "delta_net_paged", paged)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with pytest.raises(RuntimeError, match="enough"):
            trial._Trial(trial.Sizes(256, 0, 4, 2, 64, 0), "cpu", (1, 5)).delta_net((2, 4, 64, 64))
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == [torch.float32]
