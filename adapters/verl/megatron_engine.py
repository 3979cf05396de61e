"""Megatron's model in a training worker: audited after it is loaded, and what a weight sync needs to know of it.

``MegatronEngine._build_megatron_module`` → ``get_per_tensor_param`` (Megatron-Bridge: whole BF16 tensors under Hugging Face's
names, on every rank) → TransformerEngine's quantizer → the same sync as with FSDP.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from jetrl_patch import runtime
from jetrl_patch.adapters.verl.megatron import PER_BLOCK, check_model
from jetrl_patch.config import Config
from jetrl_patch.errors import ModelError, explain
from jetrl_patch.gate import while_active
from jetrl_patch.sync.manifest import Terms
from jetrl_patch.sync.source import Source
from jetrl_patch.sync.stream import NamedTensor, SyncStats, quantized_stream

#: attributes of Megatron's TransformerConfig -> what they must be once the model is built
BUILT = {"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": False, "first_last_layers_bf16": False}


@dataclass(kw_only=True)
class MegatronSource(Source):
    """A Megatron model whose parameters are BF16 and whose layers are TransformerEngine's.

    Attributes:
        tied: names that share another tensor's value; Megatron-Bridge sends them or not, the rollout ties them itself.
    """

    tied: frozenset[str] = frozenset()

    def stream(self, weights: Iterable[NamedTensor], stats: SyncStats) -> Iterator[NamedTensor]:
        """As ``Source.stream``, without the tied tensors, and always by ``quantize``: there are no modules to ask."""
        own = ((name, weight) for name, weight in weights if name not in self.tied)
        return quantized_stream(
            own, terms=self.terms, layers=self.layers, shapes=self.shapes, stats=stats, quantize=self.quantize
        )

    def quantize(self, layer: str, weight: Any) -> tuple[Any, Any]:
        """The bytes that TransformerEngine makes of this weight, in every forward pass as here."""
        from jetrl_patch.fp8.transformer_engine import quantize_weight

        return quantize_weight(layer, weight, self.terms.scale_format)  # type: ignore[arg-type]


@while_active
def build_megatron_module(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces ``MegatronEngine._build_megatron_module``. Critics (value models) stay what they are."""

    def _build_megatron_module(self: Any) -> Any:
        module = original(self)
        if self.model_config.model_type == "language_model":
            config = runtime.active_config()
            if config.quantized_rollout:
                self._jetrl = prepare(self, module, config)
        return module

    return _build_megatron_module


def prepare(engine: Any, chunks: list[Any], config: Config) -> MegatronSource:
    """Check that the model, as built, computes in the run's format, and note what will be sent.

    Raises:
        ModelError: the settings did not reach Megatron, TransformerEngine runs another recipe, a block holds something
            else than its layers, or a block of 128 holds two of the rollout's layers.
    """
    from jetrl_patch.fp8.transformer_engine import check_recipe, require_te_linears

    hf_config = engine.model_config.hf_config
    check_model(hf_config, int(engine.engine_config.tensor_model_parallel_size))
    _check_built(engine.tf_config, config)
    recipe = importlib.import_module("megatron.core.fp8_utils").get_fp8_recipe(engine.tf_config)
    check_recipe(recipe, config.scale_format, "Megatron's layers")
    if len(chunks) != 1:
        raise ModelError(explain("Megatron's model", required="one chunk", found=f"{len(chunks)}", fix="use no virtual pipeline"))
    require_te_linears(chunks[0], PER_BLOCK * int(hf_config.num_hidden_layers))
    source = announce(hf_config, config)
    runtime.register_layers(source.layers)
    runtime.register_backend("te")
    return source


def announce(hf_config: Any, config: Config) -> MegatronSource:
    """What the model's Hugging Face form says about a sync: its FP8 layers and the shapes of all tensors."""
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


def _check_built(tf_config: Any, config: Config) -> None:
    if not config.fp8_train or config.exact or config.backend != "te" or config.exclude:
        raise ModelError(
            explain(
                "verl's Megatron engine",
                required="precision='fp8-unified', align='linear', backend='te' and nothing excluded",
                found=f"precision={config.precision!r}, align={config.resolved_align!r}, backend={config.backend!r}, "
                f"exclude={list(config.exclude)}",
                fix="set them so, or use strategy=fsdp2",
            )
        )
    have = {name: getattr(tf_config, name, None) or False for name in BUILT}
    have = {name: getattr(value, "value", value) for name, value in have.items()}  # names may be members of an enum
    if have != BUILT:
        raise ModelError(
            explain(
                "the configuration that Megatron's model was built with",
                required=str(BUILT),
                found=str(have),
                fix="let the plugin complete verl's configuration in the driver (it patches verl.utils.config)",
            )
        )
