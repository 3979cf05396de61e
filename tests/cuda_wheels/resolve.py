"""Resolve every case with the Python of a CUDA wheel: ``python -m tests.cuda_wheels.resolve FOLDER OUT``, FOLDER on PYTHONPATH.

Each case starts as an engine's process does: settings in the environment, the entry point as vLLM finds it, ``EngineArgs``. On
one GPU vLLM also builds the model, on the meta device. OUT gets a JSON object, name of the case -> what was found, or an error.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.cuda_wheels.cases import CASES, OTHERS, REFUSED, STOCK, V2_RUNNER, Case
from tests.cuda_wheels.h100_double import ASKED, stand_in
from tests.models import config_of

ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "qwen3_next": "Qwen3NextForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": {"moe_intermediate_size": 256},  # two ranks share blocks of 128
    "qwen3_next": {"head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "deepseek_v3": {"qk_nope_head_dim": 128, "v_head_dim": 128, "num_nextn_predict_layers": 0},
}
_BLOCKS = 3


def resolve(case: Case, model: str) -> dict[str, Any]:
    """The engine's configuration, and on one GPU what its layers are."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(model=model, skip_tokenizer_init=True, max_model_len=128, **case.engine)
    engine = arguments.create_engine_config()
    settings, compilation = engine.model_config, engine.compilation_config
    found = {
        "quantization": settings.quantization,
        "dtype": str(settings.dtype),
        "eager": settings.enforce_eager,
        "mode": compilation.mode.name,
        "graphs": compilation.cudagraph_mode.name,
        "runner": "V2" if engine.use_v2_model_runner else "V1",
        "async": engine.scheduler_config.async_scheduling,
        "cache": engine.cache_config.cache_dtype,
        "worker": engine.parallel_config.worker_cls,
        "flashinfer": os.environ.get("VLLM_USE_FLASHINFER_SAMPLER"),
        "asked": list(ASKED),
    }
    describe = kinds if case in OTHERS.values() else layers
    return found | (describe(engine) if engine.parallel_config.world_size == 1 else {})


def built(engine: Any) -> Any:
    """Build the model as a worker does, within vLLM's configuration."""
    import torch
    from vllm.distributed import initialize_model_parallel
    from vllm.distributed.parallel_state import destroy_model_parallel
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype

    from jetrl_patch.adapters.vllm.adapter import ADAPTER

    ADAPTER.prepare_worker(SimpleNamespace(vllm_config=engine))
    destroy_model_parallel()
    initialize_model_parallel(1, 1)
    meta, any_stream = torch.device("meta"), mock.patch.multiple(torch.cuda, Stream=mock.MagicMock(), Event=mock.MagicMock())
    here = mock.patch.object(type(current_platform), "current_device", create=True, return_value=meta)  # a delta net's norm asks
    with set_default_torch_dtype(engine.model_config.dtype), meta, any_stream, here:
        return initialize_model(engine)


def elsewhere(model: Any) -> list[str]:
    """The parameters and buffers that are not on the model's device. Captured graphs could not keep their addresses."""
    return sorted(name for held in (model.named_parameters(), model.named_buffers()) for name, t in held if not t.is_meta)


def kinds(engine: Any) -> dict[str, Any]:
    """The layers with a cache: class, implementation and backend. And the modules that would use a kernel of vLLM's own."""
    from vllm.config import set_current_vllm_config

    from jetrl_patch.adapters.vllm.worker import _OWN_KERNELS

    with set_current_vllm_config(engine):
        model = built(engine)
    cached = [layer for layer in engine.compilation_config.static_forward_context.values() if hasattr(layer, "get_attn_backend")]
    names = [
        f"{type(layer).__name__} {type(getattr(layer, 'impl', None)).__name__} {layer.get_attn_backend().get_name()} "
        f"{layer.get_attn_backend().get_builder_cls().__name__}"
        for layer in cached
    ]
    own = Counter(name for module in model.modules() for name in _OWN_KERNELS if getattr(module, name, False))
    return {"layers": dict(Counter(names)), "own kernels": dict(own), "elsewhere": elsewhere(model)}


def layers(engine: Any) -> dict[str, Any]:
    """Build the model, and describe the methods of its layers, its attention and its KV cache."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    with set_current_vllm_config(engine):
        model = built(engine)
        modules = list(model.modules())
        attention = next(module for module in modules if isinstance(module, Attention))
        spec = next(iter(get_kv_cache_spec(engine).values()))
        cache = torch.zeros(cache_shape(attention, spec, engine), dtype=torch.uint8).view(spec.dtype)
        pages = getattr(attention.impl, "pages", None)
    return {
        "methods": dict(Counter(type(module.quant_method).__name__ for module in modules if hasattr(module, "quant_method"))),
        "norms": sorted({type(module).__name__ for module in modules if type(module).__name__.endswith("RMSNorm")}),
        "attention": attention.get_attn_backend().get_name(),
        "implementation": type(attention.impl).__name__,
        "block": spec.block_size,
        "page bytes": spec.page_size_bytes,
        "cache bytes": cache.nbytes // _BLOCKS,
        "elsewhere": elsewhere(model),
        "pages": [list(view.shape) for view in pages(cache)] if pages else None,
    }


def cache_shape(attention: Any, spec: Any, engine: Any) -> tuple[int, ...]:
    """Shape of a layer's KV cache in bytes, from the function of vLLM that allocates it."""
    from vllm.v1 import kv_cache_interface

    backend = attention.get_attn_backend()
    if hasattr(backend, "get_kv_cache_shape"):  # up to 0.25
        sizes = (spec.block_size, spec.num_kv_heads, spec.head_size)
        *outer, last = backend.get_kv_cache_shape(_BLOCKS, *sizes, cache_dtype_str=engine.cache_config.cache_dtype)
        return (*outer, last * spec.dtype.itemsize)
    shape: tuple[int, ...] = kv_cache_interface.compute_layer_kv_cache_shape_bytes(spec, _BLOCKS)
    return shape


def run(case: Case, model: str) -> dict[str, Any]:
    """Resolve a case as in a process of its own: environment, plugin and all are taken back."""
    from vllm.plugins import load_plugins_by_group

    import jetrl_patch

    before = dict(os.environ)
    ASKED.clear()
    try:
        os.environ.update(case.environment)
        if case.plugin is not None:
            os.environ.update(jetrl_patch.Config(**case.plugin).to_env())
        load_plugins_by_group("vllm.general_plugins")["jetrl_patch"]()
        return resolve(case, model)
    except Exception as error:  # the matrix goes on, and a test compares the error with the expected one
        return {"error": type(error).__name__, "text": str(error)}
    finally:
        jetrl_patch.disable()
        os.environ.clear()
        os.environ.update(before)


def main(folder: Path, out: Path) -> None:
    """Resolve all cases."""
    stand_in(folder / "libraries.json")
    import vllm
    from vllm.distributed import init_distributed_environment
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    found: dict[str, Any] = {
        "about": {
            "vllm": vllm.__version__,
            "file": vllm.__file__,
            "platform": type(current_platform).__name__,
            "triton": HAS_TRITON,
        }
    }
    with tempfile.TemporaryDirectory() as root:
        for family, architecture in ARCHITECTURES.items():
            config = config_of(family, architectures=[architecture], dtype="bfloat16", **SIZES[family])
            config.save_pretrained(f"{root}/{family}")
        init_distributed_environment(1, 0, f"file://{root}/rendezvous", 0, "gloo")
        mixture = replace(STOCK, model="qwen3_moe")
        others = {"stock": STOCK, "mixture, stock": mixture, "the V2 runner": V2_RUNNER}
        refused = {name: case for name, (case, *_) in REFUSED.items()}
        for name, case in (others | CASES | OTHERS | refused).items():
            found[name] = run(case, f"{root}/{case.model}")
    out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
