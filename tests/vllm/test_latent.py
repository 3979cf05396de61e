"""Latent attention in vLLM: after a weight sync, what is made of the weights is that of an engine that has loaded them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import jetrl_patch
from jetrl_patch.adapters.vllm import install, postload
from jetrl_patch.adapters.vllm.fixes import keep_latent_weight
from jetrl_patch.adapters.vllm.sample import generate
from jetrl_patch.config import Config
from jetrl_patch.errors import ModelError
from jetrl_patch.measure.parity import Job
from jetrl_patch.sync.digest import add
from jetrl_patch.sync.send import SyncStats
from tests import models
from tests.fp8.thresholds import MISMATCH
from tests.vllm.test_delta_nets import MODES, off, trainer
from tests.vllm.test_weights import in_engine, push, worker_of

ATTENTION = "model.layers.1.self_attn"
MODES = {**MODES, "exact": {"precision": "fp8-unified"}}
#: queries that are compressed, as DeepSeek's largest have them, with YaRN; and not, as Moonlight, whose epsilon is another one
KINDS: dict[str, dict[str, Any]] = {
    "compressed": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128,
            "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    },
    "plain": {"q_lora_rank": None, "rms_norm_eps": 1e-5, "num_nextn_predict_layers": 1},
}  # fmt: skip
#: layers of a block's attention that are FP8
INSIDE = {
    "compressed": {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"},
    "plain": {"q_proj", "kv_a_proj_with_mqa", "o_proj"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    root, made = tmp_path_factory.mktemp("latent"), {}

    def make(kind: str) -> list[str]:
        if kind not in made:
            made[kind] = [models.save(root / f"{kind}-{i}", "deepseek_v3", i, steps=0, **KINDS[kind]) for i in (0, 1)]
            for folder in made[kind] if "num_nextn_predict_layers" in KINDS[kind] else ():
                add_block(Path(folder))
        return made[kind]

    return make


def add_block(folder: Path) -> None:
    """Add a block that predicts a second token, as DeepSeek's checkpoints have it behind the last one."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    weights = load_file(file)
    last = {name: weight for name, weight in weights.items() if name.startswith("model.layers.2.")}
    more = {name.replace("layers.2.", "layers.3."): torch.randn_like(weight) for name, weight in last.items()}
    more["model.layers.3.eh_proj.weight"] = torch.randn(256, 512).bfloat16()
    save_file(weights | more, file, {"format": "pt"})
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 3


def derived(llm: Any) -> Iterator[tuple[Any, str]]:
    """What the engine's latent attention decodes with: owner and name. A CPU with AMX has packed copies in the implementation."""
    for module in postload.latent_modules(worker_of(llm).model_runner.get_model()):
        packed = getattr(module.impl, "uses_amx_bmm", False)
        for name in ("_w_uk_packed", "_w_uv_packed") if packed else ("W_UK_T", "W_UV"):
            yield module.impl if packed else module, name


def made(llm: Any) -> list[torch.Tensor]:
    """Copies of them, block by block."""
    return [getattr(owner, name).detach().clone() for owner, name in derived(llm)]


def part(llm: Any) -> None:
    """Let decoding steps have copies of the weight in the place of views, as with packed weights."""
    for owner, name in derived(llm):
        setattr(owner, name, nn.Parameter(getattr(owner, name).detach().clone(), requires_grad=False))


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("linear", "compressed"),
        ("exact", "compressed"),
        pytest.param("linear", "plain", marks=pytest.mark.slow),
        pytest.param("fp8-rollout", "compressed", marks=pytest.mark.slow),
        pytest.param("fp8-rollout", "plain", marks=pytest.mark.slow),
    ],
)
def test_an_engine_serves_what_it_was_sent(
    folders: Callable[[str], list[str]], engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, mode: str, kind: str
) -> None:
    jetrl_patch.enable(**MODES[mode])
    config = jetrl_patch.status().config
    first, second = folders(kind)
    prompts = [list(range(3, 3 + length)) for length in (5, 70, 130)]

    fresh = engine(Job(model=second, config=config), 256)
    expected, answers = made(fresh), [s.response for s in generate(fresh, prompts, 24, 0.0)]
    bytes_of_fresh = in_engine(fresh)

    llm = engine(Job(model=first, config=config), 256)
    assert [s.response for s in generate(llm, prompts, 24, 0.0)] != answers
    part(llm)
    (old, before), (model, source) = trainer(first), trainer(second)
    assert {name.rpartition(".")[2] for name in source.layers if name.startswith(ATTENTION)} == INSIDE[kind]
    assert set(llm.collective_rpc("jetrl_report")[0]["layers"]) == set(source.layers)

    worker, stats = worker_of(llm), SyncStats()
    items = list(source.stream(model.state_dict().items(), stats))
    assert push(worker, items)["layers"] == len(source.layers)
    assert llm.reset_prefix_cache()  # as the frameworks do; a CPU with AMX caches blocks of 128 tokens
    quantized = {f"{layer}.{part}" for layer in source.layers for part in ("weight", "weight_scale_inv")}
    held = in_engine(llm)
    assert held == bytes_of_fresh and set(held) == quantized
    sends_fp8 = mode != "fp8-rollout"  # which sends BF16, quantized in the engine
    if sends_fp8:
        assert held == {name: stats.digests[name] for name in quantized}
    plain = {name: value for name, value in items if name in stats.digests and name not in quantized}
    if sends_fp8:
        assert {f"{ATTENTION}.kv_b_proj.weight", "model.layers.1.mlp.gate.e_score_correction_bias"} <= set(plain)
        announced = {name: (tuple(value.shape), str(value.dtype).removeprefix("torch.")) for name, value in plain.items()}
        rest: dict[str, int] = {}
        for rect in worker.jetrl_receiver.installer.installed(announced):
            rest[rect.name] = add(rest.get(rect.name, 0), rect.digest)
        assert {name: rest.get(name) for name in plain} == {name: stats.digests[name] for name in plain}

    assert len(expected) == 2 * 3 and all(map(torch.equal, made(llm), expected))
    assert [s.response for s in generate(llm, prompts, 24, 0.0)] == answers
    samples = generate(llm, prompts, 24, 1.0)
    same, other = off(model, samples), off(old, samples)
    print(f"mean abs Δlogp of {mode}, {kind}: {same:.4f}, of other weights {other:.2f}")
    assert same < MISMATCH[MODES[mode]["precision"]] and 4 * same < other, (same, other)
    if mode == "exact":
        assert same == 0.0

    monkeypatch.setattr(install, "absorb", lambda model: None)  # without it they stay as poisoned, or with AMX as they were
    push(worker, list(before.stream(old.state_dict().items(), SyncStats())))
    for (_, name), weight, before_push in zip(derived(llm), made(llm), expected, strict=True):
        assert torch.equal(weight, before_push) if name.startswith("_w_") else weight.isnan().all()


@pytest.mark.parametrize("packs", [True, False])
def test_the_weight_of_an_attention_that_packs_it_stays(packs: bool) -> None:
    def packing(self: Any, act_dtype: torch.dtype) -> None:
        """As vLLM does with AMX."""
        self.packed = self.kv_b_proj.weight.detach().flip(0).to(act_dtype)
        if packs:
            self.kv_b_proj.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    attention = SimpleNamespace(kv_b_proj=nn.Linear(4, 6, bias=False))
    weight, process = attention.kv_b_proj.weight, keep_latent_weight(packing)
    for _ in range(2):
        with torch.no_grad():
            weight.normal_()
        process(attention, torch.bfloat16)
        assert attention.kv_b_proj.weight is weight
        assert torch.equal(attention.packed, weight.flip(0).bfloat16())


def test_what_is_made_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM may make new tensors: graphs that were captured have the addresses of the first ones."""
    attention = nn.Module()
    attention.W_UV = nn.Parameter(torch.zeros(2, 3), requires_grad=False)
    place = attention.W_UV

    def process_weights_after_loading(act_dtype: torch.dtype) -> None:
        attention.W_UV = nn.Parameter(torch.ones(2, 3), requires_grad=False)

    attention.process_weights_after_loading = process_weights_after_loading
    monkeypatch.setattr(postload, "latent_modules", lambda model: [attention])
    postload.absorb(nn.Module())
    assert attention.W_UV is place and bool((place == 1).all())
    assert postload.made(nn.Module()) == {id(place)}


def test_padding_is_not_written() -> None:
    from jetrl_patch.adapters.vllm.latent import ExactLatentImpl

    cache = torch.zeros(2, 4, 6)
    latents, keys = torch.randn(3, 4), torch.randn(3, 1, 2)
    ExactLatentImpl.__new__(ExactLatentImpl).do_kv_cache_update(latents, keys, cache, torch.tensor([5, -1, 0]), "auto", None)
    rows = torch.cat((latents, keys[:, 0]), -1)
    assert torch.equal(cache[1, 1], rows[0]) and torch.equal(cache[0, 0], rows[2])
    assert int(cache.count_nonzero()) == 2 * 6


def test_norms_inside_have_the_trainers_epsilon() -> None:
    """transformers builds them with the default of their class, vLLM with that of the configuration."""
    config = models.config_of("deepseek_v3", rms_norm_eps=1e-5)
    block = nn.Module()
    block.q_a_layernorm, block.kv_a_layernorm = None, SimpleNamespace(variance_epsilon=1e-5)
    postload.follow_norms(nn.ModuleList([block]), config)
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config).model.layers[0]
    assert block.kv_a_layernorm.variance_epsilon == theirs.self_attn.kv_a_layernorm.variance_epsilon
    assert theirs.input_layernorm.variance_epsilon == 1e-5


YARN: dict[str, Any] = dict(KINDS["compressed"]["rope_parameters"])


@pytest.mark.parametrize(
    ("change", "agree"),
    [
        ({}, True),
        ({"mscale": 0.707, "mscale_all_dim": 0.707}, True),
        ({"mscale": 1.0, "mscale_all_dim": None}, True),
        ({"mscale": None, "mscale_all_dim": 1.0}, False),
        ({"mscale": 0.707, "mscale_all_dim": None}, False),
        ({"attention_factor": 1.5}, False),
        ({"truncate": False}, False),
    ],
)
def test_angles_that_both_sides_share_are_accepted_and_no_others(change: dict[str, Any], agree: bool) -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    from jetrl_patch.models.structure import check_structure

    rope = {key: value for key, value in (YARN | change).items() if value is not None}
    config = models.config_of("deepseek_v3", rope_parameters=rope)
    cos, sin = DeepseekV3RotaryEmbedding(config)(torch.zeros(1, dtype=torch.float32), torch.arange(512)[None])
    with set_current_vllm_config(VllmConfig()):
        engine = get_rope(64, max_position=512, rope_parameters=rope | {"rope_type": "deepseek_yarn"}, is_neox_style=False)
        table = engine._compute_cos_sin_cache()
    ours = torch.cat([cos[0, :, :32], sin[0, :, :32]], -1)
    assert torch.allclose(ours, table[:512], atol=1e-4) == agree
    quantized = jetrl_patch.Config(align="linear")
    if agree:
        check_structure(config, quantized)
        return
    with pytest.raises(ModelError, match="model_type='deepseek_v3' with a quantized rollout: required"):
        check_structure(config, quantized)


def test_on_a_gpu_it_takes_the_place_of_vllms_triton_backend() -> None:
    """vLLM checks a layer's widths, cache and GPU before it builds it; the cache is filled by vLLM's own kernel."""
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backend import MLAAttentionImpl
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from jetrl_patch.adapters.vllm.latent import ExactCudaLatentBackend, ExactCudaLatentImpl, ExactLatentBuilder

    assert ExactCudaLatentBackend.get_name() == AttentionBackendEnum.TRITON_MLA.name and ExactCudaLatentBackend.is_mla()
    assert ExactCudaLatentBackend.get_builder_cls() is ExactLatentBuilder
    asked: dict[str, Any] = {
        "head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 64, "use_mla": True, "has_sink": False,
        "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0), "attn_type": "decoder",
    }  # fmt: skip
    assert ExactCudaLatentBackend.validate_configuration(**asked) == []
    assert ExactCudaLatentBackend.validate_configuration(**asked | {"use_mla": False, "use_sparse": True})
    called: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MLAAttentionImpl, "do_kv_cache_update", lambda self, *given, **kw: called.append(given))
        impl = object.__new__(ExactCudaLatentImpl)
        impl.do_kv_cache_update(1, 2, 3, 4, "auto", 5)  # type: ignore[arg-type]
    assert called == [(1, 2, 3, 4, "auto", 5)]


def test_an_engine_on_a_gpu_gets_that_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from jetrl_patch.adapters.vllm import engine as settings

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    monkeypatch.setattr(settings, "refuse_exact_on", lambda *_: None)
    for family, chosen in (("deepseek_v3", AttentionBackendEnum.TRITON_MLA), ("qwen3", AttentionBackendEnum.CUSTOM)):
        model = SimpleNamespace(hf_config=models.config_of(family), get_head_size=lambda: 576)
        given: Any = SimpleNamespace(model_config=model, attention_config=SimpleNamespace(backend=AttentionBackendEnum.CUSTOM))
        if family == "qwen3":
            with pytest.raises(ModelError, match="required head dimension 64, 128, 256, found 576"):
                settings.device_problems(given, Config(backend="torch"))
        else:
            settings.device_problems(given, Config(backend="torch"))
        assert given.attention_config.backend == chosen


def test_the_first_projection_in_bf16_is_not_vllms_kernel_for_few_tokens() -> None:
    from vllm.model_executor.models.deepseek_v2 import DeepSeekV2FusedQkvAProjLinear

    from jetrl_patch.adapters.vllm import worker as code

    source = inspect.getsource(DeepSeekV2FusedQkvAProjLinear)
    assert "_use_min_latency_gemm" in code._OWN_KERNELS and "if self._use_min_latency_gemm:" in source
