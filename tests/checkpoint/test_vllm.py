"""Stock vLLM, without the plugin, loads and serves an exported checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from jetrl_patch.backends.quantize import dequantize_weight
from jetrl_patch.cli.checkpoint import SCALE_SUFFIX, SINGLE
from jetrl_patch.cli.export import export
from tests.checkpoint.exported import config, tensors
from tests.models import save
from tests.vllm.plain_fp8 import product
from tests.vllm.test_latent import KINDS

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def dequantized(folder: Path) -> Path:
    """The export as a checkpoint in BF16. transformers' own dequantizer refuses weights that end inside a block."""
    out, held, settings = folder.with_name("plain"), tensors(folder), config(folder)
    out.mkdir()
    for name in [name for name in held if name.endswith(SCALE_SUFFIX)]:
        weight = name.removesuffix(SCALE_SUFFIX)
        held[weight] = dequantize_weight(held[weight], held.pop(name), torch.bfloat16)
    del settings["quantization_config"]
    save_file(held, out / SINGLE, {"format": "pt"})
    (out / "config.json").write_text(json.dumps(settings))
    return out


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("family", "options", "exclude", "layers", "products"),
    [
        ("qwen3", {}, ("layers.1",), 2 * 7, 2 * 4),  # qkv, o, gate_up and down of two blocks
        # experts in FP8 have no kernel on a CPU; q_a with kv_a, q_b, o, gate_up and down of two blocks, one of shared experts
        ("deepseek_v3", {"q_lora_rank": 256, **KINDS["compressed"]}, ("layers.1", "experts"), 2 * (4 + 3), 2 * 5),
    ],
)
def test_vllms_loader_takes_the_checkpoint_as_it_is(tmp_path, monkeypatch, family, options, exclude, layers, products):
    vllm = pytest.importorskip("vllm")
    if torch.cuda.is_available():
        pytest.skip("this test stands in for vLLM's kernel on a CPU")
    import vllm.model_executor.kernels.linear as kernels
    from transformers import AutoModelForCausalLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.platforms import PlatformEnum

    monkeypatch.setenv("VLLM_PLUGINS", "")
    model = Path(save(tmp_path / "model", family, steps=2, **options))
    done = export(model, tmp_path / "out", "fp8", exclude=exclude, shard_bytes=600_000)
    assert len(done.shards) > 1 and len(done.layers) == layers
    shutil.rmtree(model)  # so that only the export can be read
    plain = product(kernels)
    monkeypatch.setitem(kernels._POSSIBLE_FP8_BLOCK_KERNELS, PlatformEnum.CPU, [plain])
    llm = vllm.LLM(
        model=str(tmp_path / "out"), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=64, max_num_seqs=4,
        enforce_eager=True, kv_cache_memory_bytes=1 << 28,
    )  # fmt: skip
    try:
        ids = torch.randint(2, 384, (4, 24), generator=torch.Generator().manual_seed(0))
        params = vllm.SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": row.tolist()} for row in ids], params, use_tqdm=False)
        found = [[e[int(t)].logprob for e, t in zip(o.prompt_logprobs[1:], row[1:])] for o, row in zip(outputs, ids)]
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()
    assert plain.calls >= products

    reference = AutoModelForCausalLM.from_pretrained(dequantized(tmp_path / "out"), dtype=torch.bfloat16).float()
    with torch.no_grad():
        logits = reference(ids).logits.log_softmax(-1)
    expected = logits[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    difference = (torch.tensor(found) - expected).abs()
    assert difference.mean() < 0.02 and expected.std() > 0.3, (difference.mean(), expected.std())
