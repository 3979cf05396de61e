"""Replacements of vLLM's ops: exact ops, exact BF16 GEMMs, and norms and activations fused with the quantization."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm, RMSNormGated
from vllm.model_executor.layers.linear import UnquantizedLinearMethod, register_weight_loader_v2_supported_method
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding, RotaryEmbeddingBase
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import DeepseekScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.linear_scaling_rope import LinearScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding, apply_interleaved_rope
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from jetrl_patch import session
from jetrl_patch.adapters.vllm.formats import logger
from jetrl_patch.adapters.vllm.method import QuantizedLinearMethod, quantized_modules
from jetrl_patch.adapters.vllm.shards import hf_name
from jetrl_patch.backends.gpu import GpuBackend
from jetrl_patch.config.formats import ScaleFormat
from jetrl_patch.errors import ModelError, explain
from jetrl_patch.exact import ops
from jetrl_patch.exact.modules import swap, unswap
from jetrl_patch.fp8.producers import multiplied, normed
from jetrl_patch.models.families import Family, family_of
from jetrl_patch.models.structure import has_latent_attention

# ---- Exact ops -----------------------------------------------------------------------------------
# They have Hugging Face's order of operations and rounding. vLLM's table of out-of-tree ops replaces each class by name when it
# builds a model.

def _norm_of_sum(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, one_plus: bool = False) -> Any:
    if residual is None:
        return ops.rms_norm(x, weight, eps, one_plus)
    residual = residual + x
    return ops.rms_norm(residual, weight, eps, one_plus), residual


class ExactRMSNorm(RMSNorm):
    """Normalizes the sum of input and residual rounded to BF16, as Hugging Face does; vLLM normalizes the unrounded sum."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """``x [..., D]`` BF16, ``residual`` the same or None -> the norm, and the new residual if there was one."""
        if self.variance_size_override is not None or not self.has_weight:
            raise ModelError(
                "align='exact' does not support an RMSNorm over part of the width or without a weight. Use align='linear'."
            )
        return _norm_of_sum(x, residual, self.weight.data, self.variance_epsilon)


class ExactOnePlusNorm(GemmaRMSNorm):
    """Normalizes the sum of input and residual rounded to BF16, and multiplies by 1 + weight."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """``x [..., D]`` BF16, ``residual`` the same or None -> the norm, and the new residual if there was one."""
        return _norm_of_sum(x, residual, self.weight.data, self.variance_epsilon, one_plus=True)


class ExactGatedNorm(RMSNormGated):
    """RMSNorm over the whole width, multiplied by SiLU(gate) rounded to BF16."""

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """``x`` and ``z [..., D]`` BF16 -> ``[..., D]`` BF16."""
        if z is None or self.group_size is not None or not self.norm_before_gate or self.activation not in ("silu", "swish"):
            required, found = "SiLU after a norm of the whole width", f"{self.activation}, groups of {self.group_size}"
            raise ModelError(explain("align='exact' of a gated norm", required=required, found=found, fix="use align='linear'"))
        return ops.silu_mul(z, ops.rms_norm(x, self.weight.data, self.eps))


class ExactLogitsProcessor(LogitsProcessor):
    """Divides the logits, as the trainer's model does; vLLM multiplies them by the rounded reciprocal."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        hf_config = get_current_vllm_config().model_config.hf_text_config
        family = family_of(hf_config)
        key = family.logits_divisor if family else None
        self.divisor = None if key is None else getattr(hf_config, key)
        if self.divisor is not None:
            self.scale = 1.0

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """Logits ``[M, V]``, or None on a rank that does not sample."""
        logits: torch.Tensor | None = super().forward(*args, **kwargs)
        return logits if logits is None or self.divisor is None else logits / self.divisor


class ExactSiluAndMul(SiluAndMul):
    """``silu(gate) * up`` with the trainer's rounding."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [..., 2D]`` BF16 -> ``[..., D]`` BF16."""
        gate, up = x.chunk(2, dim=-1)
        return ops.silu_mul(gate, up)


def _table(rotary: RotaryEmbeddingBase) -> torch.Tensor:
    """``[2, P, D/2]`` BF16: cosines, then sines, each contiguous, on the device where vLLM builds the model.

    Raises ModelError for another embedding than the trainer's.
    """
    model = get_current_vllm_config().model_config
    frequencies = ops.rope_frequencies(model.hf_text_config)
    width, halves = 2 * frequencies.shape[0], not has_latent_attention(model.hf_text_config)
    if rotary.is_neox_style != halves or rotary.rotary_dim != width:
        required = f"the trainer's rotary embedding (rotary_dim={width}, neox={halves})"
        found = f"rotary_dim={rotary.rotary_dim}, neox={rotary.is_neox_style}"
        raise ModelError(explain("align='exact' in vLLM", required=required, found=found, fix="use align='linear'"))
    positions = max(rotary.max_position_embeddings, model.max_model_len)
    table = torch.stack(ops.rotary_table(frequencies, positions, ops.rope_magnitude(model.hf_text_config)))
    return table.to(torch.get_default_device())  # a first step that moved the buffer would move what captured graphs read


def _turn(
    rotary: RotaryEmbeddingBase, tables: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate ``query`` and ``key [T, heads * D]`` by two ``tables [P, D/2]`` at ``positions [T]``: new tensors.

    If neighboring numbers of a head are one pair, they come out in two halves, as in the trainer.
    """
    cos, sin = tables

    def turn(x: torch.Tensor) -> torch.Tensor:
        heads_ThD = x.view(positions.shape[0], -1, rotary.head_size)
        if not rotary.is_neox_style:
            heads_ThD = torch.cat((heads_ThD[..., 0::2], heads_ThD[..., 1::2]), -1)
        return ops.apply_rotary(heads_ThD, cos, sin, positions).view(x.shape)

    return turn(query), None if key is None else turn(key)


class ExactRotaryEmbedding(RotaryEmbedding):
    """Rounds the tables, products and sums to BF16, as Hugging Face's ``apply_rotary_pos_emb`` does."""

    def _compute_cos_sin_cache(self) -> torch.Tensor:
        family = family_of(get_current_vllm_config().model_config.hf_config)
        if family is not None and family.tower:  # of vLLM's vision tower, which ``tower`` replaces before it computes
            return super()._compute_cos_sin_cache()
        return _table(self)

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``positions [T]``, ``query`` and ``key [T, heads * D]`` BF16 -> both rotated, new tensors."""
        return _turn(self, self._match_cos_sin_cache_dtype(query), positions.flatten(), query, key)


def _followed(rotary: MRotaryEmbedding, table_3TD: torch.Tensor) -> torch.Tensor:
    """Cosines or sines of three positions of each token -> those that the elements of its heads follow, ``[T, D/2]``."""
    assert rotary.mrope_section is not None
    if rotary.mrope_interleaved:
        return apply_interleaved_rope(table_3TD, rotary.mrope_section)
    parts = table_3TD.split(list(rotary.mrope_section), dim=-1)
    return torch.cat([part[axis] for axis, part in enumerate(parts)], dim=-1)


class ExactMRotaryEmbedding(MRotaryEmbedding):
    """The same for vision-language models: each element of a head follows the time, the height or the width of its token."""

    def _compute_cos_sin_cache(self) -> torch.Tensor:
        return _table(self)

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None, offsets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``positions [3, T]``, or ``[T]`` if all three are equal. The rest as ``ExactRotaryEmbedding.forward``."""
        tables = self._match_cos_sin_cache_dtype(query)
        if positions.ndim == 2:
            tables = torch.stack([_followed(self, table[positions]) for table in tables])
            positions = torch.arange(positions.shape[1], device=positions.device)
        return _turn(self, tables, positions, query, key)


class ExactLlama3RotaryEmbedding(ExactRotaryEmbedding, Llama3RotaryEmbedding):
    """Replaces vLLM's separate class for Llama 3 frequencies."""


class ExactLinearScalingRotaryEmbedding(ExactRotaryEmbedding, LinearScalingRotaryEmbedding):
    """Replaces vLLM's separate class for linearly scaled positions."""


class ExactYaRNScalingRotaryEmbedding(ExactRotaryEmbedding, YaRNScalingRotaryEmbedding):
    """Replaces vLLM's separate class for YaRN."""


class ExactDeepseekScalingRotaryEmbedding(ExactRotaryEmbedding, DeepseekScalingRotaryEmbedding):
    """Replaces vLLM's separate class for the YaRN of latent attention."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        DeepseekScalingRotaryEmbedding.__init__(self, *args, **kwargs)  # the other base has no such arguments


OPS: dict[str, type] = {
    "LogitsProcessor": ExactLogitsProcessor,
    "RMSNorm": ExactRMSNorm,
    "GemmaRMSNorm": ExactOnePlusNorm,
    "RMSNormGated": ExactGatedNorm,
    "SiluAndMul": ExactSiluAndMul,
    "RotaryEmbedding": ExactRotaryEmbedding,
    "MRotaryEmbedding": ExactMRotaryEmbedding,
    "Llama3RotaryEmbedding": ExactLlama3RotaryEmbedding,
    "LinearScalingRotaryEmbedding": ExactLinearScalingRotaryEmbedding,
    "YaRNScalingRotaryEmbedding": ExactYaRNScalingRotaryEmbedding,
    "DeepseekScalingRotaryEmbedding": ExactDeepseekScalingRotaryEmbedding,
}


# ---- Exact BF16 GEMMs: ``lm_head``, and the linears that ``exclude`` names -----------------------
# On a CPU, vLLM packs these weights once after loading, so a later update has no effect, and its GEMM's rounding depends on the
# batch size. This GEMM reads the weight as loaded and is batch-invariant: a row's bits depend on that row alone. The trainer has
# the same GEMM.

class ExactHeadMethod(UnquantizedEmbeddingMethod):
    """For ``lm_head``, and for the embedding if the two are tied. With ``fp32`` logits stay unrounded."""

    def __init__(self, fp32: bool = False) -> None:
        super().__init__()
        self.fp32 = fp32

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing: the weight is used as loaded."""

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x [M, K]`` BF16 -> logits ``[M, V]`` BF16 or FP32 of this rank's part of the vocabulary."""
        product = ops.head_linear_fp32 if self.fp32 else ops.linear
        logits = product(x, layer.weight.data)
        return logits if bias is None else logits + bias


class ExactHead(ParallelLMHead):
    """Replaces ``ParallelLMHead``: some vLLM models build it without a quantization."""

    quant_method: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if type(self.quant_method) is UnquantizedEmbeddingMethod:
            self.quant_method = ExactHeadMethod(session.active_config().fp32_head)


@register_weight_loader_v2_supported_method
class ExactLinearMethod(UnquantizedLinearMethod):
    """For linears that are BF16 on both sides."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing: the weight is used as loaded."""

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x [..., K]`` BF16 -> ``[..., N]`` BF16; the bias is added after rounding."""
        return ops.linear(x, layer.weight.data, bias)

    def partial_sum(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        """``x [M, K of this rank]`` BF16 -> the unrounded FP32 sum ``[M, N]``."""
        return ops.partial_sum(x, layer.weight.data)


# ---- Norms and activations that quantize their result for the next FP8 linear, in one launch -----
# A norm qualifies if only one of vLLM's linear layers reads it (``Family.readers``); only ``down_proj`` reads silu(gate) * up. In
# a loaded model such a module gets a class that returns a ``Quantized``. vLLM's model code passes it on unread, and
# ``QuantizedLinearMethod`` multiplies it. Since 0.30 vLLM has a similar class (``QuantizedActivation``), but only for its own
# formats.
#
# A module is left alone if its linear is not quantized, if the device has no such kernels, or if they do not support the width.
# It runs its original code if the precision guard has moved the linear to BF16, or if the kernels do not support a tensor. In
# exact mode fusing changes no byte. With ``align="linear"`` the fused kernels have the trainer's values; vLLM's kernels sometimes
# round to a neighbor.

#: activation of a block -> the only linear that reads it
ACTIVATIONS = {"act_fn": ("down_proj",)}
#: numbers of rows to compare: one, some, and more than a tile
TRIED = (1, 7, 130)


class _Producer:
    """Knows the linear that reads it. The reference is not a submodule, because the linear already is one elsewhere."""

    jetrl_reader: Any
    jetrl_backend: GpuBackend

    def scale_format(self) -> ScaleFormat | None:
        """Return the scale format of the linear's input; None if the linear is no longer quantized."""
        method = self.jetrl_reader.quant_method
        return method.format.config.scale_format if isinstance(method, QuantizedLinearMethod) else None


class FusedNorm(_Producer):
    """RMSNorm of the sum with the residual, quantized."""

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """``x [M, K]`` BF16, ``residual`` the same or None -> ``Quantized``, and the new residual if there was one."""
        form = self.scale_format()
        if form is None or not _plain(x) or not (residual is None or _plain(residual)):
            return super().forward(x, residual)  # type: ignore[misc]
        rows, total = normed(x, residual, self.weight.data, self.variance_epsilon, self.jetrl_backend, form)
        return rows if residual is None else (rows, total)


class FusedSiluAndMul(_Producer):
    """``silu(gate) * up``, quantized."""

    def forward(self, x: torch.Tensor) -> Any:
        """``x [M, 2K]`` BF16 -> ``Quantized``."""
        form = self.scale_format()
        if form is None or not _plain(x):
            return super().forward(x)  # type: ignore[misc]
        return multiplied(x, self.jetrl_backend, form)


def _plain(x: torch.Tensor) -> bool:
    return x.dim() == 2 and x.dtype == torch.bfloat16 and x.is_contiguous()


def fuse(model: torch.nn.Module, family: Family) -> list[str]:
    """Fuse modules of a loaded model with vLLM's own code, in place. Returns their names. A second call changes nothing."""
    if not family.covers("fused") or family.rollout != "vllm" or family.tower:  # untested with vision-language models
        return []
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    quantized = {name: layer for layer, method in quantized_modules(model) for name in method.names}
    changed = []
    for prefix, module in model.named_modules():
        parent, _, leaf = hf_name(prefix, mapper).rpartition(".")
        if isinstance(module, FusedNorm | FusedSiluAndMul):
            continue
        kind: type
        if isinstance(module, RMSNorm) and _whole(module):
            kind, readers = FusedNorm, family.readers.get(leaf, ())
        elif isinstance(module, SiluAndMul):
            kind, readers = FusedSiluAndMul, ACTIVATIONS.get(leaf, ())
        else:
            continue
        layers: list[Any] = [quantized.get(f"{parent}.{reader}") for reader in readers]
        if not layers or layers[0] is None or any(layer is not layers[0] for layer in layers):
            continue  # vLLM does not fuse exactly these linears into one quantized layer
        backend = layers[0].quant_method.format.producers(layers[0])
        if backend is not None:
            swap(module, kind)
            module.__dict__.update(jetrl_reader=layers[0], jetrl_backend=backend)  # setattr would register a submodule
            changed.append(prefix)
    return changed


def _whole(norm: RMSNorm) -> bool:
    """Whether it normalizes its whole width with a BF16 weight."""
    return norm.has_weight and norm.variance_size_override is None and norm.weight.dtype == torch.bfloat16


@torch.no_grad()
def keep_equal(model: torch.nn.Module) -> list[str]:
    """Compare each kind of fused module with the two steps that it replaces, on this device, once per width.

    If the bytes differ, trainer and rollout would disagree. So all modules of that kind and width run in two steps again, with a
    warning. Returns their names.
    """
    kinds: dict[tuple[bool, int], dict[str, Any]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FusedNorm | FusedSiluAndMul):
            kinds.setdefault((isinstance(module, FusedNorm), module.jetrl_reader.weight.shape[1]), {})[name] = module
    apart: list[str] = []
    for modules in kinds.values():
        names = list(modules)
        if all(_is_equal(modules[names[0]], M) for M in TRIED):
            continue
        for module in modules.values():
            unswap(module)
        apart += names
        words = "jetrl_patch: fused with the quantization, %s and %d more would give other bytes here, so they run in two steps"
        logger.warning(words, names[0], len(names) - 1)
    return apart


def _is_equal(module: Any, M: int) -> bool:
    """Whether the fused module has the bytes of the two steps, for M random rows."""
    weight, norm = module.jetrl_reader.weight, isinstance(module, FusedNorm)
    generator = torch.Generator(weight.device).manual_seed(M)
    shape = (2, M, weight.shape[1]) if norm else (1, M, 2 * weight.shape[1])
    given = torch.randn(*shape, generator=generator, device=weight.device).to(torch.bfloat16)
    fused = module.forward(*given)
    kind: Any = FusedNorm if norm else FusedSiluAndMul
    plain = super(kind, module).forward(*given.clone())
    (rows, *sums), (y, *totals) = (fused, plain) if norm else ((fused,), (plain,))
    pairs = zip((*rows, *sums), (*module.jetrl_backend.quantize_activation(y, module.scale_format()), *totals), strict=True)
    return all(torch.equal(*(t.contiguous().view(torch.uint8) for t in pair)) for pair in pairs)
