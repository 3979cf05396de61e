"""Megatron's model in a training worker: check it after loading, and describe it to the weight sync.

``MegatronEngine._build_megatron_module`` → ``get_per_tensor_param`` (Megatron-Bridge: whole BF16 tensors under Hugging Face's
names, on every rank) → TransformerEngine's quantizer → the same sync as with FSDP.
"""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from jetrl_patch import session
from jetrl_patch.adapters.verl.megatron import PER_BLOCK, check_model
from jetrl_patch.config import Config
from jetrl_patch.errors import ModelError, explain
from jetrl_patch.sync.protocol import Terms
from jetrl_patch.sync.send import NamedTensor, SyncStats, quantized_stream
from jetrl_patch.trainer.source import Source

#: attributes of Megatron's TransformerConfig -> their required values after the model is built
BUILT = {"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": False, "first_last_layers_bf16": False}
#: the name of a transformer block in a model or in a stage of it
_BLOCK = re.compile(r"(^|\.)layers\.\d+$")


@dataclass(kw_only=True)
class MegatronSource(Source):
    """A Megatron model with BF16 parameters and TransformerEngine layers.

    Attributes:
        tied: names tied to another tensor; Megatron-Bridge may send them or not, and the rollout ties them itself.
    """

    tied: frozenset[str] = frozenset()

    def stream(self, weights: Iterable[NamedTensor], stats: SyncStats) -> Iterator[NamedTensor]:
        """Like ``Source.stream``, but skip tied tensors and always call ``quantize``: there are no modules to ask."""
        own = ((name, weight) for name, weight in weights if name not in self.tied)
        return quantized_stream(
            own, terms=self.terms, layers=self.layers, shapes=self.shapes, stats=stats, quantize=self.quantize
        )

    def quantize(self, layer: str, weight: Any) -> Any:
        """Return the bytes and scales that TransformerEngine makes of this weight in every forward pass."""
        from jetrl_patch.backends.transformer_engine import quantize_weight

        return quantize_weight(layer, weight, self.terms.scale_format)  # type: ignore[arg-type]


def build_megatron_module(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``MegatronEngine._build_megatron_module``. Critics (value models) stay unchanged."""

    def _build_megatron_module(self: Any) -> Any:
        module = original(self)
        if self.model_config.model_type == "language_model":
            config = session.active_config()
            if config.quantized_rollout:
                self._jetrl = prepare(self, module, config)
        return module

    return _build_megatron_module


def prepare(engine: Any, chunks: list[Any], config: Config) -> MegatronSource:
    """Check that the built model computes in the run's format, and return what the weight sync sends.

    Args:
        chunks: this rank's stages of the model, one unless the pipeline is interleaved.

    Raises:
        ModelError: the settings did not reach Megatron, TransformerEngine runs another recipe, a transformer block has
            other linear layers, or a 128-row block spans two of the rollout's layers.
    """
    from jetrl_patch.backends.transformer_engine import check_recipe

    hf_config = engine.model_config.hf_config
    check_model(hf_config, int(engine.engine_config.tensor_model_parallel_size))
    _check_built(engine.tf_config, config)
    recipe = importlib.import_module("megatron.core.fp8_utils").get_fp8_recipe(engine.tf_config)
    check_recipe(recipe, config.scale_format, "Megatron's layers")
    _check_layers(chunks, hf_config, staged=int(engine.engine_config.pipeline_model_parallel_size) > 1)
    source = announce(hf_config, config)
    session.register_layers(source.layers)
    session.register_backend("te")
    return source


def announce(hf_config: Any, config: Config) -> MegatronSource:
    """Describe a sync from the Hugging Face form of the model: its FP8 layers and the shapes of all tensors."""
    import torch
    from transformers import AutoModelForCausalLM
    from verl.utils.model import convert_weight_keys

    from jetrl_patch.fp8.convert import select_layers

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(hf_config), attn_implementation="eager")
    state = convert_weight_keys(model.state_dict(), model)
    tied = frozenset({"lm_head.weight"} if getattr(hf_config, "tie_word_embeddings", False) else ())
    return MegatronSource(
        layers=select_layers(model),
        modules={},
        shapes={name: tuple(tensor.shape) for name, tensor in state.items() if name not in tied},
        terms=Terms.of(config, "te"),
        tied=tied,
    )


def _check_layers(chunks: list[Any], hf_config: Any, staged: bool) -> None:
    """Check the blocks of this rank's model chunks. A pipeline stage has some of them; the sync checks that all arrive."""
    from jetrl_patch.backends.transformer_engine import require_te_linears

    blocks = [sum(bool(_BLOCK.search(name)) for name, _ in chunk.named_modules()) for chunk in chunks]
    for chunk, held in zip(chunks, blocks, strict=True):
        require_te_linears(chunk, PER_BLOCK * held)
    every, found = int(hf_config.num_hidden_layers), sum(blocks)
    if found > every or (found < every and not staged):
        fix = "use the same config.json on all ranks"
        raise ModelError(explain("Megatron's model", required=f"{every} transformer blocks", found=str(found), fix=fix))


def _check_built(tf_config: Any, config: Config) -> None:
    if not config.fp8_train or config.exact or config.backend != "te" or config.exclude:
        raise ModelError(
            explain(
                "verl's Megatron engine",
                required="precision='fp8-unified', align='linear', backend='te', exclude=[]",
                found=f"precision={config.precision!r}, align={config.resolved_align!r}, backend={config.backend!r}, "
                f"exclude={list(config.exclude)}",
                fix="use these settings, or set strategy=fsdp2",
            )
        )
    have = {name: getattr(tf_config, name, None) or False for name in BUILT}
    have = {name: getattr(value, "value", value) for name, value in have.items()}  # a value may be an enum member
    if have != BUILT:
        raise ModelError(
            explain(
                "the TransformerConfig of Megatron's model",
                required=str(BUILT),
                found=str(have),
                fix="enable jetrl_patch in the driver, where it completes verl's configuration",
            )
        )
