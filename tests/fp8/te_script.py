"""What the plugin makes of TransformerEngine's own classes, without a GPU: prints its answers as JSON behind "FACTS ".

Arguments: the run's scale format, and the other one. TransformerEngine's Python is imported without its libraries
(``NVTE_PROJECT_BUILDING``), beside stand-ins for the enums of its extension.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import sys
import types
from typing import Any
from unittest import mock

import torch

from jetrl_patch.backends import transformer_engine
from jetrl_patch.backends.quantize import dequantize_weight
from jetrl_patch.config.formats import FORMATS
from jetrl_patch.errors import JetrlError
from tests.fp8 import te_fakes


class _Native(type):
    """A stand-in for anything of the extension that is only looked up, called or counted while its Python is imported."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls

    def __int__(cls) -> int:
        return 0


class Native(metaclass=_Native):
    pass


#: transformer_engine.h's numbers
DType = enum.IntEnum("DType", {
    "kByte": 0, "kInt32": 2, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6, "kFloat8E4M3": 7, "kFloat8E5M2": 8, "kFloat4E2M1": 10,
})  # fmt: skip
Backends = enum.IntEnum("Backends", {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2})


def load() -> Any:
    """Import ``transformer_engine.pytorch`` beside an extension that computes nothing."""
    extension: Any = types.ModuleType("transformer_engine_torch")
    extension.DType, extension.NVTE_Fused_Attn_Backend = DType, Backends
    extension.__getattr__ = lambda name: getattr(Native, name)
    sys.modules["transformer_engine_torch"] = extension
    sys.modules["transformer_engine.pytorch.onnx_extensions"] = mock.MagicMock()  # needs onnxscript
    importlib.import_module("transformer_engine.common").load_framework_extension = lambda name: None
    return importlib.import_module("transformer_engine.pytorch")


def parameters(kind: type) -> Any:
    return inspect.signature(kind.__init__).parameters


def verdict(call: Any, *args: Any) -> str | None:
    try:
        call(*args)
    except JetrlError as error:
        return str(error)
    return None


#: what a quantized tensor holds
PARTS = (
    "rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv", "fp8_dtype", "quantizer", "is_2D_scaled",
)  # fmt: skip


def made(blockwise: Any, scale_format: Any, **changed: Any) -> Any:
    """A real ``Float8BlockwiseQTensor`` [200, 640] with the bytes and scales of a stand-in's."""
    pow2 = FORMATS[scale_format].powers_of_two
    parts = te_fakes.quantized(torch.randn(200, 640).bfloat16(), pow2).parts
    quantizer = blockwise.Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=False, force_pow_2_scales=pow2)
    parts = {**{name: parts[name] for name in PARTS}, "fp8_dtype": DType.kFloat8E4M3, "quantizer": quantizer, **changed}
    return blockwise.Float8BlockwiseQTensor(shape=(200, 640), dtype=torch.bfloat16, device=torch.device("cpu"), **parts)


def main(scale_format: Any, other: Any) -> None:
    te = load()
    recipes = importlib.import_module("transformer_engine.common.recipe")
    blockwise = importlib.import_module("transformer_engine.pytorch.tensor.float8_blockwise_tensor")
    kinds = [kind for kind in vars(recipes).values() if isinstance(kind, type) and issubclass(kind, recipes.Recipe)]
    given = {kind.__name__: kind() for kind in kinds if kind not in (recipes.Recipe, recipes.CustomRecipe)}
    given |= {
        "CustomRecipe": recipes.CustomRecipe(qfactory=lambda role: None),
        "hybrid": recipes.Float8BlockScaling(fp8_format=recipes.Format.HYBRID),
        "rows": recipes.Float8BlockScaling(w_block_scaling_dim=1),
        "override": recipes.Float8BlockScaling(backward_override="high_precision"),
    }
    tensor = made(blockwise, scale_format)
    turned = made(blockwise, scale_format, rowwise_data=None, rowwise_scale_inv=None)
    q, s = transformer_engine.take("layer", tensor, scale_format)
    values = tensor.dequantize(dtype=torch.float32)
    have = tensor.get_metadata()
    facts = {
        "recipes": {name: verdict(transformer_engine.check_recipe, one, scale_format, "here") for name, one in given.items()},
        "other format": verdict(transformer_engine.check_recipe, recipes.Float8BlockScaling(), other, "here"),
        "linears": {
            name: transformer_engine._has_base(getattr(te, name), *transformer_engine.LINEARS)
            for name in (*transformer_engine.LINEARS, "LayerNorm", "RMSNorm", "DotProductAttention")
        },
        "signature": set(parameters(te_fakes.Float8BlockQuantizer)) <= set(parameters(blockwise.Float8BlockQuantizer)),
        "tensor": transformer_engine.is_te_tensor(tensor),
        "bytes": torch.equal(q.view(torch.uint8), have["rowwise_data"]),
        "scales": torch.equal(s, have["rowwise_scale_inv"][:, :5]),
        "values": torch.equal(values, dequantize_weight(q, s)),
        "turned": verdict(transformer_engine.take, "layer", turned, scale_format),
    }
    print("FACTS", json.dumps(facts))


if __name__ == "__main__":
    main(*sys.argv[1:])
