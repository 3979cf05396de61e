"""Exact attention for CUDA as vLLM sees it: what it offers, what it refuses, and that it reads vLLM's cache rightly.

The kernel itself is tested in ``tests/kernels``; here the C kernel computes, on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.registry import _ATTN_OVERRIDES, AttentionBackendEnum

import jetrl_patch
from jetrl_patch.adapters.vllm import engine, graphs, worker
from jetrl_patch.adapters.vllm.attention import (
    ExactCudaAttentionBackend,
    ExactCudaAttentionBuilder,
    ExactCudaAttentionImpl,
)
from jetrl_patch.adapters.vllm.compat import paged_keys_and_values
from jetrl_patch.config import Config
from jetrl_patch.errors import ConflictError, ModelError
from jetrl_patch.exact import ops
from jetrl_patch.models.families import covering
from jetrl_patch.models.structure import has_delta_nets
from tests.models import config_of

BF16 = torch.bfloat16
FORCED = Config(decode_graphs=True)
SETTING: dict[str, Any] = {
    "head_size": 128,
    "dtype": BF16,
    "kv_cache_dtype": "auto",
    "block_size": 16,
    "use_mla": False,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": DeviceCapability(9, 0),
    "attn_type": "decoder",
}
REFUSED: list[dict[str, Any]] = [
    {"head_size": 80},
    {"dtype": torch.float16},
    {"kv_cache_dtype": "fp8"},
    {"use_mla": True},
    {"has_sink": True},
    {"use_mm_prefix": True},
    {"device_capability": DeviceCapability(7, 5)},
    {"attn_type": "encoder"},
    {"has_sliding_window": True},
    {"use_non_causal": True},
    {"use_rswa": True},
]


def test_it_offers_what_the_kernel_computes() -> None:
    caches = [{"kv_cache_dtype": name} for name in ("bfloat16", "fp8_per_token_head")]
    for accepted in ({}, {"head_size": 64}, *caches, {"use_batch_invariant": True}):
        assert ExactCudaAttentionBackend.validate_configuration(**SETTING | accepted) == []
    assert ExactCudaAttentionBackend.get_name() == "CUSTOM"
    assert ExactCudaAttentionBuilder._cudagraph_support == AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: next(iter(change)))
def test_vllm_is_told_what_it_does_not(change: dict[str, Any]) -> None:
    assert len(ExactCudaAttentionBackend.validate_configuration(**SETTING | change)) == 1


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"alibi_slopes": [1.0, 1.0]}, "ALiBi"),
        ({"sliding_window": 64}, "a sliding window"),
        ({"kv_cache_dtype": "fp8"}, "the KV cache fp8"),
        ({"logits_soft_cap": 30.0}, "capped attention logits"),
        ({"attn_type": "encoder_only"}, "encoder_only attention"),
        ({"sinks": torch.zeros(2)}, "attention sinks"),
        ({"chunk_lookback": 3}, "chunk_lookback"),
    ],
)
def test_a_layer_that_differs_is_refused_by_name(change: dict[str, Any], name: str) -> None:
    with pytest.raises(ModelError, match=name):
        ExactCudaAttentionImpl(2, 64, 0.125, 1, **change)


def test_a_cascade_is_refused() -> None:
    builder = ExactCudaAttentionBuilder(None, [], None, torch.device("cpu"))
    with pytest.raises(ModelError, match="a cascade"):
        builder.build(16, SimpleNamespace(causal=True))
    with pytest.raises(ModelError, match="a mask that is not causal"):
        builder.build(0, SimpleNamespace(causal=False))


def prefill(table: torch.Tensor, slots: torch.Tensor, tokens: int) -> Any:
    """The metadata of a step in which one request of so many tokens is computed."""
    common = SimpleNamespace(
        num_actual_tokens=tokens,
        query_start_loc=torch.tensor([0, tokens], dtype=torch.int32),
        seq_lens=torch.tensor([tokens], dtype=torch.int32),
        block_table_tensor=table,
        slot_mapping=slots,
        causal=True,
    )
    return ExactCudaAttentionBuilder(None, [], None, torch.device("cpu")).build(0, common)


@pytest.mark.parametrize("pairs", [False, True], ids=["4d", "5d"])
@pytest.mark.parametrize("head_major", [False, True])
def test_it_reads_every_layout_of_the_cache(head_major: bool, pairs: bool) -> None:
    T, H, KH, D, size = 40, 4, 2, 64, 16
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(T, h, D, generator=g).to(BF16) for h in (H, KH, KH))
    # vLLM's logical order is [blocks, KH, block size, 2D], until 0.26 [blocks, 2, block size, KH, D]; in memory heads or
    # tokens come first
    inner = (KH, size) if head_major else (size, KH)
    cache = torch.full((3, 2, *inner, D) if pairs else (3, *inner, 2 * D), float("nan"), dtype=BF16)
    cache = cache.transpose(-3, -2) if head_major == pairs else cache
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    for t in range(T):
        block, place = table[0, t // size], t % size
        if pairs:
            cache[block, :, place] = torch.stack((k[t], v[t]))
        else:
            cache[block, :, place] = torch.cat((k[t], v[t]), -1)
    metadata = prefill(table, torch.zeros(T, dtype=torch.int64), T)
    layer = ExactCudaAttentionImpl(H, D, D**-0.5, KH)
    padded = torch.cat((q, q[:3]))  # vLLM may hand more rows than there are tokens
    output = torch.full((T + 3, H, D), 7.0, dtype=BF16)
    layer.forward(None, padded, k, v, cache, metadata, output)
    cu = torch.tensor([0, T], dtype=torch.int32)
    assert torch.equal(output[:T], ops.attention_varlen(q, k, v, cu, D**-0.5)) and (output[T:] == 7.0).all()
    assert (layer.forward(None, q, k, v, cache, None, output[:T]) == 0).all()  # the memory measurement


@pytest.mark.parametrize("pairs", [False, True], ids=["4d", "5d"])
@pytest.mark.parametrize("head_major", [False, True])
def test_an_fp8_cache_is_filled_and_read_as_the_trainer_rounds(head_major: bool, pairs: bool) -> None:
    """In every layout of vLLM's cache with room for scales. Blocks may be apart, as in a cache that layers share."""
    T, H, KH, D, size = 40, 4, 2, 64, 16
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(T, h, D, generator=g).to(BF16) for h in (H, KH, KH))
    inner = (KH, size) if head_major else (size, KH)
    shape = (3, 2, 2, *inner, D + 4) if pairs else (3, 2, *inner, 2 * (D + 4))
    cache = torch.full(shape, 0xFF, dtype=torch.uint8)[:, 1]  # NaN, in bytes and in scales
    cache = cache.transpose(-3, -2) if head_major == pairs else cache
    layer = ExactCudaAttentionImpl(H, D, D**-0.5, KH, kv_cache_dtype="fp8_per_token_head")
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    slots = table[0, torch.arange(T) // size].long() * size + torch.arange(T) % size
    padded = torch.cat((slots, torch.full((3,), -1)))
    layer.do_kv_cache_update(None, *(torch.cat((t, t[:5])) for t in (k, v)), cache, padded)
    metadata = prefill(table, padded, T)
    output, cu = torch.empty(T, H, D, dtype=BF16), torch.tensor([0, T], dtype=torch.int32)
    layer.forward(None, q, k, v, cache, metadata, output)
    assert torch.equal(output, ops.attention_varlen(q, k, v, cu, D**-0.5, fp8=True))
    assert not torch.equal(output, ops.attention_varlen(q, k, v, cu, D**-0.5))
    with pytest.raises(ModelError, match=r"vLLM's FP8 KV cache: required uint8 in dense blocks"):
        layer.pages(cache[..., :-1])


@pytest.mark.parametrize(("dtype", "kind"), [(torch.uint8, "fp8_per_token_head"), (BF16, "auto")])
def test_graphs_are_proven_on_keys_and_values_that_a_step_could_write(dtype: torch.dtype, kind: str, monkeypatch: Any) -> None:
    """With NaN in the cache, every step would have the same output, and a wrong graph would pass."""
    KH, D, size = 2, 64, 16
    width = D + 4 if dtype == torch.uint8 else D
    cache = torch.full((3, KH, size, 2 * width), 0xFF if dtype == torch.uint8 else float("nan"), dtype=dtype)
    impl = ExactCudaAttentionImpl(4, D, D**-0.5, KH, kv_cache_dtype=kind)
    if dtype == BF16:  # vLLM's own code writes this cache, with a kernel

        def write(self: Any, layer: Any, key: Any, value: Any, kv_cache: Any, slots: Any) -> None:
            k, v = self.pages(kv_cache)
            k[slots // size, slots % size], v[slots // size, slots % size] = key, value

        monkeypatch.setattr(ExactCudaAttentionImpl.__mro__[2], "do_kv_cache_update", write)
    graphs.fill_first_block([SimpleNamespace(impl=impl, kv_cache=cache)])
    q, out = torch.randn(size, 4, D).to(BF16), torch.empty(size, 4, D, dtype=BF16)
    impl.forward(None, q, q, q, cache, prefill(torch.zeros(1, 1, dtype=torch.int32), None, size), out)
    assert out.isfinite().all() and out.float().std() > 0.1


@pytest.mark.parametrize("shape", [(3, 16, 2, 64), (2, 3, 16, 2, 64), (3, 2, 16, 2, 128), (3, 16, 128)])
def test_another_layout_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match=rf"required \[blocks, KH, block size, 128\].* found \[{shape[0]}, "):
        paged_keys_and_values(torch.zeros(shape), 64)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)


def arguments(attention_backend: Any = None, backend: Any = None, **later: Any) -> Any:
    """``backend_per_kind`` is there from vLLM 0.26 on."""
    inner = SimpleNamespace(backend=backend, **later)
    return SimpleNamespace(attention_backend=attention_backend, attention_config=inner)


@pytest.mark.usefixtures("on_cuda")
def test_ours_is_chosen_unless_another_was_asked_for() -> None:
    ours = AttentionBackendEnum.CUSTOM
    for args in (arguments(), arguments(backend_per_kind={}), arguments("auto"), arguments(ours), arguments("CUSTOM")):
        engine.choose_attention(args)
        assert args.attention_backend == ours
    kept = arguments(backend=ours)
    engine.choose_attention(kept)
    assert kept.attention_backend is None  # vLLM takes one of the two only
    flash = AttentionBackendEnum.FLASH_ATTN
    for args in (
        arguments("FLASH_ATTN"),
        arguments(backend=flash),
        arguments(backend_per_kind={"full_attention": flash}),
    ):
        with pytest.raises(ConflictError, match="required the exact attention, for align='exact', found FLASH_ATTN"):
            engine.choose_attention(args)


def test_vllm_captures_whole_decoding_steps_and_compiles_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """As vLLM resolves the configuration: full graphs for decoding, none for mixed steps, custom operators as in eager mode."""
    args = SimpleNamespace(enforce_eager=True, compilation_config=CompilationConfig())
    graphs.capture_decoding(args, FORCED)
    found = args.compilation_config
    assert args.enforce_eager is False and found.mode == CompilationMode.NONE
    resolved = found.resolve_cudagraph_mode_and_sizes(ExactCudaAttentionBuilder._cudagraph_support, "CUSTOM")
    assert resolved == CUDAGraphMode.FULL_DECODE_ONLY and not resolved.requires_piecewise_compilation()
    assert resolved.decode_mode() == CUDAGraphMode.FULL and resolved.mixed_mode() == CUDAGraphMode.NONE
    never = CompilationConfig(mode=0, cudagraph_mode="FULL_DECODE_ONLY")  # what a backend without support would get
    assert never.resolve_cudagraph_mode_and_sizes(AttentionCGSupport.NEVER, "CUSTOM") == CUDAGraphMode.NONE
    compiled = SimpleNamespace(enforce_eager=False, compilation_config=CompilationConfig(mode=CompilationMode.VLLM_COMPILE))
    with pytest.raises(ConflictError, match=r"required NONE .* found VLLM_COMPILE\. Leave it unset"):
        graphs.capture_decoding(compiled, FORCED)
    other = SimpleNamespace(enforce_eager=False, compilation_config=CompilationConfig(cudagraph_mode="FULL"))
    with pytest.raises(ConflictError, match=r"cudagraph_mode with decode_graphs=True: required FULL_DECODE_ONLY.*found FULL"):
        graphs.capture_decoding(other, FORCED)
    eager = SimpleNamespace(enforce_eager=True, compilation_config=CompilationConfig())
    with caplog.at_level("WARNING", logger=graphs.logger.name):
        graphs.capture_decoding(eager, FORCED)
    assert not eager.enforce_eager and "set enforce_eager=False" in caplog.text


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    ("given", "decode_graphs", "captures"),
    [
        ({}, "auto", True),
        ({"enforce_eager": True}, "auto", False),
        ({"compilation_config": {"cudagraph_mode": "NONE"}}, "auto", False),
        ({"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}}, "auto", True),  # verl's default
        ({"compilation_config": {"cudagraph_mode": "PIECEWISE"}}, "auto", True),
        ({"compilation_config": {"mode": 3}}, "auto", True),
        ({}, False, False),
        ({"enforce_eager": True}, True, True),
        ({"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}}, True, True),
    ],
)
def test_the_engines_arguments_ask_for_graphs(
    given: dict[str, Any],
    decode_graphs: Any,
    captures: bool,
    checkpoint: Callable[..., str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(model=checkpoint("qwen3"), skip_tokenizer_init=True, **given)
    with caplog.at_level("WARNING", logger=graphs.logger.name):
        engine.prepare_arguments(args, Config(decode_graphs=decode_graphs).resolved())
    assert args.enforce_eager is not captures
    if captures:
        assert args.compilation_config.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY
        assert args.compilation_config.mode == CompilationMode.NONE
    overridden = given.get("compilation_config") in ({"cudagraph_mode": "PIECEWISE"}, {"mode": 3})
    assert ("with decode_graphs='auto': set" in caplog.text) is overridden


def test_the_precision_guard_needs_an_eager_engine() -> None:
    assert Config().may_capture and Config(decode_graphs=True).may_capture
    assert not Config(guard_sqnr=20).may_capture and not Config(decode_graphs=False).may_capture
    assert not Config(align="linear").may_capture


def test_a_worker_with_another_attention_does_not_serve() -> None:
    layers = {"a": SimpleNamespace(impl=object()), "b": SimpleNamespace()}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    with pytest.raises(ModelError, match=r"found object\. Leave the attention backend unset"):
        worker.require_attention(SimpleNamespace(vllm_config=config))


@pytest.mark.usefixtures("on_cuda")
def test_it_stands_in_vllms_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    from jetrl_patch.adapters.vllm.adapter import ADAPTER

    off = ("VLLM_USE_V2_MODEL_RUNNER", "VLLM_USE_FLASHINFER_SAMPLER")  # graphs that are not proven, and other log-probs
    for name in off:
        monkeypatch.delenv(name, raising=False)
    jetrl_patch.enable(precision="fp8-unified")
    ADAPTER.install()
    assert AttentionBackendEnum.CUSTOM.get_class() is ExactCudaAttentionBackend
    assert [os.environ[name] for name in off] == ["0", "0"]
    jetrl_patch.disable()
    assert AttentionBackendEnum.CUSTOM not in _ATTN_OVERRIDES
    assert not set(off) & set(os.environ)


@pytest.mark.usefixtures("on_cuda")
def test_flashinfers_sampler_is_refused_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log-probs vary from about 44 sequences a batch on (vllm#51187)."""
    from jetrl_patch.adapters.vllm.adapter import ADAPTER

    for name in ("device_problems", "sequence_parallel"):
        monkeypatch.setattr(engine, name, lambda *_: [])
    model = SimpleNamespace(head_dtype=torch.bfloat16, using_transformers_backend=lambda: False)
    config: Any = SimpleNamespace(model_config=model, use_v2_model_runner=False, parallel_config=None)
    for asked in ("0", "1"):
        monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", asked)
        jetrl_patch.enable(precision="fp8-unified")
        ADAPTER.install()
        assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == asked
        if asked == "0":
            engine._check_exact(config, config_of("qwen3"), Config())
        else:
            with pytest.raises(ModelError, match=r"FlashInfer's sampler.*VLLM_USE_FLASHINFER_SAMPLER=0"):
                engine._check_exact(config, config_of("qwen3"), Config())
        jetrl_patch.disable()


def test_the_trial_takes_the_sizes_of_a_rank(checkpoint: Callable[..., str]) -> None:
    from vllm.engine.arg_utils import EngineArgs

    jetrl_patch.enable(precision="fp8-unified")
    found = EngineArgs(model=checkpoint("qwen3"), skip_tokenizer_init=True, max_model_len=128).create_engine_config()
    hf = found.model_config.hf_text_config
    one = worker.rank_sizes(found)
    assert one[:5] == (
        hf.hidden_size,
        hf.intermediate_size,
        hf.num_attention_heads,
        hf.num_key_value_heads,
        hf.head_dim,
    )
    assert one.vocab == hf.vocab_size
    found.parallel_config.tensor_parallel_size = 2
    half = worker.rank_sizes(found)
    assert (half.intermediate, half.heads, half.kv_heads) == tuple(
        n // 2 for n in (hf.intermediate_size, hf.num_attention_heads, hf.num_key_value_heads)
    )


@pytest.mark.parametrize("model_type", covering("exact"))
def test_the_trial_finds_the_sizes_of_every_family(model_type: str) -> None:
    """``worker.try_ops`` reads them on a GPU alone."""
    hf = config_of(model_type)
    text = hf.get_text_config()
    counts = {"num_attention_heads": 4, "num_kv_heads": 2, "head_size": 64, "hidden_size": 256, "vocab_size": 512}
    model = SimpleNamespace(hf_config=hf, hf_text_config=text, **{
        f"get_{name}": lambda *parallel, count=count: count for name, count in counts.items()
    })  # fmt: skip
    engine: Any = SimpleNamespace(model_config=model, parallel_config=SimpleNamespace(tensor_parallel_size=1))
    found = worker.rank_sizes(engine)
    assert found.intermediate and all(isinstance(size, int) for size in found)
    if has_delta_nets(hf):
        assert all(worker.delta_net_sizes(engine))
    vision = getattr(hf, "vision_config", None)
    assert vision is None or vision.hidden_size % vision.num_heads == 0


@pytest.mark.usefixtures("on_cuda")
def test_a_head_width_without_a_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "refuse_exact_on", lambda *_: None)
    model = SimpleNamespace(get_head_size=lambda: 96, hf_config=config_of("qwen3"))
    config = SimpleNamespace(model_config=model)
    with pytest.raises(ModelError, match="head dimension 64, 128, 256, found 96"):
        engine.device_problems(config, Config(backend="torch"))
