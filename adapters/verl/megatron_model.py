"""verl's Megatron engine: give it the exact layers, or check TransformerEngine's, and describe the model to the weight sync.

``MegatronEngine._build_tf_config`` (exact mode: the layers' spec) → ``_build_megatron_module`` (builds and loads; then the head
and the checks) → ``get_per_tensor_param`` (the bridge: whole BF16 tensors under Hugging Face names, on every rank) → the same
sync as with FSDP.
"""

from __future__ import annotations

import copy
import importlib
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from jetrl_patch import registry, session
from jetrl_patch.adapters.verl import megatron, support
from jetrl_patch.adapters.verl.state import RECORD, WORKER, Prepared
from jetrl_patch.config import Config
from jetrl_patch.errors import ModelError, explain
from jetrl_patch.patching.patch import replacement
from jetrl_patch.sync.delta import Sent
from jetrl_patch.sync.protocol import Terms
from jetrl_patch.sync.send import NamedTensor, SyncStats, quantized_stream

logger = logging.getLogger(__name__)

#: attributes of Megatron's TransformerConfig -> their required values after the model is built
BUILT = {"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": False, "first_last_layers_bf16": False}
#: the name of a transformer block in a model or in a pipeline stage
_BLOCK = re.compile(r"(^|\.)layers\.\d+$")


@dataclass(kw_only=True, eq=False)
class MegatronSource(Prepared):
    """A Megatron model with BF16 parameters, whose layers are the plugin's, TransformerEngine's or Megatron's own.

    Attributes:
        tied: names tied to another tensor. A bridge may send them or not; the rollout ties them itself.
        shared: that other tensor's name. mbridge sends it once for each pipeline stage that holds it.
        stored: the buffers in checkpoints, which a sync sends in FP32.
    """

    tied: frozenset[str] = frozenset()
    shared: str = ""
    stored: frozenset[str] = frozenset()

    def stream(self, weights: Iterable[NamedTensor], stats: SyncStats) -> Iterator[NamedTensor]:
        """Like ``Source.stream``, but skip tied tensors, and what was sent before.

        Megatron's layers are merged ones, so no module holds the bytes of a layer that is sent. They are made here, once, from
        the same values in the same blocks (``megatron.check_model``).
        """
        quantize = self.quantize if self.terms.backend == "te" else None
        return quantized_stream(
            self._untied(weights), terms=self.terms, layers=self.layers, shapes=self.shapes, stats=stats, quantize=quantize,
            fp32=self.stored, base=self.base,
        )  # fmt: skip

    def _untied(self, weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        again = False
        for name, weight in weights:
            if name in self.tied or (name == self.shared and again):
                continue
            again = again or name == self.shared
            yield name, weight

    def quantize(self, layer: str, weight: Any) -> Any:
        """Return the bytes and scales that TransformerEngine makes of this weight in every forward pass."""
        from jetrl_patch.backends.transformer_engine import quantize_weight

        return quantize_weight(layer, weight, self.terms.scale_format)  # type: ignore[arg-type]


# ---- Build the model ----

def _trains(engine: Any, config: Config) -> bool:
    """Whether the plugin has a part in the engine's model. Critics (value models) are not converted."""
    return engine.model_config.model_type == "language_model" and config.quantized_rollout


def _check_model(engine: Any, hf_config: Any, config: Config) -> None:
    own = engine.engine_config
    megatron.check_model(hf_config, megatron.Sizes.of(lambda name: getattr(own, name)), config)


@replacement
def build_tf_config(original: Any, self: Any) -> None:
    """Wrap ``MegatronEngine._build_tf_config``: let the bridge build the exact layers. Raises ModelError, ConfigError."""
    original(self)
    config = session.active_config()
    if not _trains(self, config) or not config.exact:
        return
    from verl.utils.device import get_device_name

    hf_config = self.model_config.hf_config
    _check_model(self, hf_config, config)
    service, own = registry.parallel(), self.tf_config if self.provider is None else self.provider
    if rate := bias_rate(own):
        words = "jetrl_patch: exact mode keeps the correction bias of routers, so the bridge's %s=%g has no effect"
        logger.warning(words, "moe_router_bias_update_rate", rate)
    for name, value in service.settings(hf_config).items():
        setattr(own, name, value)
    ranks = {"rollout_tp": WORKER.rollout_tp, "rollout_ep": WORKER.rollout_ep}
    spec = service.layer_spec(hf_config, config, **ranks, device_type=get_device_name())
    if self.provider is not None:
        self.provider.transformer_layer_spec = spec
        return
    self.bridge._get_transformer_layer_spec = lambda vp_stage=None: spec(own, vp_stage)
    self.bridge.has_vp_stage = True  # mbridge sets it in the method that this replaces


def bias_rate(tf_config: Any) -> float:
    """By how much a bridge's configuration would move the routers' bias in each step. The driver refuses a user's setting."""
    moves = tf_config.num_moe_experts and tf_config.moe_router_enable_expert_bias
    return float(tf_config.moe_router_bias_update_rate) if moves else 0.0


@replacement
def build_megatron_module(original: Any, self: Any) -> Any:
    """Wrap ``MegatronEngine._build_megatron_module``: finish or check the model, and keep what the sync needs."""
    module, config = original(self), session.active_config()
    if _trains(self, config):
        make = prepare_exact if config.exact else prepare_te if config.fp8_train else prepare_bf16
        prepared = make(self, module, config)
        staged = int(self.engine_config.pipeline_model_parallel_size) > 1
        _check_layers(module, self.model_config.hf_config, staged)
        session.register(layers=prepared.layers, backend=prepared.terms.backend, attention=prepared.terms.attention)
        RECORD.set(self, prepared)
    return module


def prepare_exact(engine: Any, chunks: list[Any], config: Config) -> MegatronSource:
    """Finish a model whose layers ``build_tf_config`` chose. Raises ModelError if Megatron has built others."""
    from verl.utils.device import get_device_name
    from verl.workers.rollout.utils import get_vision_placeholder_token_ids

    from jetrl_patch.backends import choose_backend
    from jetrl_patch.exact.dispatch import chosen_attention

    registry.parallel().finish(chunks)
    hf_config, kind = engine.model_config.hf_config, get_device_name()
    backend = choose_backend(config.backend, kind, config.scale_format)
    source = announce(hf_config, config, backend, chosen_attention(kind))
    tokenizer, processor = (getattr(engine.model_config, name, None) for name in ("tokenizer", "processor"))
    source.vocabulary = None if tokenizer is None else len(tokenizer)
    source.banned, source.device_type = list(get_vision_placeholder_token_ids(processor)), kind
    return source


def prepare_te(engine: Any, chunks: list[Any], config: Config) -> MegatronSource:
    """Check that the built model computes in the run's format, and return what the weight sync sends.

    ``chunks`` are this rank's parts of the model; one, unless the pipeline is interleaved. Raises ModelError if the settings did
    not reach Megatron, TransformerEngine runs another recipe, a transformer block has other linear layers, or a 128-row block
    spans two of the rollout's layers.
    """
    from jetrl_patch.backends.transformer_engine import check_recipe, require_te_linears

    hf_config = engine.model_config.hf_config
    _check_model(engine, hf_config, config)
    _check_built(engine.tf_config)
    recipe = importlib.import_module("megatron.core.fp8_utils").get_fp8_recipe(engine.tf_config)
    check_recipe(recipe, config.scale_format, "Megatron's layers")
    for chunk in chunks:
        require_te_linears(chunk, megatron.PER_BLOCK * _blocks(chunk))
    return announce(hf_config, config, "te")


def prepare_bf16(engine: Any, _: list[Any], config: Config) -> MegatronSource:
    """What the weight sync sends of a model in BF16, whose rollout alone is quantized. Raises ModelError for other families."""
    hf_config = engine.model_config.hf_config
    _check_model(engine, hf_config, config)
    return announce(hf_config, config, "")


def announce(hf_config: Any, config: Config, backend: str, attention: str = "") -> MegatronSource:
    """Describe a sync from the model's Hugging Face configuration: its FP8 layers and the shapes of all tensors."""
    import torch
    from transformers import AutoModelForCausalLM
    from verl.utils.model import convert_weight_keys

    from jetrl_patch.fp8.convert import expert_modules, select_layers, shapes_per_expert, stored_buffers
    from jetrl_patch.fp8.mixture import WHOLE, ExpertSplit

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(hf_config), attn_implementation="eager")
    state = convert_weight_keys(model.state_dict(), model)
    ties = bool(getattr(hf_config, "tie_word_embeddings", False))
    tied, embedding = frozenset({"lm_head.weight"} if ties else ()), model.get_input_embeddings().weight
    split = ExpertSplit.of(WORKER.rollout_tp, WORKER.rollout_ep) if expert_modules(model) else WHOLE
    return MegatronSource(
        layers=select_layers(model),
        modules={},
        shapes=shapes_per_expert({name: tuple(tensor.shape) for name, tensor in state.items() if name not in tied}),
        terms=Terms.of(config, backend, split, attention),
        tied=tied,
        shared=next(name for name, weight in model.named_parameters() if weight is embedding) if ties else "",
        stored=frozenset(stored_buffers(model)),
        base=Sent() if config.sync == "delta" else None,
    )


def _blocks(chunk: Any) -> int:
    """How many transformer blocks a part of the model holds."""
    return sum(bool(_BLOCK.search(name)) for name, _ in chunk.named_modules())


def _check_layers(chunks: list[Any], hf_config: Any, staged: bool) -> None:
    """Check the transformer blocks of this rank. A pipeline stage has only some; the sync checks that all of them arrive."""
    every, found = int(hf_config.num_hidden_layers), sum(map(_blocks, chunks))
    if found > every or (found < every and not staged):
        fix = "use the same config.json on all ranks"
        raise ModelError(explain("Megatron's model", required=f"{every} transformer blocks", found=str(found), fix=fix))


def _check_built(tf_config: Any) -> None:
    have = {name: getattr(tf_config, name, None) or False for name in BUILT}
    have = {name: getattr(value, "value", value) for name, value in have.items()}  # a value may be an enum member
    if have != BUILT:
        fix = "enable jetrl_patch in the driver, where it completes verl's configuration"
        raise ModelError(explain("the TransformerConfig of Megatron's model", required=str(BUILT), found=str(have), fix=fix))


# ---- Run the model -------------------------------------------------------------------------------

@replacement
def forward_backward_batch(original: Any, self: Any, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
    """Wrap ``MegatronEngine.forward_backward_batch``: use each sample's temperature, and quantize a weight once for the batch."""
    from torch import nn

    from jetrl_patch.fp8.unchanged import unchanged_weights

    if RECORD.get(self) is None or not session.active_config().exact:
        return original(self, data, loss_function, forward_only)
    data = support.with_temperatures(data)
    with unchanged_weights(nn.ModuleList(self.module), gradients=not forward_only):
        return original(self, data, loss_function, forward_only)
